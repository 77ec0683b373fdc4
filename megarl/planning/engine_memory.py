"""Bytes that an engine works with, and that training ranks stage for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.models.packings import padded_vocab
from megarl.models.vision import vision_part
from megarl.planning.gpus import GPUS_PER_NODE
from megarl.planning.lengths import Lengths
from megarl.weights.cost import STAGED_LOADS
from megarl.weights.plan import LOAD_BYTES

if TYPE_CHECKING:
    from megarl.planning.roles import Engines, RunShape

PREFILL_TOKENS, DECODED_AT_ONCE = 8192, 256
"""Most that SGLang works on at once: prompt tokens of a prefill, sequences whose logits exist."""
RELAYED_LOADS = 3
"""On a training rank that hands weights of others on: two rounds of half a load each way, and what came last."""


def engine_working_bytes(engines: Engines, lengths: Lengths) -> float:
    """Activations and buffers of an engine, an estimate: prefill goes through `PREFILL_TOKENS` at a time.

    Their pictures are shared among the ranks, but a prompt's largest may all be one rank's.
    """
    shape, ranks = engines.shape, engines.target.ranks
    width = 6 * shape.hidden + 3 * max(shape.ffn, shape.expert_ffn * shape.top_k) / ranks
    logits = padded_vocab(shape.vocab, ranks) * 4 * DECODED_AT_ONCE
    of_pictures = 0.0
    if shape.vision is not None and lengths.pictures.most:
        patches = max(lengths.pictures.most_patches, PREFILL_TOKENS * shape.vision.merge**2 / ranks)
        of_pictures = patches * vision_part("plan_towers").tower_activations(shape.vision, engines.itemsize).layer
    return PREFILL_TOKENS * engines.itemsize * width + logits + of_pictures


def staged_bytes(run: RunShape, engines: Engines, platform: str) -> float:
    """On a training rank that hands weights over in buffers: one that is filled while another is read, and the relay's.

    Relays are needed where an engine takes weights from ranks on other nodes and cannot read there. That is counted of every
    run on several.
    """
    loads = STAGED_LOADS + (RELAYED_LOADS if engines.relays_weights and run.gpus > GPUS_PER_NODE else 0)
    sent = engines.adapter_bytes or engines.weight_bytes
    return float(loads * min(LOAD_BYTES[platform], sent))
