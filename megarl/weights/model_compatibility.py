"""Whether an engine serves the model that the trainer trains, seen before the first update is sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.errors import EngineError
from megarl.models.adapters import AdapterSpec
from megarl.models.registry import architecture_for
from megarl.models.weight_formats import WeightFormat, engine_format
from megarl.models.weight_map import WeightMap

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ServedModel:
    """Facts that decide whether weights fit: a model's `config.json` and the dtype that it is held in (`float32`, ...).

    `predicts`: the weights of the layer for multi-token prediction are among those that are sent. `lora`: adapters are, which
    the engine adds itself.
    """

    config: Mapping[str, Any]
    dtype: str
    predicts: bool = False
    lora: AdapterSpec | None = None

    @property
    def weight_map(self) -> WeightMap:
        """The map of the weights that are sent; raises ModelError for an unknown architecture."""
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        weight_map = architecture_for(config).weight_map(config)
        return weight_map.with_prediction() if self.predicts else weight_map

    @property
    def adapter_map(self) -> WeightMap:
        """The map of the adapters that are sent: no rules where there are none. Raises ConfigError: see `AdapterSpec`."""
        weight_map = self.weight_map
        if self.lora is None:
            return replace(weight_map, rules=())
        fused = architecture_for(dict(self.config)).rows_together(dict(self.config))
        rules = self.lora.with_adapters(weight_map, fused).rules
        return replace(weight_map, rules=rules[len(weight_map.rules) :])

    @property
    def has_experts(self) -> bool:
        """Return whether it is a mixture of experts."""
        return self.weight_map.num_experts > 0

    @property
    def format(self) -> WeightFormat | None:
        """The format of its weights in few bits; None: they are not. Raises EngineError: see `engine_format`."""
        return engine_format(self.config)

    @property
    def quantised(self) -> frozenset[str]:
        """The Hugging Face names of the weights that are stored in few bits."""
        format = self.format
        rules = self.weight_map.bound_rules() if format is not None else ()
        return frozenset(
            name for rule in rules if format is not None and format.applies_to(rule.megatron_name) for name in rule.hf_names
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by Hugging Face name; raises ModelError for an unknown architecture."""
        return self.weight_map.hf_shapes()


def check_same_model(engine: ServedModel, trainer: ServedModel) -> None:
    """Raise EngineError, naming the first difference, unless every weight of the trainer is one of the engine, and the same."""
    trainer_shapes, engine_shapes = trainer.shapes(), engine.shapes()
    rows = [shapes.get(EMBEDDING, (0,))[0] for shapes in (engine_shapes, trainer_shapes)]
    facts: list[tuple[str, Any, Any]] = [
        ("architecture ", _architecture(engine), _architecture(trainer)),
        ("dtype ", engine.dtype, trainer.dtype),
        ("adapters ", engine.lora, trainer.lora),
        ("a vocabulary of ", rows[0], rows[1]),
        *(
            (f"{name} ", _shape(engine_shapes.get(name)), _shape(trainer_shapes.get(name)))
            for name in sorted(trainer_shapes.keys() | engine_shapes.keys())
        ),
    ]
    for what, of_engine, of_trainer in facts:
        if of_engine != of_trainer:
            raise EngineError(
                f"the engine's model has {what}{of_engine}, the trainer's {of_trainer}: "
                "an engine takes only weights of the model that it was started with"
            )


def _architecture(model: ServedModel) -> str:
    return str((model.config.get("architectures") or [model.config.get("model_type")])[0])


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not at all" if shape is None else f"of shape {list(shape)}"
