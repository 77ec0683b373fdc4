"""Training on one GPU in figures: MFU in BF16 and in every FP8 recipe it can run, what single options bring, peak memory.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json [--dry-run]
    python benchmarks/gpu.py --profile kernels.txt

The second lists the kernels of a step: its seconds less those of all kernels are what the GPU waits. Each part has a process
of its own under a deadline; one that cannot run is recorded with the reason. Without Transformer Engine there is one part, the
reference layers in BF16. The formula of MFU is `FORMULA`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measured_code import code_of  # noqa: E402
from megarl.config.fp8 import RECIPES, device_problem, token_multiple  # noqa: E402
from megarl.models.flops import FlopsModel  # noqa: E402
from megarl.models.shape import shape_of  # noqa: E402
from megarl.observe.summary import machine, versions  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "max_position_embeddings": 8192, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A model and what a step of training is fed: `responses` to a prompt each in every one of `micro_batches`."""

    hf_config: dict[str, Any]
    prompt_tokens: int
    response_tokens: int
    responses: int
    micro_batches: int = 2

    @property
    def tokens(self) -> int:
        """Of a step, prompts included."""
        return (self.prompt_tokens + self.response_tokens) * self.responses * self.micro_batches

    @property
    def scored(self) -> int:
        """Tokens of a step that have a log-prob."""
        return self.response_tokens * self.responses * self.micro_batches

    def flops(self) -> int:
        """Floating-point operations of one optimizer step, forward and backward."""
        forward = FlopsModel.of(shape_of(self.hf_config)).cost(self.prompt_tokens, [self.response_tokens])
        return 3 * forward * self.responses * self.micro_batches


