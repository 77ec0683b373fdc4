"""The box of each Hugging Face tensor that a rank of an SGLang engine holds, and the engine's name for it.

SGLang splits what megatron-core splits, so the packing of a weight map's rule says along which axis; how large the shares are
is SGLang's own (read in 0.5.23: layers/linear.py, layers/vocab_parallel_embedding.py, layers/moe/fused_moe_triton/layer.py,
distributed/parallel_state.py). Tensors are seen as matrices; those of one axis have one column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megarl.config.layout import closest, divisors
from megarl.errors import LayoutError
from megarl.models.architecture import HFConfig
from megarl.models.packings import BesideWeight, GateUp, GroupedQKV, Sections, Vocabulary
from megarl.models.registry import architecture_for, architectures
from megarl.models.weight_map import Rule
from megarl.weights.tensors import Ints

VOCAB_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this, or of this times the ranks that share it."""

EVERY_RANK = -1
"""In place of a rank of an engine: what is taken whole is sent to all of them alike."""
Interval = tuple[int, int]
"""`start, stop` along the axis that is split."""


@dataclass(frozen=True)
class EngineTarget:
    """The engines that take the weights: `engines` of `tp * dp` ranks each, all alike.

    `tp` ranks share the attention heads and the embedding; with `dp` > 1 (SGLang's DP attention) there are so many replicas of
    these in one engine, while the feed-forward layers and the output layer are split over all `tp * dp` ranks. Whole experts
    are shared out among `ep` groups of ranks, and an expert is split over the ranks of its group. SGLang's own arguments are
    `--tp-size {tp*dp} --ep-size {ep} --dp-size {dp}`.

    `whole` are the tensors that every rank is sent whole, to cut them itself: none, those of experts, or all, as engines
    with nothing but their own loader want them. Of the others each rank is sent only what it holds.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    engines: int = 1
    whole: Literal["none", "experts", "all"] = "none"

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "engines"):
            size = getattr(self, name)
            if size < 1:
                raise LayoutError(f"target {name} is {size}, but it is at least 1")
        if self.ranks % self.ep:
            raise LayoutError(
                f"target ep is {self.ep}; it must divide the engine's {self.ranks} ranks (tp*dp = {self.tp}*{self.dp}); "
                f"it must be {closest(divisors(self.ranks), self.ep)}"
            )

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that an expert is split over."""
        return self.ranks // self.ep

    def takes_whole(self, rule: Rule) -> bool:
        """Return whether every rank is sent all of a rule's tensors and cuts them itself."""
        return self.ranks > 1 and (self.whole == "all" or (self.whole == "experts" and rule.is_expert))

    def holds_part(self, rule: Rule, part: int) -> bool:
        """Return whether there is a rank that does not hold all of a rule's `part`-th tensor."""
        length = rule.packing.hf_shapes[part][rule.packing.tp_axis or 0]
        return (rule.is_expert and self.ep > 1) or self.own_intervals(rule, part)[0] != (0, length)

    def first_ranks(self, rule: Rule, expert: Ints, num_experts: int) -> Ints:
        """The first of the ranks that are sent a rule's tensors of these experts (any number outside experts)."""
        if self.takes_whole(rule):
            return np.full_like(expert, EVERY_RANK)
        if not rule.is_expert:
            return np.zeros_like(expert)
        return expert // (num_experts // self.ep) * self.expert_tp

    def intervals(self, rule: Rule, part: int) -> list[Interval]:
        """The intervals that each rank is sent of the rule's `part`-th tensor along `rule.packing.tp_axis` (axis 0 if
        nothing is split).

        One entry per rank of an engine, or, for an expert's tensor, per rank that holds the expert (from `first_ranks` on);
        only one if every rank takes it whole. The vocabulary's padding is not sent.
        """
        if self.takes_whole(rule):
            return [(0, rule.packing.hf_shapes[part][rule.packing.tp_axis or 0])]
        return self.own_intervals(rule, part)

    def own_intervals(self, rule: Rule, part: int) -> list[Interval]:
        """The intervals that each rank holds: as `intervals` where nothing is taken whole."""
        axis = rule.packing.tp_axis
        beside = rule.packing if isinstance(rule.packing, BesideWeight) else None
        if beside is not None and (followed := beside.followed(part)) is not None:
            weight, its_part = followed
            of_weight = self.own_intervals(replace(rule, packing=weight), its_part)
            return [beside.held(start, stop, part, rule.hf_names[part]) for start, stop in of_weight]
        length = rule.packing.hf_shapes[part][axis or 0]
        if rule.is_expert and axis is None:  # a bias of outputs that these ranks add up
            return [(0, length)] + [(0, 0)] * (self.expert_tp - 1)
        if rule.is_expert:
            return _even(length, self.expert_tp)
        if rule.engine_heads is not None:
            return _of_heads(length, rule.engine_heads, self.tp) * self.dp
        if axis is None or rule.whole_in_engines:
            return [(0, length)] * self.ranks
        if not _is_attention(rule):
            return _shares(rule, part, length, self.ranks)
        return _shares(rule, part, length, self.tp) * self.dp


