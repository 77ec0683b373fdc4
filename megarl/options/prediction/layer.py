"""The layer for multi-token prediction (MTP) behind a decoder whose gradients it leaves alone.

megatron-core's own block puts its loss into the decoder's forward pass, where it reaches decoder, embedding and output layer,
and rolls tokens over a stream whose prompts are not shared. Here the layer, of the same parts and under the same names, runs
where the output layer does, on values that carry no gradient, over a stream of its own (`options/prediction/stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.data.stream import StreamShard
from megarl.megatron.heads import LogProbHead, VocabularySlice, enter_tensor_parallel_region
from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.options import PredictionOptions, default_chunk_tokens
from megarl.megatron.rotary import PackedRotaryEmbedding
from megarl.options.prediction.loss import PredictionLoss
from megarl.options.prediction.stream import ShiftedStream

MTP_LOSS, MTP_ACCURACY = "mtp_loss", "mtp_accuracy"
"""Metrics of an update: means over the batch's predicted tokens."""
_SOFT_BUFFERS = 3
"""How many times as many buffers of logits soft targets need as log-probs."""


class PredictionInputs(NamedTuple):
    """What the layer needs of a micro-batch, on the device.

    `share` is what this rank holds of the layer's stream, `of_decoder` of the decoder's; `positions` is how many positions the
    rotary embedding must know.
    """

    shifted: ShiftedStream
    share: StreamShard
    of_decoder: StreamShard
    mask: Tensor | None
    packed: PackedSeqParams | None
    positions: int


class PredictionModule(MegatronModule):
    """Norms of embedding and hidden state, their projection, a layer of the decoder's kind, and a norm."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: Any, vp_stage: int | None) -> None:
        super().__init__(config=config)
        build_norm = partial(build_module, norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.enorm, self.hnorm = build_norm(), build_norm()
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, config)
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, vp_stage=vp_stage, layer_number=number)
        self.final_layernorm = build_norm()

    @property
    def mtp_model_layer(self) -> Any:
        """The layer, by the name under which the schedules of megatron-core 0.19 look for it."""
        return self.transformer_layer

    def forward(self, embedded: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        """`embedded`, `hidden` `[S(/tp), 1, H]` → what the output layer takes."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        if self.config.recompute_granularity == "full":
            if not joined.requires_grad:  # both are frozen, but what is recomputed needs an input with a gradient
                joined.requires_grad_(True)
            output = tensor_parallel.checkpoint(lambda given: self.transformer_layer(given, **attention)[0], False, joined)
        else:
            output = self.transformer_layer(joined, **attention)[0]
        return self.final_layernorm(output)


