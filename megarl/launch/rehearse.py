"""A rehearsal: where every process of a run will be and what it will see, and two real steps of the run made small.

The small run has the layouts, placement, engines, schedule and transports of the run, on a Ray that says it has the GPUs. Each
rank is a CPU process, the model is one of the same architecture with random weights (`models/shrunk.py`), the prompts are sums.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config, parse_config
from megarl.config.engine_kinds import capabilities_of
from megarl.errors import ConfigError
from megarl.models.registry import load_hf_config
from megarl.models.shrunk import shrunk_config, shrunk_layout
from megarl.platform import REHEARSAL
from megarl.reshard.communicators import Communicators
from megarl.reshard.cost import ClusterRates, cost_of
from megarl.reshard.placement import Placement, PlacementRequest, place, planned_bundles
from megarl.reshard.relays import Machines
from megarl.reshard.run_plan import check_transport, engine_target, plan_of_run

MOST_PROCESSES = 32
"""Ranks and engines' ranks that are started, at most; of larger runs only the placement is shown."""
STEPS = 2
PARALLEL = ("tp", "cp", "pp", "dp", "ep")
ENGINE_ARGUMENTS = ("ep_size", "attn_dp_size", "dp_size", "enable_dp_attention")
"""Of `rollout.engine_args`, those that say how an engine is laid out."""
SUMS = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]


@dataclass(frozen=True)
class Rehearsed:
    """What two real steps came to: processes, nodes, and the largest difference between trainer's and engines' log-probs."""

    processes: int
    nodes: int
    log_prob_difference: float
    folder: str


def planned_placement(config: Config, gpus_per_node: int) -> Placement:
    """Where the run would be on nodes of so many GPUs, all free.

    Raises:
        MegarlError: it cannot be placed, or weights could not travel.
    """
    request = PlacementRequest.of(config)
    placement = place(request, planned_bundles(request.bundles, gpus_per_node))
    check_transport(config, placement)
    return placement


def processes(config: Config, placement: Placement) -> list[dict[str, Any]]:
    """Every process of a run as it would find itself: its node and GPUs, and who its neighbours are.

    A rank sees all GPUs of its node and works on `gpu`. An engine's process has a rank on each of its `gpus`, the first of
    which SGLang is given as `base_gpu_id`; of an engine on several nodes `node_rank` is this one's number of `nnodes`.
    """
    found: list[dict[str, Any]] = []
    for group, layout in config.layouts.items():
        at = [layout.coords(rank) for rank in range(layout.world_size)]
        for rank, bundle in enumerate(placement.ranks[group]):
            mine = at[rank]
            members = {name: _members(at, mine, name) for name in PARALLEL if getattr(layout, name) > 1}
            where = placement.bundles[bundle]
            found.append(
                {
                    "process": f"{group} {rank}",
                    "node": where.node,
                    "gpu": where.gpu,
                    "world": layout.world_size,
                    "groups": members,
                }
            )
    for engine in range(len(placement.engines)):
        nodes = placement.engine_nodes(engine)
        for number, bundles in enumerate(nodes):
            gpus = placement.gpus(bundles)
            found.append(
                {
                    "process": f"engine {engine}" + (f", node {number}" if len(nodes) > 1 else ""),
                    "node": placement.bundles[bundles[0]].node,
                    "gpus": list(gpus),
                    "base_gpu_id": gpus[0] if gpus else None,
                    "nnodes": len(nodes),
                    "node_rank": number,
                }
            )
    return found


def _members(at: list[Any], mine: Any, name: str) -> list[int]:
    """The ranks that differ from `mine` in nothing but `name`."""
    fixed = ("etp", "edp", "pp") if name == "ep" else tuple(other for other in ("tp", "cp", "dp", "pp") if other != name)
    return [rank for rank, one in enumerate(at) if all(getattr(one, field) == getattr(mine, field) for field in fixed)]


def weights_way(config: Config, placement: Placement) -> dict[str, Any]:
    """How weights travel: bytes that each training rank sends, process groups, and what goes by relays; none without a plan."""
    if capabilities_of(config.rollout).weights != "slices":
        return {}
    plan = plan_of_run(config)
    cost = cost_of(plan, ClusterRates(), colocated=config.resources.placement == "colocated")
    found: dict[str, Any] = {
        "transport": config.rollout.weight_transport,
        "bytes_sent": list(cost.sent),
        "bytes_received": list(cost.received),
    }
    if config.rollout.weight_transport == "process_group":
        groups = Communicators.of(plan)
        found["communicators"] = {
            "of_a_training_rank": list(groups.of_a_rank),
            "of_an_engine_rank": 1,
            "members": groups.members,
        }
    elif config.rollout.weight_transport == "shared_memory" and len(placement.machines) > 1:
        machines = Machines.of(placement)
        relayed = sum(
            bucket.nbytes
            for engine in range(plan.target.engines)
            for engine_rank in range(plan.target.ranks)
            for bucket in plan.receives(engine, engine_rank)
            if not machines.beside(bucket.rank, engine, engine_rank)
        )
        found["bytes_by_relays"] = relayed
    return found


