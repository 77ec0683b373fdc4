"""A scalar head in place of the output layer of a `GPTModel`, of critics and reward models."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.megatron.heads import HeadRequest


class ValueHead(torch.nn.Linear):
    """hidden → 1 in place of the output layer, zero-initialised, replicated over tensor parallelism.

    Set `request` before the forward pass; the output is float32 `[N, 1, 1]`.
    """

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=torch.float32)
        torch.nn.init.zeros_(self.weight)
        self.config, self.tp_group = config, group
        self.request: HeadRequest | None = None

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`hidden` `[S(/tp), 1, H]` → (`[N, 1, 1]`, None)."""
        assert self.request is not None, "set request before the forward pass"
        if self.config.sequence_parallel:
            # Every rank computes the same values from the gathered stream, so its slice of the gradient is its own.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        scored = hidden[:, 0].index_select(0, self.request.rows).float()
        return torch.nn.functional.linear(scored, self.weight)[:, None], None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight for megatron-core's dist_checkpointing, replicated over tensor parallelism."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
