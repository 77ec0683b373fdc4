"""What a training step asks of its device, counted from the real code without a GPU, against what the maths needs.

    python benchmarks/roofline.py [--only llama] [--check]
    .venv-te/bin/python benchmarks/roofline.py --layers transformer_engine

They write benchmarks/results/roofline.json and, the second, roofline_of_transformer_engine.json (`make test-transformer-engine`
makes its environment). There what stands for Transformer Engine's kernels is in `engine_stand_ins.py`.

Each kind of layer is a tiny model that has no other. Differences between passes of one and two micro-batches, and between
models of two and four layers, give what a layer and what a micro-batch costs; numbers of launches do not depend on the width.
`--check` compares with the file in place of writing it. Where there is a GPU it also times updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.launches import Counts, counting  # noqa: E402
from benchmarks.measured_code import code_of  # noqa: E402
from megarl.models.flops import FlopsModel  # noqa: E402
from megarl.models.shape import shape_of  # noqa: E402
from megarl.models.update_flops import PASSES  # noqa: E402
from megarl.observe.summary import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "roofline.json"
OF_ENGINE = RESULTS.with_stem("roofline_of_transformer_engine")
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
ENGINE = "transformer_engine"
UNFUSED = {
    "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "moe_permute_fusion": False, "moe_router_fusion": False,
    "overlap_grad_reduce": False,
}  # fmt: skip
"""megatron-core's options with which Transformer Engine's layers are as before commit aa3fa43, which set these to true."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("reference", {"gradient_accumulation_fusion": False}),  # as on a GPU, where it needs apex
    ENGINE: (ENGINE, {}),
    f"{ENGINE}, before": (ENGINE, UNFUSED),
}
"""By the name in the table: the layer spec, and megatron-core's options."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Kind:
    """A kind of layer: settings of transformers' config class `class_name` that make all layers of a model this."""

    class_name: str
    settings: dict[str, Any] = field(default_factory=dict)
    under_transformer_engine: bool = True


