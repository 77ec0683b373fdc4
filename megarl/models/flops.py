"""Operations of a decoder: multiply-adds of its matrices, and operations of a forward pass. Imports without torch.

Of any model that `shape.py` describes: dense, with experts, with latent or linear attention; and what a vision tower computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megarl.data.micro_batches import Grid
from megarl.models.adapters import is_adapter
from megarl.models.packings import Vocabulary
from megarl.models.shape import IndexerShape, ModelShape
from megarl.models.vision import Vision

Length = TypeVar("Length", int, npt.NDArray[np.int64])


@dataclass(frozen=True)
class FlopsModel:
    """Floating-point operations of one forward pass (a backward pass is twice that, so shares stay the same).

    `per_token`: all layers' matrices, per token. `per_logit_row`: the output head, computed for response tokens only.
    `per_pair`: attention scores and values of the layers without a window, per pair of a token and one it attends to;
    `per_window_pair`: of those whose tokens attend to `window` others, the last ones or those that an indexer chooses, whose
    scores are of all pairs. `vision` is the tower of a model that sees.
    `further_pairs`: the same of linear attention that looks at tokens too, by window (None: at all).
    `prediction` is the layer for multi-token prediction, which updates alone compute. `frozen_per_token` are those of
    `per_token` whose weights have no gradient, beside adapters, and `frozen_per_row` those of `per_logit_row`.
    """

    per_token: int
    per_logit_row: int
    per_pair: int
    vision: Vision | None = field(default=None, hash=False)
    per_window_pair: int = 0
    window: int = 0
    prediction: FlopsModel | None = None
    frozen_per_token: int = 0
    frozen_per_row: int = 0
    further_pairs: tuple[tuple[int | None, int], ...] = ()

    @classmethod
    def of(cls, shape: ModelShape) -> FlopsModel:
        """Count the operations of a model; experts count as many as a token uses."""
        return _flops_of(shape)

    @classmethod
    def _counted(cls, shape: ModelShape) -> FlopsModel:
        per_token, per_pair = _attention_products(shape)
        of_linear = len(shape.linear.layers) * shape.linear.products(shape.hidden) if shape.linear else 0
        whole = 2 * (shape.attention_layers * per_token + of_linear + _mlp_products(shape))
        if shape.other_heads is not None:  # layers are not alike
            return cls._of_matrices(shape)
        of_all, in_window = shape.attention_layers - len(shape.window_layers), len(shape.window_layers)
        indexer_pair = 0
        if shape.indexer is not None:
            indexer_token, indexer_pair = _indexer_products(shape, shape.indexer)
            whole += 2 * indexer_token
            of_all, in_window = 0, of_all
        return cls(
            per_token=whole + 2 * _adapter_products(shape, per_row=False),
            per_logit_row=2 * shape.hidden * shape.vocab + 2 * _adapter_products(shape, per_row=True),
            per_pair=2 * (of_all * per_pair + indexer_pair),
            vision=shape.vision,
            per_window_pair=2 * in_window * per_pair,
            window=shape.window if shape.indexer is None else shape.indexer.top_k,
            prediction=cls._of_prediction(shape) if shape.predicts else None,
            frozen_per_token=whole if shape.lora is not None else 0,
            frozen_per_row=2 * shape.hidden * shape.vocab if shape.lora is not None else 0,
            further_pairs=tuple((window, round(2 * products)) for window, products in getattr(shape.linear, "pairs", ())),
        )

    @classmethod
    def _of_matrices(cls, shape: ModelShape) -> FlopsModel:
        """Operations of a model whose layers have heads of their own: of its matrices, and of each layer's scores."""
        whole, head = 2 * _matrix_products(shape), 2 * shape.hidden * shape.vocab
        pairs = [0, 0]  # of layers without a window, and with
        for kind, layers in shape.by_heads:
            for windowed, here in enumerate((layers - shape.window_layers, layers & shape.window_layers)):
                pairs[windowed] += 2 * len(here) * _attention_products(kind)[1]
        return cls(
            per_token=whole + 2 * _adapter_products(shape, per_row=False),
            per_logit_row=head + 2 * _adapter_products(shape, per_row=True),
            per_pair=pairs[0],
            per_window_pair=pairs[1],
            window=shape.window,
            frozen_per_token=whole if shape.lora is not None else 0,
            frozen_per_row=head if shape.lora is not None else 0,
        )

    @classmethod
    def _of_prediction(cls, shape: ModelShape) -> FlopsModel:
        """Operations of one layer with full attention, its projection, and an output row of each predicted token.

        The row's backward pass is as long as its forward pass, and with soft targets a row of the policy's is computed again.
        """
        experts = frozenset({0} if shape.experts else ())
        layer = cls.of(replace(shape, layers=1, expert_layers=experts, window_layers=frozenset(), linear=None, predicts=False))
        return replace(layer, per_token=layer.per_token + 2 * 2 * shape.hidden**2)

    def cost(
        self, prompt_tokens: int, response_tokens: Sequence[int], grids: Sequence[Grid] = (), repeats: Sequence[int] = ()
    ) -> int:
        """Operations of a prompt computed once with responses that each attend to it and to themselves.

        `grids` are those of all their pictures. `repeats`: so many first tokens of some responses
        are computed with another's.
        """
        total = sum(response_tokens)
        pairs = self.attention(0, prompt_tokens) + sum(self.attention(prompt_tokens, r) for r in response_tokens)
        pairs -= sum(self.attention(prompt_tokens, repeated) for repeated in repeats)
        of_decoder = self.per_token * (prompt_tokens + total - sum(repeats)) + self.per_logit_row * total + pairs
        return of_decoder + self.tower(grids)

    def attention(self, before: Length, tokens: Length) -> Length:
        """Operations of attention of so many `tokens` behind others, which they attend to, as to themselves."""
        operations: Length = self.per_pair * (_pairs(before + tokens) - _pairs(before))
        for window, per_pair in self.further_pairs:
            operations = operations + per_pair * (_pairs(before + tokens, window) - _pairs(before, window))
        if not self.per_window_pair:
            return operations
        in_window: Length = _pairs(before + tokens, self.window) - _pairs(before, self.window)
        return operations + self.per_window_pair * in_window

    def tower(self, grids: Iterable[Grid]) -> int:
        """Operations of the tower over pictures of these grids."""
        if self.vision is None:
            return 0
        return sum(picture_flops(self.vision, grid) for grid in grids)


