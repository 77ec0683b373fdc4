"""Memory and time of log-prob and entropy with gradients, beside the float32 logits that are never all made.

    python benchmarks/log_probs.py --out benchmarks/results/log_probs.json

One process that does nothing else: the resident memory when the inputs exist, and the highest resident memory of the
process after one forward and backward pass. The gradients of hidden states and weight count. A few rows are compared with
float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import machine

from megarl import platform as megarl_platform

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


def measure(tokens: int, vocab: int, hidden_size: int, chunk_tokens: int) -> dict[str, Any]:
    """One forward and backward pass on random inputs."""
    from megarl.megatron.heads import VocabParallelLogProbs

    hidden = torch.empty(tokens, hidden_size).normal_()
    weight = torch.empty(vocab, hidden_size).normal_(std=hidden_size**-0.5)
    targets = torch.randint(0, vocab, (tokens,))
    of_log_probs, of_entropy = torch.empty(2, tokens).normal_().unbind()
    hidden.requires_grad_()
    weight.requires_grad_()
    before = resident_bytes("VmRSS")
    if resident_bytes("VmHWM") > before + 2**20:
        sys.exit("making the inputs took more memory than they have; the highest resident memory would not be the head's")
    began = time.perf_counter()
    log_probs, entropy = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, chunk_tokens, OneRank())
    forward_s = time.perf_counter() - began
    torch.autograd.backward([log_probs, entropy], [of_log_probs, of_entropy])
    total_s = time.perf_counter() - began
    extra, full = resident_bytes("VmHWM") - before, 4 * tokens * vocab
    with torch.no_grad():
        error = worst_error(hidden, weight, targets, log_probs, entropy)
    return {
        "peak_extra_bytes": extra,
        "full_float32_logits_bytes": full,
        "share_of_full_logits": extra / full,
        "gradients_bytes": 4 * (hidden.numel() + weight.numel()),
        "forward_s": forward_s,
        "backward_s": total_s - forward_s,
        "worst_error_nats": error,
    }


def main() -> None:
    """Measure, write the JSON file and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("log_probs.json"), help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=32768, help="N, scored tokens")
    parser.add_argument("--vocab", type=int, default=131072, help="V, vocabulary")
    parser.add_argument("--hidden", type=int, default=1024, help="H, hidden size")
    parser.add_argument("--chunk-tokens", type=int, help="tokens whose logits exist at once (default: as a role takes them)")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    arguments = parser.parse_args()
    megarl_platform.install()
    from megarl.megatron.options import default_chunk_tokens

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    chunk_tokens = arguments.chunk_tokens or default_chunk_tokens("cpu", arguments.vocab)
    found = machine()
    figures = measure(arguments.tokens, arguments.vocab, arguments.hidden, chunk_tokens)
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
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "figures": figures,
    }
    extra, share = figures["peak_extra_bytes"] / 2**20, 100 * figures["share_of_full_logits"]
    print(f"{extra:.0f} MiB beyond the inputs, {share:.2f} % of the full float32 logits")
    print(f"forward {figures['forward_s']:.1f} s, backward {figures['backward_s']:.1f} s")
    print(f"{figures['worst_error_nats']:.1e} nats from float64")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