KINDS = {
    "llama": Kind("LlamaConfig"),
    "qwen3": Kind("Qwen3Config"),
    "mixtral": Kind("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "qwen3_moe": Kind("Qwen3MoeConfig", EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v3": Kind(
        "DeepseekV3Config",
        EXPERTS
        | {"num_key_value_heads": 8, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 2}
        | {"topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        | {"v_head_dim": 32, "num_nextn_predict_layers": 0},
    ),
    "qwen3_5, linear attention": Kind(
        "Qwen3_5TextConfig",
        {"layer_types": "linear_attention", "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        under_transformer_engine=False,
    ),
}
PROMPTS, RESPONSES = 2, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 48, (17, 33, 40, 64)
"""Of the `RESPONSES` to each of a micro-batch's `PROMPTS`."""
COLUMNS = ("weights", "advantages", "old_log_probs", "reference_log_probs", "rollout_log_probs")


def build_folder(kind: Kind, layers: int, path: Path) -> tuple[dict[str, Any], int]:
    """A Hugging Face folder of such a model with random weights; returns its config and how many weights it has."""
    import transformers

    settings = SIZES | {"num_hidden_layers": layers, "pad_token_id": None} | kind.settings
    if "layer_types" in settings:
        settings["layer_types"] = [settings["layer_types"]] * layers
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    name = kind.class_name.removesuffix("Config").removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind.class_name)(**settings))
    model.save_pretrained(path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config, sum(parameter.numel() for parameter in model.parameters())


def micro_batch(first: int) -> list[Any]:
    """Prompts with their responses, whose rows in the batch begin at `first`."""
    from megarl.data.stream import Response, Unit

    generator = torch.Generator().manual_seed(first)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator)

    units = []
    for prompt in range(PROMPTS):
        responses = []
        for number, length in enumerate(RESPONSE_TOKENS):
            columns = {name: -torch.rand(length, generator=generator) for name in COLUMNS}
            row = first + prompt * RESPONSES + number
            responses.append(Response(row, ids(length), torch.ones(length) > 0, columns))
        units.append(Unit(ids(PROMPT_TOKENS), responses))
    return units


def objective() -> Any:
    """The loss of a GRPO step off-policy, with a KL penalty and an entropy bonus."""
    from megarl.algorithms import LossSettings
    from megarl.experience.objectives import PolicyObjective

    return PolicyObjective("clip", LossSettings(clip_low=0.2, clip_high=0.2), kl_coef=0.1, entropy_coef=0.01)


def passes(folder: Path, layer_spec: str, megatron: Mapping[str, Any]) -> list[Counts]:
    """Counts of a training pass over one micro-batch and over two, under megatron-core's options `megatron`."""
    from megarl.config.layout import Layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward
    from megarl.megatron.update_guard import WatchedLoss

    dtype = "bfloat16" if layer_spec == ENGINE else "float32"
    options = ModelOptions(str(folder), Layout(), layer_spec=layer_spec, dtype=dtype, megatron=dict(megatron))
    role = RankModel(options, OptimizerOptions(lr=1e-3))
    role.update([micro_batch(0)], objective())  # what is made once is made here
    found = []
    for count in (1, 2):
        given = [micro_batch(PROMPTS * RESPONSES * number) for number in range(count)]
        watched, parts = WatchedLoss(objective()), PassParts(role.parts, role.watch)
        with counting() as counts:
            forward_backward(role.chunks, role.options, given, watched, parts=parts)
        found.append(counts)
    return found


def measure(kind: Kind, setting: str) -> dict[str, Any]:
    """What a layer and a micro-batch (without its layers) cost: counts, where they come from, and the least of the maths."""
    layer_spec, megatron = SETTINGS[setting]
    of_micro_batch, least = {}, {}
    for layers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            config, parameters = build_folder(kind, layers, Path(folder))
            one, two = passes(Path(folder), layer_spec, megatron)
        of_micro_batch[layers] = two.since(one)
        least[layers] = minimum(config, parameters, size=2 if layer_spec == ENGINE else 4)
    per_layer, two_layers = halved(of_micro_batch[4].since(of_micro_batch[2])), of_micro_batch[2]
    rest = two_layers.since(per_layer).since(per_layer)
    of_layer = {name: (least[4][name] - least[2][name]) // 2 for name in least[2]}
    return {
        "layer": {**per_layer.totals(), "minimum": of_layer, "places": places(per_layer)},
        "micro_batch": {
            **rest.totals(),
            "minimum": {name: least[2][name] - 2 * of_layer[name] for name in of_layer},
            "places": places(rest),
        },
    }


def halved(counts: Counts) -> Counts:
    """Counts of one of two layers."""
    found = Counts(flops=counts.flops // 2, bytes=counts.bytes // 2)
    for name in ("launches", "waits", "copies", "collectives"):
        setattr(found, name, Counter({place: count // 2 for place, count in getattr(counts, name).items() if count // 2}))
    return found


def places(counts: Counts) -> dict[str, dict[str, int]]:
    """Where launches and waits come from, the most frequent first."""
    return {
        name: dict(getattr(counts, name).most_common()) for name in ("launches", "waits", "copies") if getattr(counts, name)
    }


def minimum(hf_config: dict[str, Any], parameters: int, *, size: int) -> dict[str, int]:
    """Operations of a micro-batch's forward and backward pass, and bytes that it must at least read and write.

    Bytes: each weight, of `size` bytes, is read forward and backward, and its gradient's sum in float32 read and written; the
    residual stream between layers is written and read once forward and once backward. A group's prompt counts once.
    """
    shape = shape_of(hf_config)
    lengths = [length - 1 for length in RESPONSE_TOKENS]  # the last token is not fed
    flops = PASSES * PROMPTS * FlopsModel.of(shape).cost(PROMPT_TOKENS, lengths)
    stream = size * PROMPTS * (PROMPT_TOKENS + sum(lengths)) * shape.hidden * shape.layers
    return {"flops": flops, "bytes": 2 * (size + 4) * parameters + 4 * stream}


def seconds(kind: Kind, layer_spec: str) -> dict[str, float]:
    """Median seconds of a pass over two micro-batches through four layers on the GPU."""
    from megarl.config.layout import Layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    with tempfile.TemporaryDirectory() as folder:
        build_folder(kind, 4, Path(folder))
        role = RankModel(ModelOptions(folder, Layout(), layer_spec=layer_spec, dtype="bfloat16"), OptimizerOptions(lr=1e-3))
    given, timed = [micro_batch(PROMPTS * RESPONSES * number) for number in range(2)], []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        role.update(given, objective())
        torch.cuda.synchronize()
        timed.append(time.perf_counter() - begun)
    return {"update_s": statistics.median(timed[3:])}


def regressions(found: Mapping[str, Any], bounds: Mapping[str, Any]) -> list[str]:
    """What grew against the committed table, with the operators and places that are new or more frequent."""
    problems = []
    for name, measured in found.items():
        for part in ("layer", "micro_batch"):
            now, then = measured[part], bounds[name][part]
            for what in ("launches", "waits", "copies"):
                if now[what] <= then[what]:
                    continue
                before = then["places"].get(what, {})
                more = [
                    f"{count - before.get(place, 0)} x {place}"
                    for place, count in now["places"][what].items()
                    if count > before.get(place, 0)
                ]
                problems.append(f"{name}: {what} of a {part} were {then[what]}, are {now[what]}: {', '.join(more)}")
    return problems


def table(parts: Mapping[str, Any]) -> str:
    """The counts as a table in Markdown."""
    lines = [
        "| layers | part | launches | waits | copies | operations / least | bytes / least |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, measured in parts.items():
        for part, label in (("layer", "a layer"), ("micro_batch", "the rest of a micro-batch")):
            one = measured[part]
            ratios = [f"{one[what] / one['minimum'][what]:.2f}" if one["minimum"][what] else "" for what in ("flops", "bytes")]
            lines.append(
                f"| {name} | {label} | {one['launches']} | {one['waits']} | {one['copies']} | {ratios[0]} | {ratios[1]} |"
            )
    return "\n".join(lines)


def start(backend: str = "") -> None:
    """A world of one process on this machine's device; `backend`: another than that of the device."""
    from megarl import platform
    from megarl.config.layout import Layout

    platform.install()
    from megarl.megatron.build import initialize_layout

    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    place = Path(tempfile.mkdtemp()) / "rendezvous"
    torch.distributed.init_process_group(backend, init_method=f"file://{place}", rank=0, world_size=1)
    initialize_layout(Layout(), seed=1)


def counted(names: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Of these kinds of layers, if they run under these settings."""
    return {
        f"{name}, {setting}": measure(KINDS[name], setting)
        for name in names
        for setting in settings
        if setting == "reference" or KINDS[name].under_transformer_engine
    }


def of_transformer_engine(names: Sequence[str]) -> dict[str, Any]:
    """Transformer Engine's layers."""
    from benchmarks.engine_stand_ins import kernels_stood_for

    start()
    with kernels_stood_for():
        return counted(names, [setting for setting in SETTINGS if setting != "reference"])


def of_reference(names: Sequence[str]) -> dict[str, Any]:
    """The reference layers, on a GPU with seconds."""
    start()
    found = counted(names, ["reference"])
    if torch.cuda.is_available():
        for name in names:
            found[f"{name}, reference"] |= seconds(KINDS[name], "reference")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="the file that is written, or compared with")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="kinds of layers (default: all)")
    parser.add_argument("--layers", choices=["reference", ENGINE], default="reference")
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = given.only or list(KINDS)
    found = of_transformer_engine(names) if given.layers == ENGINE else of_reference(names)
    print(table(found))
    out = given.out or (OF_ENGINE if given.layers == ENGINE else RESULTS)
    if given.check:
        sys.exit("\n".join(regressions(found, json.loads(out.read_text())["parts"])) or None)
    record = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "machine": machine(), "versions": versions()}
    record |= {"date": date.today().isoformat(), "code": code_of("roofline"), "parts": found}
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
