"""transformers' LongCat-Flash without the rows that it has for experts which compute nothing.

No forward pass reads these rows, and the hub's folders do not have them: transformers 5.19 refuses to load one for that.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, LongcatFlashConfig
from transformers import LongcatFlashForCausalLM as WithUnusedRows
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts


class LongcatFlashForCausalLM(WithUnusedRows):  # type: ignore[misc]
    """The same causal language model, whose experts are as many as the hub has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for experts in (module for module in self.modules() if isinstance(module, LongcatFlashExperts)):
            experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[: experts.num_routed_experts].clone())


AutoModelForCausalLM.register(LongcatFlashConfig, LongcatFlashForCausalLM, exist_ok=True)
