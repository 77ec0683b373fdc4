"""Sizes of compressed attention and of hyper-connections, and what plans make of them; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

VARIANT = "compressed_attention"
"""Value of megatron-core's field `experimental_attention_variant`."""
_RATE_BITS = 3


class LayerKind(IntFlag):
    """Work of a layer, in an entry of megatron-core's `linear_attention_freq`, which says which layers have a variant.

    The bits above are how many tokens a compressed key is made of, 0: there are none.
    """

    ALWAYS = 1
    CHOOSES = 2
    """Windows of compressed keys overlap, and an indexer chooses among the keys."""
    BY_TOKEN = 4
    """The experts of a token are those that a table has for its id."""

    @classmethod
    def encoded(cls, rate: int, *, chooses: bool, by_token: bool) -> int:
        """The entry of a layer."""
        flags = cls.ALWAYS | (cls.CHOOSES if chooses else 0) | (cls.BY_TOKEN if by_token else 0)
        return rate << _RATE_BITS | int(flags)

    @classmethod
    def decoded(cls, entry: int) -> tuple[int, LayerKind]:
        """(rate, flags) of an entry."""
        return entry >> _RATE_BITS, cls(entry & ((1 << _RATE_BITS) - 1))


@dataclass(frozen=True)
class CompressedSizes:
    """The attention of all layers, as modules and plans need it; `rates` and `choosing` are of each layer.

    `rates`: tokens of a compressed key, 0 without any. `choosing`: whether an indexer of `index_heads` of width `index_dim`
    chooses `top_k` of them. Heads have one key, which is also the value, of width `head_dim`; `rotated` of its last dimensions
    rotate. Queries come from a latent of `query_rank`; heads are projected in `groups` to `group_rank` numbers each, and these
    together to the residual stream, which has `streams` of width `hidden`, mixed by `mixing_steps` of Sinkhorn and Knopp.
    `rope` and `compressed_rope` are configs of rotary frequencies: of layers without compressed keys, and of those with some.
    `by_token` layers have a table of experts of each of `vocab` ids.
    """

    num_heads: int
    head_dim: int
    rotated: int
    hidden: int
    query_rank: int
    groups: int
    group_rank: int
    window: int
    rates: tuple[int, ...]
    choosing: tuple[bool, ...]
    index_heads: int
    index_dim: int
    top_k: int
    streams: int
    mixing_steps: int
    mixing_epsilon: float
    by_token: frozenset[int]
    vocab: int
    epsilon: float
    rope: dict[str, Any] = field(default_factory=dict, hash=False)
    compressed_rope: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> frozenset[int]:
        """All layers, counted from 0: keys and values are kept in another form than that of full attention."""
        return frozenset(range(len(self.rates)))

    @property
    def kinds(self) -> list[tuple[int, bool]]:
        """The kinds of layers with compressed keys: how many tokens make one, and whether an indexer chooses."""
        return sorted({kind for kind in zip(self.rates, self.choosing, strict=True) if kind[0]})

    def layers_of(self, rate: int, *, chooses: bool) -> frozenset[int]:
        """The layers of a kind, counted from 0."""
        kinds = enumerate(zip(self.rates, self.choosing, strict=True))
        return frozenset(layer for layer, kind in kinds if kind == (rate, chooses))

    @property
    def heads(self) -> int:
        """A number that tensor parallelism must divide: a rank has whole heads, and whole groups of them."""
        return math.gcd(self.num_heads, self.groups)

    def exchanged(self, tp: int, cp: int) -> None:
        """None: context ranks cannot share a sequence."""

    @property
    def series(self) -> tuple[int, ...]:
        """By layer how many series of compressed keys there are: two where windows overlap."""
        return tuple(0 if not rate else 2 if chooses else 1 for rate, chooses in zip(self.rates, self.choosing, strict=True))

    def products(self, hidden: int) -> int:
        """Multiply-adds per token of one layer, the mean over the layers, but for pairs of tokens."""
        width, layers = self.num_heads * self.head_dim, len(self.rates)
        total = hidden * (self.query_rank + self.head_dim) + self.query_rank * width
        total += width * self.group_rank + self.groups * self.group_rank * hidden
        coefficients = self.streams * (2 + self.streams)
        total += 2 * self.streams * hidden * (coefficients + 2 + self.streams)
        of_series = sum(self.series) * 2 * hidden * self.head_dim
        of_series += sum(self.choosing) * hidden * (4 * self.index_dim + self.index_heads)
        of_series += sum(self.choosing) * self.query_rank * self.index_heads * self.index_dim
        return total + of_series // layers

    @property
    def pairs(self) -> tuple[tuple[int | None, float], ...]:
        """Multiply-adds of all layers per pair of a token and one of the last so many (None: all) before it."""
        width = 2 * self.num_heads * self.head_dim
        found: list[tuple[int | None, float]] = [(self.window, float(width * len(self.rates)))]
        for rate, chooses in zip(self.rates, self.choosing, strict=True):
            if chooses:
                found += [(rate * self.top_k, width / rate), (None, self.index_heads * (self.index_dim + 1) / rate)]
            elif rate:
                found.append((None, width / rate))
        summed: dict[int | None, float] = {}
        for window, products in found:
            summed[window] = summed.get(window, 0.0) + products
        return tuple(summed.items())

    def kept_bytes(self, tp: int, itemsize: int, operand: int, mean_length: float, *, plain: bool) -> float:
        """Bytes per token that a layer keeps for the backward pass behind the input of its first projection.

        The mean over the layers, with what its two hyper-connections keep of the streams. Scores are made again.
        """
        query, key = self.num_heads * self.head_dim / tp, self.head_dim
        total: float = (4 + operand) * self.query_rank + 4 * key  # norms of the latent and of the key, and the latent
        total += 3 * itemsize * query + itemsize * key * 3  # queries before and behind their norm, rotated; keys likewise
        total += itemsize * query + operand * self.groups * self.group_rank / tp  # what heads give, and groups
        of_series: float = sum(self.series) * (4 * 2 + itemsize * 2) * key + sum(bool(rate) for rate in self.rates) * 2 * key
        total += of_series / len(self.rates)
        total += 4 * sum(self.choosing) * min(self.top_k, mean_length / 4) / len(self.rates)
        streams = self.streams * self.hidden * (3 * 4 if itemsize < 4 else 2 * 4)  # before and behind their norm, in float32
        return total + 2 * (streams + self.hidden * itemsize + 4 * self.mixing_steps * 4 * self.streams**2)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that an engine keeps of a sequence for one layer, but for compressed keys, which grow with it."""
        return self.window * self.head_dim * itemsize
