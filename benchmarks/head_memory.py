"""Bytes that a log-prob head has alive at once, forward and backward, counted exactly; and seconds of heads in turns.

    python benchmarks/head_memory.py --before 287ca9d^ --rounds 7

Counted are all tensors that exist beyond hidden states, weight and targets, the gradients among them, for 32,768 tokens and a
vocabulary of 131,072. Nothing of that size is computed: tensors have shapes and no values. What a CPU would do runs on fake
tensors of that device; what a GPU would do on the device `meta`, with megarl's two Triton kernels, which allocate a few numbers
for each row, replaced by functions that allocate the same. Liger's is its formula (`liger_bytes`): its kernels need a GPU.

Seconds are those of the processor, of one thread of one process in which the heads take turns on a small batch; a ratio is a
head's seconds over those of megarl's head in the same round, and the figure the median over the rounds. `--before` names a
commit whose head takes part.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from benchmarks.live_bytes import LiveBytes  # noqa: E402
from benchmarks.log_probs import HEADS, OneRank, Outputs, megarl_head  # noqa: E402
from benchmarks.measured_code import code_of  # noqa: E402
from megarl import platform as megarl_platform  # noqa: E402
from megarl.megatron.options import default_chunk_tokens  # noqa: E402
from megarl.observe.summary import machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "head_memory.json"
TOKENS, VOCABULARY = 32768, 131072
HIDDEN_SIZES = (1024, 4096)
POINTS = (256, 384, 512)
"""Tokens for which the bytes of megarl's head on a CPU are counted, which goes through thousands of blocks: they grow by the
same for each token, so the first two give those of any number, and the third must agree."""
TIMED = {"tokens": 512, "vocab": 32768, "hidden": 128}
CHUNKS = (64, 128, 256, 512)
"""Rows at once of megarl's head, timed."""


