"""Memory and time of log-prob and entropy with gradients, beside the float32 logits that are never all made.

    python benchmarks/log_probs.py --out benchmarks/results/log_probs.json
    python benchmarks/log_probs.py --tokens 1024 --rounds 3 --heads megarl apart torch megatron-core full --before ../earlier

Each head runs in a process of its own that does nothing else: the resident memory when the inputs exist, and the highest
resident memory of the process after one forward and backward pass. `megarl` adds the weight's gradient to a buffer that was
there before, as megatron-core's; the others make it, and it counts. A few rows are compared with float64. With several heads
and rounds they take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # behind PYTHONPATH, which names an earlier checkout

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.measured_code import code_of  # noqa: E402
from megarl import platform as megarl_platform  # noqa: E402
from megarl.observe.summary import machine  # noqa: E402

CHECKED_ROWS = 16
VOCAB_SLICE = 8192
"""Rows of the weight that exist in float64 at once in the comparison."""


class OneRank:
    """A tensor-parallel group of one, as far as the head asks."""

    def size(self) -> int:
        """Ranks of the group."""
        return 1


def resident_bytes(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the most since the process began) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def worst_error(hidden: Tensor, weight: Tensor, targets: Tensor, log_probs: Tensor, entropy: Tensor) -> float:
    """Largest difference in nats from float64, over a few rows spread over the batch."""
    rows = torch.linspace(0, len(hidden) - 1, CHECKED_ROWS).long()
    some = hidden[rows].double()
    logits = torch.cat([some @ part.double().t() for part in weight.split(VOCAB_SLICE)], dim=1)
    log_p = logits.log_softmax(-1)
    exact = log_p.gather(1, targets[rows][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return max(float((found[rows] - wanted).abs().max()) for found, wanted in zip((log_probs, entropy), exact, strict=True))


Outputs = tuple[Tensor, Tensor | None]
"""Log-probs `[N]`, and entropies `[N]` of the heads that have them."""


def megarl_head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Outputs:
    """megarl's."""
    heads = importlib.import_module("megarl.megatron.heads")
    outputs: Outputs = heads.VocabParallelLogProbs.apply(hidden, weight, targets, 0, len(weight), 1.0, chunk_tokens, OneRank())
    return outputs


def torch_head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Outputs:
    """torch's chunked cross-entropy: the sum alone."""
    options = torch.nn.LinearCrossEntropyOptions()
    total = torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    return -total, None


def megatron_head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Outputs:
    """megatron-core's cross-entropy of all logits."""
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    losses = tensor_parallel.vocab_parallel_cross_entropy((hidden @ weight.t())[:, None], targets[:, None])
    return -losses[:, 0], None


def full_head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Outputs:
    """torch's functions on all logits."""
    log_p = (hidden @ weight.t()).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Outputs]] = {
    "megarl": megarl_head,
    "apart": megarl_head,
    "before": megarl_head,
    "torch": torch_head,
    "megatron-core": megatron_head,
    "full": full_head,
}
"""By name; `apart` is megarl's without a buffer for the weight's gradient, `before` that of the checkout `--before`."""


