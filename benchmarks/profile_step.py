"""Lists the kernels that a training step spends its time in: `python benchmarks/profile_step.py FILE`.

The model is `8b` of benchmarks/gpu.py (a quarter of Llama-3-8B) under Transformer Engine in BF16. FILE gets kernels by their
time, then the seconds of the step, of all kernels, and of the host; the difference of the first two is what the GPU waits.
Without a GPU it runs a tiny model, so that the script itself is tried by a test.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.gpu import WORKS, Work, write_models
from megarl import platform

MODEL = "8b"
ROWS = 60
"""Kernels that FILE lists."""


def work_of(*, on_gpu: bool) -> Work:
    """The work of the benchmark; without a GPU as small as a test needs it."""
    work = WORKS[MODEL]
    if on_gpu:
        return work
    tiny = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    return Work(work.hf_config | tiny, 16, 16, 2)


def micro_batches_of(work: Work) -> list[list[Any]]:
    """Random prompts and responses, each in a unit of its own."""
    from megarl.data.stream import Response, Unit

    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(work.response_tokens, dtype=torch.bool)
    micro_batches = []
    for batch in range(work.micro_batches):
        units = []
        for index in range(work.responses):
            length = work.prompt_tokens + work.response_tokens
            ids = torch.randint(0, work.hf_config["vocab_size"], (length,), generator=generator)
            response = Response(batch * work.responses + index, ids[work.prompt_tokens :], mask, {})
            units.append(Unit(ids[: work.prompt_tokens], [response]))
        micro_batches.append(units)
    return micro_batches


def main(file: Path) -> None:
    """Run two steps to warm up, one by the clock and one under the profiler."""
    here = platform.install()
    here.set_device(0)
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    on_gpu = torch.cuda.is_available()
    WORKS[MODEL] = work = work_of(on_gpu=on_gpu)
    folder = Path(tempfile.mkdtemp())
    write_models([MODEL], folder)
    meeting = f"file://{tempfile.mkdtemp()}/rendezvous"
    torch.distributed.init_process_group(here.collective_backend, init_method=meeting, rank=0, world_size=1)
    initialize_layout(Layout(), seed=0)
    spec = "transformer_engine" if on_gpu else "reference"
    options = ModelOptions(str(folder / MODEL), Layout(), layer_spec=spec, dtype="bfloat16")
    role, micro_batches = RankModel(options, OptimizerOptions(lr=1e-6)), micro_batches_of(work)

    def loss(output: Any, stream: Any) -> tuple[Any, dict[str, Any]]:
        return -output[:, 0].sum() / work.scored, {}

    def step() -> float:
        here.synchronize()
        began = time.perf_counter()
        role.update(micro_batches, loss)
        here.synchronize()
        return time.perf_counter() - began

    for _ in range(2):
        step()
    plain_s = step()
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        profiled_s = step()
    averages = profile.key_averages()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels_s = sum(getattr(average, key, 0) for average in averages) / 1e6
    launches = sum(average.count for average in averages if "launch" in average.key.lower())
    text = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=90)
    text += f"\nstep {plain_s:.4f} s, under the profiler {profiled_s:.4f} s, kernels {kernels_s:.4f} s, launches {launches}\n"
    file.write_text(text)
    print(text[-400:])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
