"""Weight updates with adapters merged in that engines could not take."""

from __future__ import annotations

from megarl.errors import EngineError
from megarl.models.weight_map import WeightMap
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import unties


def check_merged(weight_map: WeightMap) -> None:
    """Refuse an output layer of its own for engines whose output layer is the embedding; `weight_map` is the policy's.

    Raises:
        EngineError: the model's output layer is tied and has an adapter.
    """
    if unties(weight_map):
        raise EngineError(
            f"policy.lora.sync is 'merged', but the model's output layer shares its weight with the embedding, and merging the "
            f"adapter of '{OUTPUT}' would change both; it must be 'adapters', or '{OUTPUT}' must not be among policy.lora.targets"
        )
