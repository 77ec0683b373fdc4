"""Whether the layouts of a config divide its models, by the sizes in the models' `config.json`. Importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megarl.config import AnyConfig
from megarl.config.fp8 import Fp8Widths, check_fp8_sizes
from megarl.config.layout import Layout
from megarl.config.presets import ModelPart
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models.registry import use_architecture
from megarl.models.shape import ModelShape

A_MODEL = "a Hugging Face model folder, or ORG/NAME of the hub (hf://ORG/NAME where a folder ORG is here)"


def check_models(config: AnyConfig) -> None:
    """Check that every model folder exists, that the layouts divide its model and that FP8 can hold what a rank has.

    Raises:
        ModelError: a folder, or its config.json, is missing or unreadable.
        ConfigError: a layout does not divide heads, layers, feed-forward width or experts, or leaves widths unfit for FP8, or
            a role freezes parts that its model does not have, or all of them.
    """
    use_architecture(config.model.architecture)
    for role in config.roles:
        model, layout = read_shape(role.folder_field, role.folder), role.layout or config.policy.layout
        _check_layout(f"{role.name}.layout", layout, model.layout_sizes, config.model.layer_spec)
        widths = Fp8Widths(model.hidden, model.attention_width, model.divided_ffn, model.expert_ffn or None, model.layers)
        check_fp8_sizes(config.model, f"{role.name}.layout", layout, widths)
        if role.trained is not None and role.trained.freeze:
            _check_freeze(f"{role.name}.freeze", role.trained.freeze, sees=model.vision is not None)
    if config.routing_replay != "none" and not read_shape("model.path", config.model.path).experts:
        reason = f"is for mixtures of experts, and the model in '{config.model.path}' has none"
        raise ConfigError.of("policy.routing.replay", config.routing_replay, reason, allowed="'none'")
    if config.sampling is not None:
        model = read_shape("model.path", config.model.path)
        # what training asks of layouts with experts is not asked of an engine
        _check_layout("rollout", Layout(tp=config.sampling.tp), {**model.layout_sizes, "num_experts": None})


def read_shape(field: str, folder: str) -> ModelShape:
    """The sizes of the model in `folder`; `field` is the config field that named it.

    Raises:
        ModelError: the folder, or its config.json, is missing, unreadable or of no supported model.
    """
    path = Path(folder)
    if not path.is_dir():
        siblings = [str(p) for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise ModelError.of(field, folder, "is no folder", allowed=A_MODEL, choices=siblings)
    if not (path / "config.json").exists():
        raise ModelError.of(field, folder, "has no config.json", allowed="a Hugging Face model folder")
    try:
        return ModelShape.read(path)
    except ModelError as error:
        raise ModelError(f"{field} is '{folder}': {error}") from None


def _check_freeze(field: str, parts: Sequence[ModelPart], *, sees: bool) -> None:
    if not sees:
        raise ConfigError.of(
            field, list(parts), "names parts of a vision-language model, and this one only reads", allowed="[]"
        )
    if set(parts) == set(get_args(ModelPart)):
        raise ConfigError.of(field, list(parts), "leaves nothing to train", allowed="at most two parts")


def _check_layout(field: str, layout: Layout, sizes: dict[str, Any], layer_spec: str = "auto") -> None:
    try:
        layout.check_layer_spec(layer_spec)
        layout.check_model(**sizes)
    except LayoutError as error:
        raise error.under(field, ConfigError) from None