WORKS = {
    "8b": Work(
        LLAMA
        | {"vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "head_dim": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
        prompt_tokens=1024, response_tokens=1024, responses=4,
    ),
    "1b, short": Work(
        LLAMA
        | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
        prompt_tokens=64, response_tokens=192, responses=64,
    ),
}  # fmt: skip
"""`8b`: a quarter of Llama-3-8B's layers, the sizes of its matrices, and 36 GB with gradients and Adam. `1b, short`: the shape
of Llama-3.2-1B with its vocabulary, and many short sequences: what rotary embeddings, the output layer and the host cost."""
WARMUP_STEPS, STEPS = 3, 7
PART_DEADLINE_S = 120.0
BUDGET_S = 480.0
SHOWN_LINES = 30
"""Of the standard error of a part that failed."""
SHOWN_KERNELS = 60
PEAK_BF16_FLOPS = {"H200": 989.4e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "B200": 2250e12, "A100": 312e12}
"""Dense, from NVIDIA's data sheets, by what the device's name holds, the more special name first; FP8 has twice as many."""
FORMULA = (
    "MFU = 3 * F / (s * P): F = megarl.models.flops.FlopsModel.cost, the forward operations of a step's prompts and responses "
    "(2 per multiply-add; the output layer for response tokens only; causal attention by pairs), 3 = forward + twice that "
    "backward, s = median seconds of an optimizer step, P = the device's dense peak in BF16, or in FP8 where it says so"
)


@dataclass(frozen=True)
class Part:
    """One configuration to train with; `reason`, if any, is why it cannot run here.

    `work` is a name of `WORKS`; `megatron` are fields of megatron-core's configs, as a config's `policy.megatron` has them.
    """

    name: str
    layer_spec: str
    fp8: str = "none"
    fp8_recipe: str = "tensorwise"
    fp8_param: bool = False
    work: str = "8b"
    megatron: Mapping[str, Any] = field(default_factory=dict)
    logit_chunk_tokens: int | None = None
    recompute: str = "none"
    reason: str | None = None


def parts_for(capability: tuple[int, int] | None, cuda: str | None, *, has_transformer_engine: bool) -> list[Part]:
    """The parts on a device of this compute capability (None: there is no GPU) under torch's CUDA version."""
    missing = "there is no GPU" if capability is None else None
    without = missing or (None if has_transformer_engine else "transformer_engine cannot be imported")
    parts = [Part("bf16", "transformer_engine", reason=without)]
    if capability is not None and not has_transformer_engine:
        parts.append(Part("bf16, reference layers", "reference"))
    for recipe in RECIPES:
        kind = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
        reason = without or device_problem(recipe, capability or (0, 0), cuda)
        parts.append(Part(f"fp8 {recipe}", "transformer_engine", kind, recipe, reason=reason))
    tensorwise = next(part for part in parts if part.fp8_recipe == "tensorwise" and part.fp8 != "none")
    parts.append(replace(tensorwise, name="fp8 tensorwise, fp8_param", fp8_param=True))
    short = Part("short, as by default", "transformer_engine", work="1b, short", reason=without)
    parts.append(short)
    parts += [replace(short, name=f"short, {name}", **changes) for name, changes in SLOWER.items()]
    return parts


SLOWER: dict[str, dict[str, Any]] = {
    "rotary embedding not fused": {"megatron": {"apply_rope_fusion": False}},
    "gradient accumulation not fused": {"megatron": {"gradient_accumulation_fusion": False}},
    "logits of 128 tokens at a time": {"logit_chunk_tokens": 128},
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "none of these": {
        "megatron": {
            "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "bias_dropout_fusion": False,
            "bias_activation_fusion": False, "overlap_grad_reduce": False,
        },
        "logit_chunk_tokens": 128,
    },
}  # fmt: skip
"""Parts with one of megarl's defaults for GPUs undone, or all that only cost time."""


def peak_flops(device: str) -> float | None:
    """Dense BF16 operations per second of the device with this name; None where it is not in the table."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device), None)


def figures(part: Part, seconds: list[float], peak_bytes: int, device: str) -> dict[str, Any]:
    """What is recorded of a part that ran."""
    median, peak = statistics.median(seconds), peak_flops(device)
    work = WORKS[part.work]
    found: dict[str, Any] = {
        "step_s": median,
        "step_s_all": seconds,
        "tokens_per_s": work.tokens / median,
        "tflops_per_s": work.flops() / median / 1e12,
        "mfu_of_bf16_peak": work.flops() / median / peak if peak else None,
        "peak_memory_bytes": peak_bytes,
    }
    if part.fp8 != "none":
        found["mfu_of_fp8_peak"] = work.flops() / median / (2 * peak) if peak else None
    return found


def differences(of_part: Any, of_bf16: Any) -> dict[str, float]:
    """How far a part's log-probs (nats, of the same untrained weights) are from those in BF16."""
    off = (of_part - of_bf16).abs()
    return {"mean": float(off.mean()), "p99": float(off.quantile(0.99)), "max": float(off.max())}


def set_up(part: Part, folder: Path) -> tuple[Any, list[list[Any]], Callable[[], float]]:
    """A model in this process, random micro-batches with a unit for each response, and a step that answers its seconds."""
    from megarl import platform

    here = platform.install()
    here.set_device(0)
    import torch

    from megarl.config.layout import Layout
    from megarl.data.stream import Response, Unit
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    work = WORKS[part.work]
    rendezvous = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        here.collective_backend, init_method=f"file://{rendezvous}/rendezvous", rank=0, world_size=1
    )
    initialize_layout(Layout(), seed=0)
    options = ModelOptions(
        str(folder / part.work), Layout(), layer_spec=part.layer_spec, dtype="bfloat16", fp8=part.fp8,
        fp8_recipe=part.fp8_recipe, fp8_param=part.fp8_param, token_multiple=token_multiple(part.fp8, part.fp8_recipe),
        megatron=part.megatron, logit_chunk_tokens=part.logit_chunk_tokens, recompute=part.recompute,
    )  # fmt: skip
    role = RankModel(options, OptimizerOptions(lr=1e-6))
    generator = torch.Generator().manual_seed(0)
    micro_batches: list[list[Unit]] = [[] for _ in range(work.micro_batches)]
    for index in range(work.responses * work.micro_batches):
        length = work.prompt_tokens + work.response_tokens
        ids = torch.randint(0, work.hf_config["vocab_size"], (length,), generator=generator)
        mask = torch.ones(work.response_tokens, dtype=torch.bool)
        response = Response(index, ids[work.prompt_tokens :], mask, {})
        micro_batches[index % work.micro_batches].append(Unit(ids[: work.prompt_tokens], [response]))

    def mean_cross_entropy(output: Any, stream: Any) -> tuple[Any, dict[str, float]]:
        return -output[:, 0].sum() / work.scored, {}

    def step() -> float:
        here.synchronize()
        started = time.perf_counter()
        role.update(micro_batches, mean_cross_entropy)
        here.synchronize()
        return time.perf_counter() - started

    return role, micro_batches, step


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Train in this process; leaves log-probs of the untrained model in `folder`."""
    import torch

    from megarl import platform

    role, micro_batches, step = set_up(part, folder)
    if part.fp8_recipe == "delayed" and part.fp8 != "none":
        step()  # which is what delayed scaling learns its scales from
    answers = role.forward(micro_batches)
    torch.save(torch.cat([answers[index][:, 0].float().cpu() for index in sorted(answers)]), folder / f"{part.name}.pt")
    seconds = [step() for _ in range(WARMUP_STEPS + STEPS)]
    here = platform.current()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else here.name
    found = figures(part, seconds[WARMUP_STEPS:], here.memory()["peak_bytes"], device)
    torch.distributed.destroy_process_group()
    return found


def list_kernels(part: Part, folder: Path, file: Path) -> None:
    """Write the kernels of a step to `file`, the longest first, then seconds of the step, of all kernels, and of the host."""
    import torch

    _, _, step = set_up(part, folder)
    for _ in range(WARMUP_STEPS):
        step()
    plain_s = step()
    on_gpu = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        profiled_s = step()
    averages = profile.key_averages()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels_s = sum(getattr(average, key, 0) for average in averages) / 1e6
    launches = sum(average.count for average in averages if "launch" in average.key.lower())
    text = averages.table(sort_by=key, row_limit=SHOWN_KERNELS, max_name_column_width=90)
    text += f"\nstep {plain_s:.4f} s, under the profiler {profiled_s:.4f} s, kernels {kernels_s:.4f} s, launches {launches}\n"
    file.write_text(text)
    print(text[-400:])
    torch.distributed.destroy_process_group()


def write_models(works: Iterable[str], folder: Path, device: str | None = None) -> None:
    """Random weights for these works as Hugging Face folders of their names, made on `device` (None: a GPU if there is one)."""
    import torch

    from megarl.models.hf_folder import write_hf_folder
    from megarl.models.registry import architecture_for

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")  # two billion random numbers take a CPU 20 s

    def value(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, dtype=torch.bfloat16, device=device)).cpu()

    for work in works:
        config = WORKS[work].hf_config
        shapes = architecture_for(config).weight_map(config).hf_shapes()
        write_hf_folder(folder / work, ((name, value(shape)) for name, shape in shapes.items()), config)


def run_all(parts: list[Part], folder: Path, run: Callable[[Part], dict[str, Any]], budget_s: float) -> dict[str, Any]:
    """Every part's figures, or `{"not_run": reason}`; what is left when `budget_s` is over is not begun."""
    ends = time.monotonic() + budget_s
    results: dict[str, Any] = {}
    for part in parts:
        reason = part.reason or (f"{budget_s:.0f} s were over" if time.monotonic() > ends else None)
        results[part.name] = {"not_run": reason} if reason else run(part)
        print(f"{part.name}: {json.dumps(results[part.name])}", flush=True)
    return results


