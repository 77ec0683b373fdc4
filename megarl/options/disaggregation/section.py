"""The section `rollout.disaggregation`: engines that prefill, and engines that decode. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Section
from megarl.errors import ConfigError


class DisaggregationConfig(Section):
    """Prefill and decoding on engines of their own, by SGLang's disaggregation (docs/rollouts.md)."""

    prefill: Positive = 1
    """Number of engines that compute prompts; the first ones by number."""
    decode: Positive = 1
    """Number of engines that sample responses from what those computed."""
    transport: Literal["nixl", "mooncake"] = "nixl"
    """How keys and values go from engine to engine: NIXL (`pip install 'megarl[rdma]'`), or Mooncake (its
    `mooncake-transfer-engine`; GPUs only)."""

    @property
    def engines(self) -> int:
        """Number of all engines."""
        return self.prefill + self.decode


DISAGGREGATION: AddedField[DisaggregationConfig | None] = AddedField(
    "RolloutConfig",
    "disaggregation",
    DisaggregationConfig | None,
    None,
    "Prefill and decoding on engines of their own, as many as it says: it sets `engines`. null: every engine does both.",
)
FIELDS = (DISAGGREGATION,)
disaggregation_of = DISAGGREGATION.of
"""The section of a section `rollout`; None: every engine prefills and decodes."""


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill `rollout.engines` of a plain tree whose `rollout.disaggregation` says how many there are.

    Raises:
        ConfigError: `rollout.engines` is set to another number.
    """
    rollout = tree.get("rollout")
    section = rollout.get("disaggregation") if isinstance(rollout, Mapping) else None
    if not isinstance(rollout, Mapping) or not isinstance(section, Mapping):
        return tree
    numbers = [section.get(name, DisaggregationConfig.model_fields[name].default) for name in ("prefill", "decode")]
    if not all(type(number) is int and number > 0 for number in numbers):
        return tree  # the section's own fields are refused
    if rollout.get("engines", sum(numbers)) != sum(numbers):
        reason = f"contradicts the {numbers[0]} + {numbers[1]} engines of rollout.disaggregation"
        raise ConfigError.of("rollout.engines", rollout["engines"], reason, allowed=f"{sum(numbers)}, or left out")
    return {**tree, "rollout": {**rollout, "engines": sum(numbers)}}