def run(head: Callable[..., Outputs], hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> None:
    """Forward and backward: each log-prob and each entropy has a gradient."""
    log_probs, entropy = head(hidden, weight, targets, chunk_tokens)
    if entropy is None:
        log_probs.backward(torch.ones_like(log_probs) if log_probs.dim() else None)
    else:
        torch.autograd.backward([log_probs, entropy], [torch.ones_like(log_probs), torch.ones_like(entropy)])


def inputs(tokens: int, vocab: int, hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight that want gradients, and targets."""
    states = torch.empty(tokens, hidden, dtype=dtype, device=device).requires_grad_()
    weight = torch.nn.Parameter(torch.empty(vocab, hidden, dtype=dtype, device=device))
    return states, weight, torch.zeros(tokens, dtype=torch.long, device=device)


def on_cpu(name: str, tokens: int, vocab: int, hidden: int, *, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a head of `HEADS` as a CPU runs it; `megarl` has a buffer for the weight's gradient, which was there before."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = inputs(tokens, vocab, hidden, dtype, "cpu")
        if name == "megarl":
            given[1].main_grad = torch.empty(vocab, hidden)  # type: ignore[attr-defined]
        with LiveBytes() as counted:
            run(HEADS[name], *given, default_chunk_tokens("cpu", vocab))
    return counted.peak


def on_cpu_in_full(name: str, hidden: int) -> int:
    """`on_cpu` of all `TOKENS`, for megarl's head from counts of a few."""
    if HEADS[name] is not megarl_head:
        return on_cpu(name, TOKENS, VOCABULARY, hidden)
    first, second, third = (on_cpu(name, tokens, VOCABULARY, hidden) for tokens in POINTS)
    of_token, rest = divmod(second - first, POINTS[1] - POINTS[0])
    if rest or third != second + (POINTS[2] - POINTS[1]) * of_token:
        raise RuntimeError(f"bytes of {name} do not grow by the same for each token: {first}, {second}, {third}")
    return first + (TOKENS - POINTS[0]) * of_token


def on_gpu(tokens: int, vocab: int, hidden: int, *, buffer: bool = True) -> int:
    """Bytes of megarl's head in bfloat16 as a GPU with Triton runs it; without `buffer` it makes the weight's gradient."""
    hidden_states, weight, targets = inputs(tokens, vocab, hidden, torch.bfloat16, "meta")
    if buffer:
        weight.main_grad = torch.empty(vocab, hidden, device="meta")  # type: ignore[attr-defined]
    with kernels_that_allocate(), LiveBytes() as counted:
        run(HEADS["megarl"], hidden_states, weight, targets, default_chunk_tokens("cuda", vocab))
    return counted.peak


@contextmanager
def kernels_that_allocate() -> Iterator[None]:
    """megarl's head with what its Triton kernels allocate in their place (`logit_kernels.py`)."""

    def sums(logits: Tensor, real: int, temperature: float, *, squares: bool = False) -> Tensor:
        return torch.empty(4 if squares else 3, len(logits), dtype=torch.float32, device=logits.device)

    def gradient(logits: Tensor, real: int, temperature: float, given: Any) -> Tensor:
        torch.stack([given.log_z, given.entropy, given.of_entropy, given.of_log_probs.sum(1)])
        return logits

    heads = importlib.import_module("megarl.megatron.heads")
    with patch.object(heads, "row_sums", sums), patch.object(heads, "logits_to_gradient", gradient):
        yield


def liger_bytes(tokens: int, vocab: int, hidden: int, *, size: int = 2) -> dict[str, int]:
    """Of Liger 0.8.5's fused linear cross-entropy on a GPU, by its own choice of chunks, for numbers of `size` bytes.

    It has a chunk of logits, the gradient of hidden states and, of the whole weight, the gradient in the weight's type; float32
    sums are an option. It computes no entropy.
    """
    rows = -(-tokens // -(-vocab // hidden))
    rows = min(1 << (rows - 1).bit_length(), tokens)
    found = {"logits": size * rows * vocab, "of hidden states": size * tokens * hidden, "of the weight": size * vocab * hidden}
    return found | {"rows": rows, "total": sum(found.values()) + 4 * tokens}


def shares(peak: int) -> dict[str, float]:
    """Bytes, and their share of all logits in float32 and in bfloat16."""
    logits = TOKENS * VOCABULARY
    return {"bytes": peak, "of float32 logits": peak / (4 * logits), "of bfloat16 logits": peak / (2 * logits)}


def memory() -> dict[str, Any]:
    """By head and hidden size."""
    found: dict[str, Any] = {}
    for hidden in HIDDEN_SIZES:
        of_size: dict[str, Any] = {
            "megarl on a GPU, bfloat16": shares(on_gpu(TOKENS, VOCABULARY, hidden)),
            "apart on a GPU, bfloat16": shares(on_gpu(TOKENS, VOCABULARY, hidden, buffer=False)),
            "Liger on a GPU, bfloat16": shares(liger_bytes(TOKENS, VOCABULARY, hidden)["total"]),
        }
        for name in ("megarl", "apart", "torch", "megatron-core", "full"):
            of_size[f"{name} on a CPU, float32"] = shares(on_cpu_in_full(name, hidden))
        found[f"hidden size {hidden}"] = of_size
        for name, figures in of_size.items():
            print(f"hidden size {hidden}, {name}: {100 * figures['of float32 logits']:.2f} % of the float32 logits", flush=True)
    return found


def earlier(commit: str) -> Callable[..., Outputs]:
    """The head of an earlier commit, with all else as it is."""
    source = subprocess.run(
        ["git", "show", f"{commit}:megarl/megatron/heads.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "earlier_heads.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("earlier_heads", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["earlier_heads"] = module
        spec.loader.exec_module(module)

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Outputs:
        outputs: Outputs = module.VocabParallelLogProbs.apply(
            hidden, weight, targets, 0, len(weight), 1.0, chunk_tokens, OneRank()
        )
        return outputs

    return head


def times(rounds: int, commit: str | None) -> dict[str, Any]:
    """Median seconds, and median ratios to megarl's head with its own chunks."""
    usual = default_chunk_tokens("cpu", TIMED["vocab"])
    turns: dict[str, tuple[Callable[..., Outputs], int]] = {f"megarl, chunks of {c}": (HEADS["megarl"], c) for c in CHUNKS}
    if commit is not None:
        turns[f"megarl before ({commit}), chunks of {usual}"] = earlier(commit), usual
    turns |= {name: (HEADS[name], usual) for name in ("apart", "torch", "megatron-core", "full")}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    torch.manual_seed(0)
    for number in range(rounds + 1):  # the first one is warm-up
        for name, (head, chunk_tokens) in turns.items():
            hidden, weight, targets = inputs(**TIMED, dtype=torch.float32, device="cpu")
            with torch.no_grad():
                hidden.normal_()
                weight.normal_(std=TIMED["hidden"] ** -0.5)
            if name.startswith("megarl, "):
                weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
            began = time.process_time()
            run(head, hidden, weight, targets, chunk_tokens)
            if number:
                seconds[name].append(time.process_time() - began)
    base = seconds[f"megarl, chunks of {usual}"]
    return {
        name: {
            "median_s": statistics.median(found),
            "ratio": statistics.median(one / other for one, other in zip(found, base, strict=True)),
        }
        for name, found in seconds.items()
    }


def main() -> None:
    """Count, time, and write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--before", metavar="COMMIT", help="time the head of this commit too")
    parser.add_argument("--rounds", type=int, default=7, help="how often each head has its turn; 0: keep the times in the file")
    given = parser.parse_args()
    start()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "code": code_of("head_memory"),
        "versions": {"torch": torch.__version__},
        "setup": {"tokens": TOKENS, "vocab": VOCABULARY, "timed": TIMED | {"rounds": given.rounds}},
    }
    if given.rounds:
        record["times"] = times(given.rounds, given.before)
        for name, figures in record["times"].items():
            print(f"{name}: {figures['ratio']:.2f} times megarl's seconds", flush=True)
    elif given.out.exists():
        record["times"] = json.loads(given.out.read_text())["times"]
    record["memory"] = memory()
    given.out.write_text(json.dumps(record, indent=1) + "\n")


def start() -> None:
    """megatron-core's cross-entropy needs a world, of one process here."""
    megarl_platform.install()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()


if __name__ == "__main__":
    main()