def measure(name: str, tokens: int, vocab: int, hidden_size: int, chunk_tokens: int) -> dict[str, Any]:
    """One forward and backward pass of a head on random inputs."""
    head = HEADS[name]
    hidden = torch.empty(tokens, hidden_size).normal_()
    weight = torch.nn.Parameter(torch.empty(vocab, hidden_size).normal_(std=hidden_size**-0.5))
    targets = torch.randint(0, vocab, (tokens,))
    of_log_probs, of_entropy = torch.empty(2, tokens).normal_().unbind()
    hidden.requires_grad_()
    importlib.import_module("megarl.megatron.heads")  # what modules take is not the head's
    if name == "megatron-core":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    if name == "megarl":
        weight.main_grad = torch.empty_like(weight).zero_()  # type: ignore[attr-defined]
    before = resident_bytes("VmRSS")
    if resident_bytes("VmHWM") > before + 2**20:
        sys.exit("making the inputs took more memory than they have; the highest resident memory would not be the head's")
    began = time.perf_counter()
    log_probs, entropy = head(hidden, weight, targets, chunk_tokens)
    forward_s = time.perf_counter() - began
    if entropy is not None:
        torch.autograd.backward([log_probs, entropy], [of_log_probs, of_entropy])
    else:
        log_probs.backward(of_log_probs if log_probs.dim() else None)
    total_s = time.perf_counter() - began
    extra, full = resident_bytes("VmHWM") - before, 4 * tokens * vocab
    figures = {
        "peak_extra_bytes": extra,
        "full_float32_logits_bytes": full,
        "share_of_full_logits": extra / full,
        "forward_s": forward_s,
        "backward_s": total_s - forward_s,
        "total_s": total_s,
    }
    if entropy is not None:
        with torch.no_grad():
            figures["worst_error_nats"] = worst_error(hidden, weight, targets, log_probs, entropy)
    return figures


def in_turns(arguments: argparse.Namespace, chunk_tokens: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds by head, each measured in a process of its own."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.heads}
    sizes = [arguments.tokens, arguments.vocab, arguments.hidden, chunk_tokens]
    for _ in range(arguments.rounds):
        for name, found in rounds.items():
            command = [sys.executable, __file__, "--measure", name, *map(str, sizes), str(arguments.threads)]
            where = {"PYTHONPATH": str(arguments.before.resolve())} if name == "before" else {}
            ran = subprocess.run(command, env=os.environ | where, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(ran.stdout.splitlines()[-1]))
            print(f"{name}: {found[-1]['total_s']:.1f} s", flush=True)
    return {
        name: {figure: statistics.median(one[figure] for one in found) for figure in found[0]} for name, found in rounds.items()
    }


def measure_one(arguments: list[str]) -> None:
    """In a process of its own: print the figures of one head."""
    name, *numbers = arguments
    *sizes, threads = map(int, numbers)
    megarl_platform.install()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(json.dumps(measure(name, *sizes)))


def main() -> None:
    """Measure, write the JSON file and print a line for each head."""
    if sys.argv[1:2] == ["--measure"]:
        measure_one(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("log_probs.json"), help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=32768, help="N, scored tokens")
    parser.add_argument("--vocab", type=int, default=131072, help="V, vocabulary")
    parser.add_argument("--hidden", type=int, default=1024, help="H, hidden size")
    parser.add_argument("--chunk-tokens", type=int, help="tokens whose logits exist at once (default: as a role takes them)")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["megarl"], help="heads that take turns")
    parser.add_argument("--rounds", type=int, default=1, help="how often each head has its turn")
    parser.add_argument("--before", type=Path, help="an earlier checkout of megarl, whose head is measured too, as `before`")
    arguments = parser.parse_args()
    if arguments.before is not None and "before" not in arguments.heads:
        arguments.heads.append("before")
    from megarl.megatron.options import default_chunk_tokens

    chunk_tokens = arguments.chunk_tokens or default_chunk_tokens("cpu", arguments.vocab)
    found = machine() | {"load": os.getloadavg()[0]}
    heads = in_turns(arguments, chunk_tokens)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": found,
        "setup": {
            "tokens": arguments.tokens,
            "vocab": arguments.vocab,
            "hidden": arguments.hidden,
            "chunk_tokens": chunk_tokens,
            "dtype": "float32",
            "threads": arguments.threads,
            "rounds": arguments.rounds,
        },
        "code": code_of("log_probs"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "heads": heads,
    }
    for name, figures in heads.items():
        extra, share = figures["peak_extra_bytes"] / 2**20, 100 * figures["share_of_full_logits"]
        error = f", {figures['worst_error_nats']:.1e} nats from float64" if "worst_error_nats" in figures else ""
        times = f"forward {figures['forward_s']:.1f} s, backward {figures['backward_s']:.1f} s"
        print(f"{name}: {extra:.0f} MiB beyond the inputs, {share:.2f} % of the full float32 logits; {times}{error}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