def _is_attention(rule: Rule) -> bool:
    """Return whether a rule's ranks are those of attention: of its own weights, and of the embedding."""
    return ".self_attention." in rule.megatron_name or rule.megatron_name.startswith("embedding.")


def _shares(rule: Rule, part: int, length: int, size: int) -> list[Interval]:
    packing = rule.packing
    if isinstance(packing, Vocabulary):
        return [(min(start, length), min(stop, length)) for start, stop in _even(engine_padded_vocab(length, size), size)]
    if isinstance(packing, GroupedQKV) and part in (1, 2):
        return _of_heads(length, packing.num_groups, size)
    return _even(length, size)


def _of_heads(length: int, heads: int, size: int) -> list[Interval]:
    """Each rank's share of rows that belong to heads; where these are fewer than ranks, neighbours hold the same head."""
    distinct = _even(length, min(size, heads))
    return [distinct[rank * len(distinct) // size] for rank in range(size)]


def engine_padded_vocab(vocab_size: int, size: int) -> int:
    """Rows of SGLang's embedding, shared by `size` ranks."""
    unit = VOCAB_PADDING
    if -(-vocab_size // unit) * unit % size:
        unit *= size
    return -(-vocab_size // unit) * unit


def check_target(hf_config: HFConfig, target: EngineTarget) -> None:
    """Refuse engines that SGLang cannot start for this model, naming the nearest that it can.

    Raises:
        LayoutError: tp does not divide the heads (or the KV heads in either direction), the ranks do not divide a feed-forward
            width, ep does not divide the experts, the family's attention cannot be replicated inside an engine, or several
            ranks share linear attention.
    """
    architecture = architecture_for(hf_config)
    weight_map = architecture.weight_map(hf_config)
    heads = int(architecture.text_config(hf_config)["num_attention_heads"])
    groups = {rule.packing.num_groups for rule in weight_map.rules if isinstance(rule.packing, GroupedQKV)}
    gated = [rule for rule in weight_map.rules if isinstance(rule.packing, GateUp)]
    widths = {rule.packing.hf_shapes[0][0] for rule in gated if not rule.is_expert}
    of_experts = {rule.packing.hf_shapes[0][0] for rule in gated if rule.is_expert}

    def attention_fits(tp: int) -> bool:
        copied = architecture.sglang.copies_kv_heads
        return heads % tp == 0 and all(kv_heads % tp == 0 or (copied and tp % kv_heads == 0) for kv_heads in groups)

    def fits(tried: EngineTarget) -> bool:
        return (
            attention_fits(tried.tp)
            and all(width % tried.ranks == 0 for width in widths)
            and all(width % tried.expert_tp == 0 for width in of_experts)
        )

    replicated = [family.name for family in architectures() if family.sglang.replicates_attention]
    if target.dp > 1 and not architecture.sglang.replicates_attention:
        raise LayoutError(
            f"target dp is {target.dp}, but SGLang replicates attention inside an engine only for {', '.join(replicated)}, "
            f"not for '{architecture.name}'; dp must be 1"
        )
    if target.ranks > 1 and any(isinstance(rule.packing, Sections) for rule in weight_map.rules):
        raise LayoutError(
            f"target tp is {target.tp} in engines of {target.ranks} ranks, but the model has linear attention, of whose "
            "convolution a rank holds channels in three places, which no slice can name yet; it must be 1, and dp 1"
        )
    if target.ep > 1 and (weight_map.num_experts or 1) % target.ep:
        what = f"{weight_map.num_experts} experts" if weight_map.num_experts else "no experts"
        fit = [ep for ep in divisors(weight_map.num_experts or 1) if target.ranks % ep == 0]
        raise LayoutError(f"target ep is {target.ep}, but the model has {what}; ep must be {closest(fit, target.ep)}")
    if not fits(target):
        shared = [f"{heads} attention heads", *(f"{kv_heads} KV heads" for kv_heads in groups)]
        shared += [f"a feed-forward width of {width}" for width in sorted(widths)]
        shared += [f"experts of width {width} over {target.expert_tp} ranks each" for width in of_experts]
        fit = [tp for tp in divisors(heads) if tp * target.dp % target.ep == 0 and fits(replace(target, tp=tp))]
        raise LayoutError(
            f"target tp is {target.tp} in engines of {target.ranks} ranks, but the model has {', '.join(shared)}; "
            + (f"it must be {closest(fit, target.tp)}" if fit else "dp and ep must be 1")
        )


def _even(length: int, size: int) -> list[Interval]:
    if length % size:
        raise LayoutError(f"{size} ranks of an engine cannot share {length} rows evenly")
    step = length // size
    return [(rank * step, (rank + 1) * step) for rank in range(size)]