def in_a_process(part: Part, folder: Path) -> dict[str, Any]:
    """`run_part` in a process of its own, under a deadline."""
    command = [sys.executable, __file__, "--part", part.name, "--folder", str(folder)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PART_DEADLINE_S, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"not_run": f"no answer within {PART_DEADLINE_S:.0f} s"}
    answers = [line for line in child.stdout.splitlines() if line.startswith("PART")]
    if answers:
        return json.loads(answers[-1].removeprefix("PART"))
    lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return {"not_run": f"failed: {lines[-1]}", "last_lines": lines[-SHOWN_LINES:]}


def on_this_machine() -> tuple[str | None, list[Part]]:
    """(name of the GPU, the parts) of this machine."""
    import torch

    from megarl.megatron.options import has_transformer_engine

    if not torch.cuda.is_available():
        return None, parts_for(None, torch.version.cuda, has_transformer_engine=False)
    return torch.cuda.get_device_name(), parts_for(
        torch.cuda.get_device_capability(), torch.version.cuda, has_transformer_engine=has_transformer_engine()
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the JSON file, or say what would be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file to write")
    parser.add_argument("--dry-run", action="store_true", help="list the parts and why some cannot run, and end")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no part is begun after so many seconds")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="list the kernels of a step of the first part, and end")
    parser.add_argument("--only", help="run the parts whose names have this in them")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    device, parts = on_this_machine()
    parts = [part for part in parts if given.only is None or given.only in part.name]
    if given.part:
        part = next(part for part in parts if part.name == given.part)
        print("PART" + json.dumps(run_part(part, given.folder)))
        return
    if given.dry_run:
        for part in parts:
            print(f"{part.name}: {f'not run: {part.reason}' if part.reason else 'would run'}")
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if given.profile:
            part = next((part for part in parts if part.reason is None), None)
            if part is None:
                parser.error(f"--profile: no part can run here: {parts[0].reason}")
            write_models([part.work], folder)
            list_kernels(part, folder, given.profile)
            return
        write_models(sorted({part.work for part in parts if part.reason is None}), folder)
        results = run_all(parts, folder, lambda part: in_a_process(part, folder), given.budget_s)
        off = {}
        if (folder / "bf16.pt").exists():
            import torch

            of_bf16 = torch.load(folder / "bf16.pt")
            for part in parts:
                if part.fp8 != "none" and (folder / f"{part.name}.pt").exists():
                    off[part.name] = differences(torch.load(folder / f"{part.name}.pt"), of_bf16)
    record = {
        "device": device,
        "machine": machine(),
        "versions": versions(),
        "code": code_of("gpu"),
        "works": {name: asdict(work) for name, work in WORKS.items()},
        "formula": FORMULA,
        "parts": results,
        "log_prob_difference_from_bf16": off,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
