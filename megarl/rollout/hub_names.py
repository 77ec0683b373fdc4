"""A transformers model's tensors under the names that a checkpoint on the hub gives them.

transformers holds all experts of a layer in one parameter, renames Mixtral's block and keeps DeepSeek's expert bias as a
buffer; on the hub every expert has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}
"""What a model type calls an expert's gate, up and down projection, where it is not `USUAL_EXPERT_NAMES`."""
USUAL_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """Hub name -> view, so that writing to it writes to `model`: parameters and the buffers that a checkpoint holds.

    A tied output layer appears once, as the embeddings.
    """
    own = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {
        hub_name: view
        for name, tensor in model.state_dict().items()
        if name in own
        for hub_name, view in _as_on_the_hub(name, tensor, model.config.model_type)
    }


def _as_on_the_hub(name: str, tensor: Tensor, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """A tensor's hub names and parts: fused experts `[E, 2F, H]` (gate over up) and `[E, H, F]` (down) come one by one."""
    if model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = EXPERT_NAMES.get(model_type, USUAL_EXPERT_NAMES)
    prefix, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        for expert, rows in enumerate(tensor):
            for projection, half in zip((gate, up), rows.chunk(2), strict=True):
                yield f"{prefix}.experts.{expert}.{projection}.weight", half
    elif part == "down_proj":
        for expert, rows in enumerate(tensor):
            yield f"{prefix}.experts.{expert}.{down}.weight", rows
    else:
        yield name, tensor
