"""Seconds of generation by a roofline: every decoding step reads the weights and the cache of what is under way.

The responses of one engine start together, as many as its cache holds, and end as the length distribution says; so the batch
shrinks towards the longest. A prompt is computed once per group, and so are its pictures.
"""

from __future__ import annotations

from math import log2

import numpy as np

from megarl.models.flops import FlopsModel
from megarl.planning.gpu_memory import MemoryPlan
from megarl.planning.gpus import GpuSpec
from megarl.planning.lengths import Lengths
from megarl.planning.roles import Engines, RunShape


def generation_seconds(run: RunShape, gpu: GpuSpec, memory: MemoryPlan, lengths: Lengths) -> dict[str, float]:
    """Seconds of a step's generation by what bounds them, of the engine that has the longest response of the step.

    These are `memory bandwidth`, `arithmetic`, `launches`, `latency`, `prefill`, `tower`.
    """
    engines, sampling, share = run.engines, run.config.sampling, gpu.efficiencies
    assert engines is not None
    assert sampling is not None
    sequences = run.config.sequences_per_step / engines.target.engines
    per_group = sampling.samples_per_prompt
    room = memory.kv_tokens * engines.target.dp / (lengths.prompt + lengths.response)
    at_once = max(1.0, min(sequences, room))
    # All but the last `at_once` go through full batches; the last ones leave one by one.
    full_steps = max(0.0, sequences - at_once) * lengths.response / at_once
    ends = np.concatenate([[0.0], lengths.responses])
    spans = np.diff(ends)
    under_way = np.maximum(1.0, at_once * (1 - np.cumsum(lengths.shares) + lengths.shares))
    context = lengths.prompt + (ends[:-1] + ends[1:]) / 2
    flops, spent = FlopsModel.of(engines.adapted), dict[str, float]()
    for steps, active, tokens in (
        *zip(spans.tolist(), under_way.tolist(), context.tolist(), strict=True),
        (full_steps, at_once, lengths.prompt + lengths.response / 2),
    ):
        for name, seconds in decode_seconds(engines, flops, gpu, active, tokens).items() if steps else ():
            spent[name] = spent.get(name, 0.0) + steps * seconds
    prompts = sequences / per_group * (flops.per_token * lengths.prompt + _prefill(flops, lengths.prompt))
    spent["prefill"] = prompts / engines.target.ranks / (gpu.peak_flops() * share.prefill)
    # The ranks of an engine share pictures, which each of them has the tower for.
    pictures = sequences / per_group * lengths.pictures.flops(flops) if lengths.pictures.most else 0.0
    spent["tower"] = pictures / engines.target.ranks / (gpu.peak_flops() * share.prefill)
    return {name: seconds for name, seconds in spent.items() if seconds}


def decode_seconds(engines: Engines, flops: FlopsModel, gpu: GpuSpec, active: float, context: float) -> dict[str, float]:
    """One decoding step of `active` sequences with `context` tokens each.

    The larger of reading and computing, what a step costs whatever its size, and two all-reduces for each layer: behind
    attention among the ranks that share a sequence, behind the feed-forward layer among all ranks of the engine. Where
    attention is data parallel, SGLang gathers tokens before that layer and scatters them behind it: halves of one all-reduce.
    """
    shape, ranks, share = engines.shape, engines.target.ranks, gpu.efficiencies
    read = engines.weight_bytes * _weights_touched(engines, active) + engines.adapter_bytes / engines.adapter_places
    attended = shape.attended(context)
    read += active / engines.target.dp * attended * engines.cached_bytes_per_token(attended)
    of_attention = flops.per_pair * context + flops.per_window_pair * min(context, flops.window)
    operations = active * (flops.per_token + flops.per_logit_row + of_attention) / ranks
    of_memory, of_peak = read / gpu.hbm_gb_per_s / 1e9, operations / gpu.peak_flops()
    bound = {"memory bandwidth": of_memory} if of_memory >= of_peak else {"arithmetic": of_peak}
    spent = {name: seconds / share.decoding for name, seconds in bound.items()} | {"launches": share.decoding_step_s}
    if ranks > 1:
        spent["latency"] = (
            shape.traits.sublayers * shape.layers * (_reduce_seconds(gpu, engines.target.tp) + _reduce_seconds(gpu, ranks))
        )
    return spent


def _reduce_seconds(gpu: GpuSpec, ranks: int) -> float:
    """An all-reduce of a few tokens among the ranks of an engine."""
    nodes = ranks / gpu.nvlink_gpus
    if nodes > 1:
        return gpu.efficiencies.network_latency_s * max(1.0, log2(nodes))
    return gpu.efficiencies.node_latency_s if ranks > 1 else 0.0


def _prefill(flops: FlopsModel, prompt: float) -> float:
    """Operations of attention of a prompt; halves of a token are nothing beside its length."""
    in_window = min(prompt, flops.window)
    return flops.per_pair * prompt**2 / 2 + flops.per_window_pair * in_window * (prompt - in_window / 2)


def _weights_touched(engines: Engines, active: float) -> float:
    """The share of the weights that a step reads: of the experts those that some token goes to."""
    shape = engines.shape
    if not shape.experts:
        return 1.0
    return 1 - engines.expert_share * (1 - shape.top_k / shape.experts) ** active
