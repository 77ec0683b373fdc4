"""A layer between hyper-connections (arXiv:2409.19606): the residual stream is several, mixed before attention and experts.

The streams travel between layers and between pipeline stages one behind another, as `[S, 1, n * H]`. The first layer makes them
of the embeddings, and the last one collapses them to one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megarl.errors import LayoutError
from megarl.megatron.attention import PackedSequences
from megarl.options.compressed_attention.sizes import CompressedSizes


class Coefficients(torch.nn.Module):
    """A projection of all streams of a token, which are normed together, to `rows` numbers; float32 or better.

    Each is multiplied by its entry of `scale`, and `base` is added. Whole on every tensor rank; under sequence parallelism
    megatron-core sums the gradients.
    """

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes, sections: tuple[int, ...]) -> None:
        super().__init__()
        rows, dtype = sum(sections), config.params_dtype
        self.sections, self.norm_epsilon, self.epsilon = sections, sizes.epsilon, sizes.mixing_epsilon
        self.projection = torch.nn.Parameter(torch.empty(rows, sizes.streams * sizes.hidden, dtype=dtype))
        self.base = torch.nn.Parameter(torch.empty(rows, dtype=dtype))
        self.scale = torch.nn.Parameter(torch.empty(len(sections), dtype=dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def coefficients(self, streams: Tensor) -> tuple[Tensor, ...]:
        """`[S, n, H]` to `[S, rows]` of each section."""
        flat = streams.flatten(1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        projection, base, scale = (parameter.to(flat.dtype) for parameter in (self.projection, self.base, self.scale))
        of_token = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_epsilon)
        found = (flat @ projection.T) * of_token
        parts = zip(found.split(self.sections, dim=1), scale.unbind(), base.split(self.sections), strict=True)
        return tuple(part * factor + added for part, factor, added in parts)

    def collapsed(self, streams: Tensor, logits: Tensor) -> Tensor:
        """`[S, H]`: the sum of the streams, each times the sigmoid of its logit."""
        weights = torch.sigmoid(logits) + self.epsilon
        return (weights.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


class HyperConnection(Coefficients):
    """Input of a branch, read from the streams, and how its output joins them."""

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes) -> None:
        streams = sizes.streams
        super().__init__(config, sizes, (streams, streams, streams * streams))
        self.streams, self.steps = streams, sizes.mixing_steps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From `[S, n, H]`: the branch's input `[S, H]`, its output's factors `[S, n]`, and shares `[S, n, n]` by streams."""
        read, joined, mixed = self.coefficients(streams)
        mixing = mixed.unflatten(1, (self.streams, self.streams)).softmax(-1) + self.epsilon
        mixing = mixing / (mixing.sum(-2, keepdim=True) + self.epsilon)
        for _ in range(self.steps - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + self.epsilon)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + self.epsilon)
        return self.collapsed(streams, read), 2 * torch.sigmoid(joined), mixing


class StreamHead(Coefficients):
    """The collapse of the streams behind the last layer."""

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes) -> None:
        super().__init__(config, sizes, (sizes.streams,))

    def forward(self, streams: Tensor) -> Tensor:
        """`[S, n, H]` to `[S, H]`."""
        return self.collapsed(streams, *self.coefficients(streams))


class HyperLayer(TransformerLayer):
    """megatron-core's layer of attention and experts, whose residual stream is several."""

    def __init__(self, config: TransformerConfig, *args: Any, sizes: CompressedSizes, **kwargs: Any) -> None:
        """Raise LayoutError where stages could not pass the streams on."""
        if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
            raise LayoutError(
                "this model's stages pass several residual streams on, which they cannot where all micro-batches are padded to "
                "one length; policy.layout.pp must be 1, or micro-batches not padded"
            )
        super().__init__(config, *args, **kwargs)
        self.streams = sizes.streams
        self.attention_connection = HyperConnection(config, sizes)
        self.mlp_connection = HyperConnection(config, sizes)
        self.is_first, self.is_last = self.layer_number == 1, self.layer_number == config.num_layers
        if self.is_last:
            self.stream_head = StreamHead(config, sizes)
        router: Any = self.mlp.router
        if self.layer_number - 1 in sizes.by_token:
            router.choose_by_token(sizes.vocab)

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: PackedSequences | None = None, **also_unused: Any
    ) -> tuple[Tensor, None]:
        """`[S, 1, n * H]` (split once more under sequence parallelism) to the same; `[S, 1, H]` into the first layer and out of
        the last one."""
        assert packed_seq_params is not None, "compressed attention runs packed streams only"
        hidden = hidden_states[:, 0]
        if self.is_first:
            streams = hidden[:, None].expand(-1, self.streams, -1)
        else:
            streams = hidden.unflatten(1, (self.streams, -1))
        branch, factors, mixing = self.attention_connection(streams)
        attended, _ = self.self_attention(self.input_layernorm(branch[:, None]), packed_seq_params=packed_seq_params)
        streams = _joined(streams, attended, factors, mixing)
        branch, factors, mixing = self.mlp_connection(streams)
        self._tell_router(packed_seq_params)
        output, _ = self.mlp(self.pre_mlp_layernorm(branch[:, None]))
        streams = _joined(streams, output, factors, mixing)
        hidden = self.stream_head(streams) if self.is_last else streams.flatten(1)
        return make_viewless_tensor(hidden[:, None], requires_grad=hidden.requires_grad, keep_graph=True), None

    def _tell_router(self, packed: PackedSequences) -> None:
        router: Any = self.mlp.router
        if router.token_experts is not None:
            ids = packed.order.token_ids
            if self.config.sequence_parallel:
                ids = ids.chunk(self.tp_group.size())[self.tp_group.rank()]
            router.token_ids = ids


def _joined(streams: Tensor, output: Tensor, factors: Tensor, mixing: Tensor) -> Tensor:
    """`[S, n, H]`: the mixed streams, and the branch's `output` `[S, 1, H]` times the factor of each."""
    factors, mixing = factors.to(streams.dtype), mixing.to(streams.dtype)
    return torch.baddbmm(factors.unsqueeze(-1) * output, mixing.mT, streams)
