"""The places at which an SGLang server's draft has the weights of the policy's layer for multi-token prediction; runs
inside the server.

SGLang (0.5.23) has the layer as a model of its own beside the policy, with the policy's embedding and output layer, and calls
the loader for the policy first, then for the draft, with the same payload. What is the draft's waits from the one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BEHIND_THE_DECODER = re.compile(r"model\.layers\.\d+\.")
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_PROJECTIONS = ("model.eh_proj.weight", "fc.weight")
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""The draft's parameters that are the policy's own."""


def draft_name(name: str) -> str:
    """The draft's name of a tensor that a checkpoint has as one of the layer: GLM-4.5's and DeepSeek-V3's, or Qwen3-Next's."""
    if name.startswith("mtp."):
        rest = name.removeprefix("mtp.")
        return f"model.{rest}" if rest.startswith(("layers.", "norm.")) else rest
    rest = _BEHIND_THE_DECODER.sub("", name, count=1)
    return f"model.{rest}" if rest.startswith(_OWN) else f"model.decoder.{rest}"


def is_draft(tensors: Mapping[str, Any]) -> bool:
    """Return whether these are the parameters of a draft."""
    return any(name in tensors for name in _PROJECTIONS)


def of_the_draft(model: Any) -> tuple[str, ...]:
    """What names of tensors begin with that are not a policy's of SGLang's, but its draft's."""
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    return ("mtp.",) if layers is None else (f"model.layers.{layers}.", "mtp.")