class Prediction(MegatronModule):
    """`mtp` of a GPTModel on the last stage: the layer, its loss, and the embedding where the stage has none of its own.

    `begin` a pass with gradients, set `request` before each forward pass, and `take` the loss behind it.
    """

    def __init__(self, model: Any, layer: ModuleSpec, norm: Any, options: PredictionOptions, *, vp_stage: int | None) -> None:
        """`model` has a `LogProbHead`, whose vocabulary, temperature and chunks are used."""
        super().__init__(config=model.config)
        self.layers = torch.nn.ModuleList([PredictionModule(model.config, layer, norm, vp_stage)])
        self.options = options
        self.request: PredictionInputs | None = None
        self._total = torch.ones(())
        self._answer: tuple[Tensor, dict[str, Tensor]] | None = None
        copied = None
        if not model.pre_process and not model.share_embeddings_and_output_weights:
            copied = torch.empty_like(model.output_layer.weight, requires_grad=False)
        self.register_buffer("embedding", copied, persistent=False)
        for parameter in self.parameters():
            parameter.shared = True  # type: ignore[attr-defined]  # the norm that the decoder's gradients are clipped by leaves it out
        model.output_layer.register_forward_pre_hook(partial(self._follow, model), with_kwargs=True)

    def begin(self, streams: Sequence[ShiftedStream]) -> None:
        """Count the tokens that the layer predicts in the whole batch, of which `streams` are this replica's micro-batches."""
        rows = sum(len(stream.policy_rows) for stream in streams)
        self._total = torch.tensor(float(rows), device=torch.cuda.current_device())
        torch.distributed.all_reduce(self._total, group=parallel_state.get_data_parallel_group())
        self._total.clamp_min_(1.0)

    def take(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the last forward pass with its weight, and sums of metrics."""
        assert self._answer is not None, "set request before the forward pass"
        answer, self._answer = self._answer, None
        return answer

    def _follow(self, model: Any, head: LogProbHead, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Behind the decoder, whose hidden states `[S(/tp), 1, H]` the output layer is about to be given."""
        if self.request is None:
            return
        request, self.request = self.request, None
        tied = named.get("weight")
        weight = (head.weight if tied is None else tied).detach()
        stream, share = request.shifted.stream, request.share
        with torch.no_grad():
            whole = self._whole_stream(arguments[0].detach(), request.of_decoder)
            hidden = self._of_tensor_rank(whole[request.shifted.before[share.positions]])
            embedding: Tensor | None = self.embedding
            table = embedding if embedding is not None else tied if tied is not None else _table(model)
            embedded = self._of_tensor_rank(self._embedded(table, stream.token_ids[share.positions], head))
        attention = {
            "attention_mask": request.mask,
            "rotary_pos_emb": _angles(model, embedded, request),
            "packed_seq_params": request.packed,
        }
        output = self.layers[0](embedded[:, None], hidden[:, None], **attention)
        rows = enter_tensor_parallel_region(output, self.config, head.tp_group)[:, 0].index_select(0, share.rows)
        soft = self.options.targets == "soft"
        policy = whole[request.shifted.policy_rows[share.scored]] if soft else None
        start = head.tp_group.rank() * weight.shape[0]
        vocabulary = VocabularySlice(weight, start, head.vocab_size, head.temperature, head.tp_group)
        buffers = _SOFT_BUFFERS if soft else 1
        chunk_tokens = head.chunk_tokens or default_chunk_tokens(weight.device.type, buffers * weight.shape[0])
        losses, hits = PredictionLoss.apply(rows, policy, stream.targets[share.scored], vocabulary, chunk_tokens)
        figures = torch.stack([losses.detach().sum(), hits.sum().to(losses.dtype)]) / self._total
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            torch.distributed.all_reduce(figures, group=group)
        loss = self.options.loss_weight * losses.sum() / self._total
        self._answer = loss, {MTP_LOSS: figures[0], MTP_ACCURACY: figures[1]}

    def _whole_stream(self, hidden: Tensor, share: StreamShard) -> Tensor:
        """`[S, H]` in the order of the decoder's stream, from this rank's tokens `[S/cp(/tp), 1, H]`."""
        hidden = hidden[:, 0]
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return hidden
        gathered = hidden.new_empty(group.size() * len(hidden), hidden.shape[1])
        torch.distributed.all_gather_into_tensor(gathered, hidden.contiguous(), group=group)
        return torch.empty_like(gathered).index_copy_(0, share.layout.flatten(), gathered)

    def _of_tensor_rank(self, tokens: Tensor) -> Tensor:
        """The part of `[S/cp, H]` that this tensor rank's layers are given."""
        if not self.config.sequence_parallel:
            return tokens
        group = parallel_state.get_tensor_model_parallel_group()
        return tokens.chunk(group.size())[group.rank()]

    def _embedded(self, table: Tensor, token_ids: Tensor, head: LogProbHead) -> Tensor:
        """`[n, H]` from this rank's slice of the embedding."""
        slices = VocabularySlice(table, head.tp_group.rank() * len(table), head.vocab_size, 1.0, head.tp_group)
        local_ids, here = slices.local(token_ids)
        embedded = table[local_ids].masked_fill(~here[:, None], 0.0)
        if head.tp_group.size() > 1:
            torch.distributed.all_reduce(embedded, group=head.tp_group)
        return embedded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The layer's, under megatron-core's keys."""
        layer: Any = self.layers[0]
        entries: dict[str, Any] = layer.sharded_state_dict(f"{prefix}layers.0.", sharded_offsets, metadata)
        return entries


def prediction_of(chunks: Sequence[Any]) -> Prediction | None:
    """The layer on this rank, if its role has one and this is the last stage."""
    return next((layer for chunk in chunks if (layer := getattr(unwrap_model(chunk), "mtp", None)) is not None), None)


def share_embedding(chunks: Sequence[Any]) -> None:
    """Bring the last stage's copy of the embedding up to date; collective over first and last stage of the pipeline."""
    cores: list[Any] = [unwrap_model(chunk) for chunk in chunks]
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or cores[0].share_embeddings_and_output_weights:
        return
    # is_rank_in_embedding_group would ask a list that destroy_model_parallel leaves behind
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None:
        return
    prediction = prediction_of(chunks)
    table = prediction.embedding if prediction is not None else _table(cores[0]).detach()
    torch.distributed.broadcast(table, torch.distributed.get_process_group_ranks(group)[0], group=group)


def _table(model: Any) -> Tensor:
    weight: Tensor = model.embedding.word_embeddings.weight
    return weight


def _angles(model: Any, embedded: Tensor, request: PredictionInputs) -> Tensor | None:
    """What layers that do not rotate by themselves rotate by, as GPTModel makes it for the decoder."""
    if model.config.multi_latent_attention:
        return None
    rotary, stream = model.rotary_pos_emb, request.shifted.stream
    if isinstance(rotary, PackedRotaryEmbedding):
        rotary.positions = (stream.position_ids[request.share.positions], request.positions)
    length = rotary.get_rotary_seq_len(None, model.decoder, embedded, model.config, request.packed)
    is_packed = request.packed is not None and request.packed.qkv_format == "thd"
    angles: Tensor = rotary(length, packed_seq=is_packed)
    return angles
