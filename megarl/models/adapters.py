"""Low-rank adapters, as the rest of megarl sees them: how they are called, and what is asked of them. Without torch.

Which layers have one, and how they are made, trained, sent and written, is the option lora. A role without any has None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from megarl.models.fused_rows import FusedRows
from megarl.models.weight_map import WeightMap
from megarl.option_list import part

if TYPE_CHECKING:
    from megarl.config.sections import TrainedRole

IN_CHECKPOINTS = "adapters."
"""Beginning of the keys of adapters in checkpoints, before the hub's names of their tensors."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""How the names of an adapter's tensors end, as in PEFT's folders."""
_IS_ADAPTER = re.compile(r"_lora\.(local_experts\.[^.]+\.)?[AB]$")


class AdapterSpec(Protocol):
    """The adapters of a role, as a value: their rank, their scale and beside which layers they are."""

    @property
    def rank(self) -> int:
        """The rank of each."""

    @property
    def folder(self) -> str | None:
        """The PEFT folder whose adapters training starts from; None: new ones."""

    def __hash__(self) -> int:
        """The same of equal ones."""

    def with_adapters(self, weight_map: WeightMap, fused: FusedRows | None, field: str = "policy.lora") -> WeightMap:
        """The map with the rules of all adapters behind its own; `fused` as in `Architecture.fused_rows`.

        Raises:
            ConfigError: they are beside no layer, or beside one that the model does not have; `field` chose them.
        """


def is_adapter(megatron_name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return _IS_ADAPTER.search(megatron_name) is not None


def is_adapter_tensor(name: str) -> bool:
    """Return whether a tensor, by its name on the hub or in an engine, is one of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def adapters_of(role: TrainedRole, hf_config: Mapping[str, Any], field: str) -> AdapterSpec | None:
    """The adapters that a role's section `field` asks for beside the model of `hf_config`; None: none.

    Raises:
        ModelError: the PEFT folder that training is to start from is none for this model.
    """
    if not role.has_adapters:
        return None
    spec: AdapterSpec = part("lora", "peft_header", field).lora_of(role, hf_config, field)
    return spec


def adapter_part(place: str) -> ModuleType:
    """The file of this name in the option lora, for roles and checkpoints that have adapters."""
    return part("lora", place, "a role with adapters")


def served_name(version: object) -> str:
    """The name of a version's adapters in a request to an engine."""
    return f"version-{version}"
