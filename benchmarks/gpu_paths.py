"""Answers to what only a GPU can say of megarl's paths: one part a call, at most 90 s, what it found as JSON.

    python benchmarks/gpu_paths.py ipc --out ipc.json [--smoke]
    python benchmarks/gpu_paths.py tests --select test_sglang.py --out sglang.json

`docs/gpu_paths.md` says which doubt each part decides, `gpu_parts.txt` in which order a lent GPU is asked. `--smoke` takes
sizes that a CPU has time for; there the reference layers stand for Transformer Engine's.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import gpu  # noqa: E402
from benchmarks.measured_code import code_of  # noqa: E402
from megarl import platform  # noqa: E402
from megarl.observe.summary import machine, versions  # noqa: E402

LARGE = {
    "dense": gpu.WORKS["8b"].hf_config | {"num_hidden_layers": 4},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 8192, "hidden_act": "silu", "attention_bias": False, "vocab_size": 32768,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""`dense`: half as many layers as `8b` of gpu.py. `experts`: layers of Qwen3-30B-A3B with half of its experts."""
SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The device that parts compute on, and whether sizes are a test's."""

    smoke: bool
    device: torch.device

    @property
    def layer_spec(self) -> str:
        """Transformer Engine's layers where a GPU runs them."""
        return "reference" if self.smoke or self.device.type == "cpu" else "transformer_engine"

    def hf_config(self, name: str) -> dict[str, Any]:
        """The config of a model of `LARGE`."""
        few = SMALL | ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if name == "experts" else {})
        return LARGE[name] | (few if self.smoke else {})

    @property
    def work(self) -> dict[str, int]:
        """Prompts, responses to each, and their tokens."""
        if self.smoke:
            return {"prompts": 2, "of_prompt": 2, "prompt_tokens": 6, "response_tokens": 5}
        return {"prompts": 8, "of_prompt": 1, "prompt_tokens": 512, "response_tokens": 512}


@contextmanager
def one_rank() -> Iterator[None]:
    """Have this process be a world of one rank on the device, as it is in a run."""
    here, was_there = platform.current(), torch.distributed.is_initialized()
    here.set_device(0)
    from megatron.core import parallel_state

    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout

    if not was_there:
        meeting = f"file://{tempfile.mkdtemp()}/rendezvous"
        torch.distributed.init_process_group(here.collective_backend, init_method=meeting, rank=0, world_size=1)
    initialize_layout(Layout(), seed=0)
    yield
    parallel_state.destroy_model_parallel()
    if not was_there:
        torch.distributed.destroy_process_group()


def folder_of(on: Machine, name: str) -> Path:
    """A model with random weights as a Hugging Face folder."""
    folder = Path(tempfile.mkdtemp())
    gpu.WORKS[name] = gpu.Work(on.hf_config(name), 0, 0, 0)
    gpu.write_models([name], folder)
    return folder / name


def role_of(on: Machine, folder: Path, *, optimizer: dict[str, Any] | None = None, **options: Any) -> Any:
    """The model in `folder`, trained unless the options say otherwise."""
    from megarl.config.layout import Layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    chosen = {"layer_spec": on.layer_spec, "dtype": "bfloat16"} | options
    adam = OptimizerOptions(lr=1e-6, **(optimizer or {})) if chosen.get("trainable", True) else None
    return RankModel(ModelOptions(str(folder), Layout(), **chosen), adam)


def units_of(on: Machine, vocab: int, **work: int) -> list[Any]:
    """One micro-batch."""
    from megarl.data.stream import Response, Unit

    sizes, generator = on.work | work, torch.Generator().manual_seed(0)
    units = []
    for prompt in range(sizes["prompts"]):
        responses = []
        for number in range(sizes["of_prompt"]):
            ids = torch.randint(0, vocab, (sizes["response_tokens"],), generator=generator)
            row = prompt * sizes["of_prompt"] + number
            responses.append(Response(row, ids, torch.ones(len(ids), dtype=torch.bool), {}))
        units.append(Unit(torch.randint(0, vocab, (sizes["prompt_tokens"],), generator=generator), responses))
    return units


