"""An estimator of a user's own: called, and its answer checked, which may be wrong in ways that nothing later would name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, AdvantageOutputs, normalised
from megarl.algorithms.catalogue import EstimatorNeeds
from megarl.errors import ConfigError, MegarlError
from megarl.system.user_code import describe


def own_estimate(name: str, needed: EstimatorNeeds, inputs: AdvantageInputs, arguments: Mapping[str, Any]) -> AdvantageOutputs:
    """Call the estimator `name` and give its answer to `inputs` and `arguments` of the config, normalised as this asks.

    Raises:
        ConfigError: it raised, or answered something else than advantages and, with a critic, returns for every token.
    """
    estimator: Callable[..., AdvantageOutputs] = ADVANTAGES.resolve(name, arguments)
    try:
        outputs = estimator(inputs, **arguments)
    except MegarlError:
        raise
    except Exception as error:
        raise ConfigError(f"algorithm.advantage: '{name}' raised {describe(error)}") from error
    if not isinstance(outputs, AdvantageOutputs):
        raise ConfigError(f"algorithm.advantage: '{name}' must return AdvantageOutputs, but returned {type(outputs).__name__}")
    shape = inputs.mask.shape
    required = ("advantages", "returns") if needed.values else ("advantages",)
    for field, expected_shape in {"advantages": shape, "returns": shape, "dropped": shape[:1]}.items():
        value = getattr(outputs, field)
        if value is None and field not in required:
            continue
        if not isinstance(value, Tensor) or value.shape != expected_shape:
            actual = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            why = ", as the critic is trained on them" if field == "returns" else ""
            raise ConfigError(
                f"algorithm.advantage: '{name}' must return {field} as a tensor of shape {list(expected_shape)}{why}, "
                f"but gave {actual}"
            )
    return normalised(outputs, inputs, needed)
