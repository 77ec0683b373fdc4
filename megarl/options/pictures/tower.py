"""A model that sees: megatron-core's decoder behind transformers' own vision tower.

The tower is whole on every tensor rank of the first pipeline stage. It computes each picture of a micro-batch once; the
features take the places of the tokens that stand for them before the stream is scattered for sequence parallelism. Under
context parallelism a rank computes the pictures that its own tokens show. A micro-batch without pictures computes none: the
tower's gradients of it are zero.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.vision import Vision
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.hub_layout import hold_as_on_the_hub
from megarl.options.pictures.pixels import Pictures
from megarl.options.pictures.sounds import Sounds, listen
from megarl.options.pictures.stream_media import StreamMedia
from megarl.options.pictures.tower_time import TowerTime


def build_tower(hf_config: dict[str, Any], vision: Vision, dtype: torch.dtype, *, recompute: bool) -> torch.nn.Module:
    """transformers' tower of a config, its weights not filled; with `recompute` its layers are computed anew going backward."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    whole = AutoConfig.for_model(**hf_config)
    module = importlib.import_module(type(whole).__module__.replace(".configuration_", ".modeling_"))
    config = getattr(whole, vision.section)
    config._attn_implementation = "sdpa"
    with no_init_weights():
        tower = getattr(module, vision.tower)._from_config(config, dtype=dtype)
        if vision.projector is not None:
            tower.merger = getattr(module, vision.projector)(whole).to(dtype)
    hold_as_on_the_hub(tower, vision)
    if recompute:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
        tower.disable_input_require_grads()  # else layers that are frozen would be computed anew for gradients of pixels
    for parameter in tower.parameters():
        # All tensor ranks compute it whole; the average keeps their copies equal where kernels add in any order.
        parameter.average_gradients_across_tp_domain = True
    return tower


def look(tower: torch.nn.Module, vision: Vision, patches: Tensor, grids: Tensor) -> list[Tensor]:
    """Features `[G, H]` of the tokens of pictures, and those that deepstack adds; `grids` are int64 `[pictures, 3]`."""
    features = tower(patches, grid_thw=grids)
    pooled = features.pooler_output
    if vision.projector is not None:
        pooled = tower.merger(pooled).squeeze(1)  # type: ignore[operator]
    return [pooled, *getattr(features, "deepstack_features", ())]


class SeeingModel(GPTModel):
    """A GPTModel whose first chunk has the tower, `visual`, and reads the pictures that `seen` names."""

    def __init__(
        self,
        vision: Vision,
        tower: torch.nn.Module | None,
        pictures: Pictures | Sounds | None,
        *,
        eager: bool,
        **kwargs: Any,
    ) -> None:
        """`tower` is None in all chunks but the first, and `pictures` where no prompt shows any. `eager`: gradients are reduced
        while others are computed, so every parameter must have one in every micro-batch."""
        super().__init__(scatter_embedding_sequence_parallel=False, **kwargs)
        if tower is not None:
            self.visual = tower
        self.vision, self.pictures, self.eager = vision, pictures, eager
        self.tower_time = TowerTime()
        """Seconds of the tower's forward passes in updates."""
        self.seen: StreamMedia | None = None
        """Pictures that this rank's tokens show, on its device: set before the forward pass."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """Run the model as GPTModel does, `input_ids` `[1, S]`."""
        if self.pre_process:
            hidden, added = self._with_pictures(self.embedding(input_ids=input_ids, position_ids=position_ids))
            kwargs |= {"decoder_input": hidden, "extra_block_kwargs": {"context": added}}
        return super().forward(input_ids, position_ids, attention_mask, **kwargs)

    def _with_pictures(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[S, 1, H]` of tokens → (this rank's part with the features in their places, what deepstack adds `[D, s, 1, H]`)."""
        added: list[Tensor] = []
        if self.seen is not None:
            places, rows = self.seen.places, self.seen.rows
            features, *deeper = (part[rows].unsqueeze(1).to(hidden.dtype) for part in self._look(self.seen))
            hidden = hidden.index_copy(0, places, features)
            added = [torch.zeros_like(hidden).index_copy(0, places, part) for part in deeper]
        elif self.eager and self.training:
            hidden = _WithoutPictures.apply(hidden, *(p for p in self.visual.parameters() if p.requires_grad))
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            hidden, *added = (
                tensor_parallel.scatter_to_sequence_parallel_region(part, group=group) for part in (hidden, *added)
            )
        return hidden, torch.stack(added) if added else None

    def _look(self, seen: StreamMedia) -> list[Tensor]:
        """Features `[G, H]` of all pictures' tokens, and those that deepstack adds behind the decoder's first layers."""
        if self.pictures is None:
            raise ModelError("a prompt shows pictures, but the model was built without a media folder to read them from")
        device, dtype = seen.places.device, self.config.params_dtype
        patches = [self.pictures.patches(picture).to(device, dtype) for picture in seen.pictures]
        grids = torch.tensor([picture.grid for picture in seen.pictures], device=device)
        with self.tower_time.measured(device) if self.training else contextlib.nullcontext():
            if isinstance(self.vision, Hearing):
                return [listen(self.visual, patches)]
            return look(self.visual, self.vision, torch.cat(patches), grids)


class _WithoutPictures(torch.autograd.Function):
    """Zero gradients for a tower that a micro-batch does not use."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *map(torch.zeros_like, ctx.saved_tensors)


class DeepstackLayer(TransformerLayer):
    """A layer behind which features of the tower are added: `context[n]` behind the decoder's n-th.

    They travel as the block's `context`, which megatron-core hands through recomputation as a tensor with gradients.
    """

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Hidden states `[s, 1, H]` and `context` `[D, s, 1, H]`."""
        hidden, _ = super().forward(*args, **kwargs)
        return hidden if context is None else hidden + context[self.layer_number - 1], context
