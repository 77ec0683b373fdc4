"""What GPUs reach of their peaks, and what a step costs whatever its size: constants of the plan's seconds, by kind of GPU.

The defaults are fitted to published measurements on H100 (benchmarks/published, docs/planning.md), few constants for many rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiencies:
    """Shares of peaks (between 0 and 1), fixed seconds (names that end in `_s`) and rates (in `_gb_per_s`)."""

    products: float = 0.68
    """Of the BF16 peak, reached by products where all sequences are of one length. From pretraining of Llama 8B and 70B."""
    fp8: float = 0.6
    """Share of the FP8 peak reached by products in FP8, casts included. From pretraining of Llama 8B and SFT of 70B."""
    experts: float = 0.5
    """Share of the peak reached by grouped products of experts. From pretraining of Qwen3-30B-A3B."""
    unequal: float = 0.72
    """Share of the speed left where sequences differ in length: ranks wait for the longest. From RL of Llama and Qwen3."""
    hbm: float = 0.8
    """Share of the rate of the GPU's memory reached between products: norms, activations, logits. An assumption."""
    links: float = 0.7
    """Share of the rates of NVLink and the network. An assumption."""
    decoding: float = 0.7
    """Share of a decoding step's roofline. From RL of Llama 8B and 70B, Qwen3 32B and 30B-A3B."""
    prefill: float = 0.5
    """Share of the BF16 peak that engines reach while they read prompts. An assumption."""
    decoding_step_s: float = 6e-3
    """Seconds of every decoding step: the server's scheduler, launches, sampling. From the same runs as `decoding`."""
    node_latency_s: float = 20e-6
    """Seconds of each all-reduce of a decoding step among ranks of one node. From the same runs as `decoding`."""
    network_latency_s: float = 150e-6
    """Seconds of each all-reduce of a decoding step among two nodes; on n nodes log2(n) times as much. An assumption."""
    layer_s: float = 3e-4
    """Seconds of a forward pass of a micro-batch through a layer: about 30 launches. An assumption."""
    expert_layer_s: float = 3.75e-3
    """The same through a layer with experts, where the host waits for counts of tokens. From RL of Qwen3-30B-A3B."""
    update_s: float = 0.3
    """Seconds of a weight update: pausing, flushing, checking. From updates of Qwen3-4B and Qwen3-30B-A3B."""
    tensor_s: float = 1e-4
    """Seconds of each tensor of the model in a weight update: name, handle and checksum. From updates of Qwen3-30B-A3B."""
    turn_gb_per_s: float = 4.0
    """At which a rank of an engine that takes turns with the trainer takes weights over. From RL of Llama and Qwen3."""


def is_share(name: str) -> bool:
    """Return whether a field is a share of a peak."""
    return not name.endswith("_s")