def is_small_enough(config: Config) -> bool:
    """Whether the run's processes can be started on this machine."""
    request = PlacementRequest.of(config)
    ranks = sum(layout.world_size for layout in request.groups.values())
    return ranks + request.engines * request.engine_tp <= MOST_PROCESSES


def rehearse(config: Config, placement: Placement) -> Rehearsed:
    """Run two steps of the run made small, in `<run folder>/rehearsal`.

    Raises:
        MegarlError: whatever ends the small run.
    """
    if config.model.architecture is not None:
        raise ConfigError("model.architecture is set, and a rehearsal makes small models of megarl's own families only")
    folder = Path(config.run_folder).resolve() / "rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    nodes = Counter(bundle.node for bundle in placement.bundles)
    os.environ[REHEARSAL] = "1"
    try:
        from megarl.trainers.rl.loop import train
        from megarl.workers.advertised_cluster import advertised_cluster

        with advertised_cluster(list(nodes.values())) as address:
            small = small_run(config, folder, address)
            train(small)
    finally:
        del os.environ[REHEARSAL]
    rows = [json.loads(line) for line in (Path(small.run_folder) / "metrics.jsonl").read_text().splitlines()]
    count = sum(len(ranks) for ranks in placement.ranks.values()) + sum(map(len, placement.engines))
    largest = max((float(row.get("mismatch/log_prob_max", 0.0)) for row in rows), default=0.0)
    return Rehearsed(count, len(nodes), largest, str(small.run_folder))


def small_run(config: Config, folder: Path, ray_address: str) -> Config:
    """The run made small, with its model and its prompts written into `folder`."""
    rollout = config.rollout
    sequences = config.algorithm.mini_batches * math.lcm(*(layout.dp for layout in config.layouts.values()))
    prompts = math.lcm(sequences, rollout.engines)
    engine_args = {name: value for name, value in rollout.engine_args.items() if name in ENGINE_ARGUMENTS}
    target = engine_target(rollout.tp, engine_args)
    layouts = config.layouts
    _write_model(
        folder / "model",
        lambda vocab: shrunk_config(
            load_hf_config(config.model.path),
            layouts.values(),
            engine_ranks=target.ranks,
            engine_ep=target.ep,
            vocab_size=vocab,
        ),
    )
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    role = {"max_tokens_per_micro_batch": 256, "threads_per_rank": 1}
    tree: dict[str, Any] = {
        "run": {
            "name": "run",
            "folder": str(folder),
            "steps": STEPS,
            "save_every": STEPS,
            "max_restarts": 0,
            "resume": "never",
        },
        "model": {"path": str(folder / "model"), "dtype": "float32", "recompute": config.model.recompute},
        "policy": role | {"layout": shrunk_layout(config.policy.layout)},
        "algorithm": config.algorithm.model_dump(mode="json") | {"shaping": {}},
        "data": {"train": {"source": "jsonl", "path": str(folder / "sums.jsonl")}, "max_prompt_tokens": 32},
        "rollout": {
            "engine": rollout.engine,
            "engines": rollout.engines,
            "tp": rollout.tp,
            "weight_transport": rollout.weight_transport,
            "schedule": rollout.schedule.model_dump(mode="json"),
            "engine_args": engine_args,
            "prompts_per_step": prompts,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "threads": 1,
        },
        "rewards": [{"name": "exact_number"}],
        "resources": {"placement": config.resources.placement, "ray_address": ray_address},
    }
    if config.uses_critic:
        tree["critic"] = role | {"layout": shrunk_layout(config.critic.layout)}
    if config.reference.layout is not None:
        tree["reference"] = {"layout": shrunk_layout(config.reference.layout)}
    return parse_config(tree)


def _write_model(folder: Path, config_of: Any) -> None:
    """A model with random weights and a tokenizer of words and digits."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "+", "=", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    small = config_of(len(words)) | {"eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small), dtype=torch.float32)
    made.save_pretrained(folder)
    fast.save_pretrained(folder)