@lru_cache(maxsize=32)
def _flops_of(shape: ModelShape) -> FlopsModel:
    return FlopsModel._counted(shape)


def picture_flops(vision: Vision, grid: Grid) -> int:
    """Operations of a forward pass of a tower, projectors included, over a picture of `grid` patches (time, height, width)."""
    time, height, width = grid
    patches = time * height * width
    of_patch, of_token = vision.products
    products = of_patch * patches + of_token * (patches // vision.merge**2)
    rows, columns = (_parts(length, vision.window) if vision.window else [] for length in (height, width))
    in_windows = sum((row * column) ** 2 for row in rows for column in columns)
    pairs = (vision.depth - vision.window_layers) * (height * width) ** 2 + vision.window_layers * in_windows
    return 2 * (products + time * pairs * 2 * vision.hidden)


def _parts(length: int, most: int) -> list[int]:
    return [min(most, length - start) for start in range(0, length, most)]


def _attention_products(shape: ModelShape) -> tuple[int, int]:
    """Multiply-adds of one layer's attention: (per token in its matrices, per pair of a token and one it attends to)."""
    hidden, heads = shape.hidden, shape.heads
    if shape.latent is None:
        of_gates = heads if shape.gated else 0
        of_token = hidden * ((heads + shape.kv_heads) * shape.of_kv_head + of_gates * shape.head_dim)
        return of_token, heads * shape.of_kv_head
    latent, value = shape.latent, shape.value_dim
    of_queries = latent.query * (hidden + shape.query) if latent.query else hidden * shape.query
    of_keys_and_values = hidden * (latent.key_value + latent.rope) + latent.key_value * heads * (latent.nope + value)
    return of_queries + of_keys_and_values + heads * value * hidden, heads * (shape.head_dim + value)


def _indexer_products(shape: ModelShape, indexer: IndexerShape) -> tuple[int, int]:
    """Multiply-adds of all layers' indexers: (per token in their matrices, per pair of a token and a key that is scored)."""
    width = indexer.heads * indexer.head_dim
    of_queries = (shape.latent.query or 0) * width if shape.latent else 0
    per_token = of_queries + shape.hidden * (indexer.head_dim + indexer.heads)
    return indexer.layers * per_token, indexer.layers * (width + indexer.heads)


def _mlp_products(shape: ModelShape) -> int:
    """Multiply-adds per token of all layers' MLPs, and of the routers and experts that a token uses."""
    hidden, matrices, latent = shape.hidden, shape.mlp_matrices, shape.expert_latent
    of_experts = matrices * (shape.top_k * (latent or hidden) * shape.expert_ffn + hidden * shape.shared_ffn)
    of_experts += hidden * (shape.experts + 2 * latent)
    return len(shape.expert_layers) * of_experts + shape.dense_layers * matrices * hidden * shape.ffn


def _matrix_products(shape: ModelShape) -> int:
    """Multiply-adds per token of all matrices before the output layer, but for tables; of experts, of those that it uses."""
    products = 0
    for rule in shape.weight_map.rules:
        if rule.stage == "last" or isinstance(rule.packing, Vocabulary) or is_adapter(rule.megatron_name):
            continue
        layers = sum(map(rule.has_layer, range(shape.layers))) if rule.stage == "layer" else 1
        of_layer = sum(math.prod(matrix) for matrix in rule.packing.hf_shapes if len(matrix) == 2)
        products += layers * of_layer * (shape.top_k if rule.is_expert else 1)
    return products


def _adapter_products(shape: ModelShape, *, per_row: bool) -> int:
    """Multiply-adds per token of the adapters beside all layers, and beside the experts that a token uses; or `per_row` of
    logits, of B beside the output layer."""
    products = 0
    for rule in shape.weight_map.rules if shape.lora is not None else ():
        of_rows = rule.stage == "last" and rule.packing.tp_axis == 0
        if is_adapter(rule.megatron_name) and of_rows == per_row:
            layers = sum(map(rule.has_layer, range(shape.layers))) if rule.stage == "layer" else 1
            products += layers * sum(map(math.prod, rule.packing.hf_shapes)) * (shape.top_k if rule.is_expert else 1)
    return products


def _pairs(length: Length, window: int | None = None) -> Length:
    """Pairs of a token of a sequence and one among the last `window` (None: among all) that each attends to."""
    if window is None:
        return length * (length + 1) // 2
    short = np.minimum(length, window) if isinstance(length, np.ndarray) else min(length, window)
    return short * (short + 1) // 2 + (length - short) * window