def mean_log_prob(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """A loss of every scored token."""
    return -output[:, 0].mean(), {}


def updates(on: Machine, role: Any, units: list[Any]) -> dict[str, Any]:
    """Seconds of an update, after some that warm up, and the most memory that was in use."""
    here, seconds = platform.current(), []
    if on.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2 if on.smoke else 8):
        here.synchronize()
        began = time.perf_counter()
        role.update([units], mean_log_prob)
        here.synchronize()
        seconds.append(time.perf_counter() - began)
    timed = seconds[len(seconds) // 2 :]
    return {"step_s": statistics.median(timed), "first_step_s": seconds[0], "peak_bytes": here.memory()["peak_bytes"]}


def forget() -> None:
    """Give back the memory of roles that are no longer named."""
    gc.collect()
    platform.current().empty_cache()


def _trained(on: Machine, model: str, ways: dict[str, dict[str, Any]], prepare: Any = None, **work: int) -> dict[str, Any]:
    """Updates of a model in each of these ways, by further options of the role."""
    folder, found = folder_of(on, model), {}
    with one_rank():
        for name, options in ways.items():
            units = units_of(on, on.hf_config(model)["vocab_size"], **work)
            role = role_of(on, folder, **options)
            found[name] = updates(on, role, units if prepare is None else prepare(name, units))
            del role
            forget()
    return found


def adapters(on: Machine) -> dict[str, Any]:
    """Updates of a dense model and of one with experts, whole and by adapters of rank 16."""
    from megarl.options.lora.weight_map import Lora

    ways: dict[str, dict[str, Any]] = {"whole": {}, "adapters": {"lora": Lora(rank=16, alpha=32.0)}}
    return {model: _trained(on, model, ways) for model in LARGE}


def muon(on: Machine) -> dict[str, Any]:
    """Updates by AdamW and by Muon."""
    return _trained(on, "dense", {name: {"optimizer": {"name": name}} for name in ("adamw", "muon")})


def shared_prefixes(on: Machine) -> dict[str, Any]:
    """Updates on 16 responses to a long prompt that is computed for each of them, and once."""
    from megarl.options.shared_prefixes.attention_choice import NAME

    sizes = {} if on.smoke else {"prompts": 1, "of_prompt": 16, "prompt_tokens": 2048, "response_tokens": 256}
    base = {"layer_spec": "local"} if on.layer_spec == "reference" else {}
    return _trained(on, "dense", {"for each": base, "once": base | {"core_attention": NAME}}, **sizes)


def replay(on: Machine) -> dict[str, Any]:
    """Updates of a model with experts that its routers choose, and that come with tokens."""
    config = on.hf_config("experts")
    shape = config["num_hidden_layers"], config["num_experts_per_tok"]

    def routed(name: str, units: list[Any]) -> list[Any]:
        def routes(ids: Tensor) -> Tensor:
            drawn = torch.rand(len(ids), shape[0], config["num_experts"], generator=torch.Generator().manual_seed(1))
            return drawn.argsort(-1)[..., : shape[1]].to(torch.uint8)

        if name == "chosen":
            return units
        return [
            replace(
                unit,
                extra={"routes": routes(unit.prompt_ids)},
                responses=[replace(one, extra={"routes": routes(one.token_ids)}) for one in unit.responses],
            )
            for unit in units
        ]

    return _trained(on, "experts", {"chosen": {}, "replayed": {"replays_routes": True}}, routed)


def deterministic(on: Machine) -> dict[str, Any]:
    """What runs under deterministic algorithms: running sums, and through them top-p and linear recurrences; twice alike."""
    from megarl.megatron.running_sums import running_sum
    from megarl.options.linear_attention.delta_rule import gated_delta_rule
    from megarl.options.state_spaces.scan import chunked_scan

    tokens, heads, width = (70, 2, 8) if on.smoke else (2048, 16, 64)
    generator = torch.Generator(on.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=on.device)

    row = drawn(4, 50 if on.smoke else 128_256)
    rule = [torch.nn.functional.normalize(drawn(1, tokens, heads, width), dim=-1) for _ in range(3)]
    decay, steps, state = -drawn(1, tokens, heads), drawn(1, tokens, heads), drawn(1, heads, width, width)
    works: dict[str, Callable[[], Tensor]] = {
        "running sums": lambda: running_sum(row),
        "delta rule": lambda: gated_delta_rule(*rule, decay, steps, state)[0],
        "scan": lambda: chunked_scan(rule[0], steps, decay[0, 0], rule[1][:, :, :1], rule[2][:, :, :1], state)[0],
    }
    found: dict[str, Any] = {}
    was, plain = torch.are_deterministic_algorithms_enabled(), {name: work() for name, work in works.items()}
    torch.use_deterministic_algorithms(True)
    try:
        for name, work in works.items():
            once, again = work(), work()
            apart = float((once - plain[name]).abs().max() / plain[name].abs().max())
            found[name] = {"alike": torch.equal(once, again), "apart_from_plain": apart}
    finally:
        torch.use_deterministic_algorithms(was)
    return found


def logits(on: Machine) -> dict[str, Any]:
    """The head's log-probs and gradients against float64, and their seconds beside the product that they need."""
    from megarl.megatron.heads import VocabParallelLogProbs

    rows, hidden, vocab = (9, 8, 37) if on.smoke else (1024, 2048, 128_256)
    generator = torch.Generator(on.device).manual_seed(0)
    dtype = torch.float32 if on.device.type == "cpu" else torch.bfloat16
    states = torch.randn(rows, hidden, generator=generator, device=on.device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator, device=on.device) / hidden**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator, device=on.device)
    here = platform.current()
    with one_rank():
        group = torch.distributed.group.WORLD
        seconds = []
        for _ in range(2 if on.smoke else 6):
            here.synchronize()
            began = time.perf_counter()
            log_probs, *_ = VocabParallelLogProbs.apply(states, weight, targets, 0, vocab, 1.0, max(1, rows // 2), group, None)
            log_probs.sum().backward()
            here.synchronize()
            seconds.append(time.perf_counter() - began)
    exact = (states.detach().double()[:64] @ weight.detach().double().T).log_softmax(1).gather(1, targets[:64, None])[:, 0]
    apart = float((log_probs.detach().reshape(-1)[: len(exact)].double() - exact).abs().max())
    return {"apart_from_float64": apart, "s": statistics.median(seconds[1:])}


def few_bits(on: Machine) -> dict[str, Any]:
    """Seconds and further memory of weights quantised for engines, all at once and one parameter after another."""
    from megarl.megatron.weights import local_shards
    from megarl.options.few_bits.formats import FORMATS
    from megarl.options.few_bits.quantise import FormatQuantiser

    folder, found = folder_of(on, "dense"), dict[str, Any]()
    with one_rank():
        role, here = role_of(on, folder, trainable=False), platform.current()
        for name in ("fp8-block", "mxfp8"):
            for at_once in (True, False):
                forget()
                if on.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                before, began = here.memory()["allocated_bytes"] if on.device.type == "cuda" else 0, time.perf_counter()
                arguments = (role.chunks, role.options, role.weight_map, FormatQuantiser(FORMATS[name]))
                shards = local_shards(*arguments, at_once=at_once)
                checked = sum(int(shards[key].view(torch.uint8)[:1].sum()) for key in shards)
                here.synchronize()
                figures = {"s": time.perf_counter() - began, "sum_of_some_bytes": checked}
                if on.device.type == "cuda":
                    figures["further_bytes"] = here.memory()["peak_bytes"] - before
                found[f"{name}, {'at once' if at_once else 'in turn'}"] = figures
                del shards
    return found


def offload(on: Machine) -> dict[str, Any]:
    """Seconds in which a role leaves the device and comes back, what is left there, and whether it computes the same."""
    from megarl.megatron.offload import Offload

    ways = {"bf16": {}} | ({} if on.smoke else {"fp8 weights": {"fp8": "hybrid", "fp8_param": True, "token_multiple": 16}})
    folder, found, here = folder_of(on, "dense"), dict[str, Any](), platform.current()
    with one_rank():
        for name, options in ways.items():
            role = role_of(on, folder, **options)
            units, moved = units_of(on, on.hf_config("dense")["vocab_size"]), Offload(role, on.device.type)
            role.update([units], mean_log_prob)
            before = role.forward([units])
            figures: dict[str, Any] = {"bytes_at_work": here.memory().get("allocated_bytes")}
            for step, what in (("leaves", False), ("comes back", True)):
                here.synchronize()
                began = time.perf_counter()
                moved.keep(weights=what, rest=what)
                here.synchronize()
                figures[f"{step}_s"] = time.perf_counter() - began
                forget()
                figures[f"{step}_bytes"] = here.memory().get("allocated_bytes")
            after = role.forward([units])
            found[name] = figures | {"alike": all(torch.equal(before[row], after[row]) for row in before)}
            del role, moved
            forget()
    return found


def tower(on: Machine) -> dict[str, Any]:
    """Seconds of Qwen2.5-VL's tower, forward and backward, over pictures."""
    from transformers import Qwen2_5_VLConfig

    from megarl.models.registry import architecture_for
    from megarl.options.pictures.tower import build_tower, look

    few = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "fullatt_block_indexes": [1]}
    wide = 256 if on.smoke else 2048
    sizes = {"out_hidden_size": wide} | (few if on.smoke else {})
    text = {"hidden_size": wide, "num_attention_heads": wide // 128, "num_key_value_heads": 2}
    config = Qwen2_5_VLConfig(vision_config=sizes, text_config=text).to_dict()
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    vision = architecture_for(config).vision(config)
    assert vision is not None
    model = build_tower(config, vision, torch.bfloat16, recompute=False).to(on.device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    height, width, count = (8, 12, 2) if on.smoke else (96, 96, 4)
    grids = torch.tensor([(1, height, width)] * count, device=on.device)
    patches = torch.randn(count * height * width, 3 * 2 * 14 * 14, device=on.device, dtype=torch.bfloat16)
    here, seconds = platform.current(), []
    for _ in range(2 if on.smoke else 6):
        here.synchronize()
        began = time.perf_counter()
        features, *_ = look(model, vision, patches, grids)
        features.float().square().mean().backward()
        here.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"pictures": count, "patches": len(patches), "s": statistics.median(seconds[1:])}


def _reads(values: Sequence[Any], answers: Any) -> None:
    """In another process: open a buffer, sum it up where it lies, and say how long both took."""
    from megarl.weights.cuda_ipc import checksums, opened

    torch.cuda.set_device(0)
    began = time.perf_counter()
    buffer = opened(values)
    copy = buffer.clone()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    answers.put((took, checksums([copy])[0], torch.cuda.mem_get_info()[0]))


def ipc(on: Machine) -> dict[str, Any]:
    """A buffer that another process opens again and again while it is filled anew: checksums, seconds, memory beside it."""
    from megarl.weights.cuda_ipc import checksums, shared

    size = 2**16 if on.smoke else 2**30
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, device=on.device)
    began = time.perf_counter()
    expected = checksums([values])[0]
    found: dict[str, Any] = {"checksum_s": time.perf_counter() - began, "alike": checksums([values.clone()])[0] == expected}
    if on.device.type == "cpu":
        return found | {"not_run": "only GPUs have CUDA IPC"}
    context, rounds = torch.multiprocessing.get_context("spawn"), []
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        answers = context.Queue()
        values.random_(0, 256)  # still under way when its handle is given away
        process = context.Process(target=_reads, args=(shared(values), answers))
        process.start()
        took, checksum, left = answers.get(timeout=60)
        process.join()
        rounds.append({"s": took, "alike": checksum == checksums([values])[0], "context_bytes": free - left - size})
    return found | {"rounds": rounds}


def tests(on: Machine, select: str) -> dict[str, Any]:
    """Outcomes and seconds of tests below tests/themes/gpu; where there is no GPU they skip themselves."""
    import pytest

    class Heard:
        def __init__(self) -> None:
            self.outcomes: dict[str, dict[str, Any]] = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                text = report.longreprtext[-2000:] if report.failed else ""
                self.outcomes[report.nodeid] = {"outcome": report.outcome, "s": report.duration, "text": text}

    file, _, name = select.partition("::")
    heard = Heard()
    chosen = ["-k", name] if name else []
    folder = str(ROOT / "tests/themes/gpu" / file)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), folder, *chosen], plugins=[heard])
    return {"exit_code": int(code), "tests": heard.outcomes}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    one.__name__: one
    for one in (adapters, deterministic, few_bits, ipc, logits, muon, offload, replay, shared_prefixes, tests, tower)
}


def main() -> None:
    """Ask one part, and write what it found or why it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="sizes that a CPU has time for")
    parser.add_argument("--select", default="", metavar="FILE[::NAME]", help="of `tests`: which below tests/themes/gpu")
    given = parser.parse_args()
    if given.part != "tests":  # which do it for themselves
        platform.install()
    on = Machine(given.smoke, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    began = time.perf_counter()
    more = {"select": given.select} if given.part == "tests" else {}
    found = PARTS[given.part](on, **more)
    record = {
        "command": " ".join(["python", "benchmarks/gpu_paths.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if on.device.type == "cuda" else None,
        "machine": machine(),
        "versions": versions(),
        "code": code_of("gpu_paths"),
        "s": time.perf_counter() - began,
        "found": found,
    }
    given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
