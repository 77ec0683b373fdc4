"""Whether the layouts of a config divide its models, by the sizes in the models' `config.json`. Importable without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.config.fp8 import Fp8Widths, check_fp8_sizes
from megarl.config.layout import Layout, closest, divisors
from megarl.config.megatron_options import megatron_of
from megarl.config.sections import ExpertsConfig, TrainedRole
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models.adapters import adapters_of
from megarl.models.context_exchange import check_exchange
from megarl.models.parameter_patterns import check_patterns
from megarl.models.registry import architecture_for, load_hf_config, use_architecture
from megarl.models.shape import ModelShape
from megarl.models.weight_formats import WeightFormat, format_called, stored_format
from megarl.models.windows import check_windows

A_MODEL = "a Hugging Face model folder, or ORG/NAME of the hub (hf://ORG/NAME where a folder ORG is here)"


def check_models(config: AnyConfig) -> None:
    """Check that every model folder exists, that the layouts divide its model and that FP8 can hold what a rank has.

    Raises:
        ModelError: a folder, or its config.json, is missing or unreadable.
        ConfigError: a layout does not divide heads, layers, feed-forward width or experts, or leaves widths unfit for FP8, or
            a role freezes or groups what its model does not have, freezes all of it, balances experts that it does not have, or
            is to train a layer for multi-token prediction, or adapters of layers, that it cannot have.
    """
    use_architecture(config.model.architecture)
    for role in config.roles:
        model, layout = read_shape(role.folder_field, role.folder), role.layout or config.policy.layout
        if role.trained is not None and role.trained.predicts:
            model = _with_prediction(model, value_head=role.value_head)
        ways = megatron_of(config, role.name).get("cp_comm_type")
        _check_layout(f"{role.name}.layout", layout, model, config.model.layer_spec, ways)
        _check_length(role.folder_field, config.longest_sequence, model)
        widths = Fp8Widths(model.hidden, model.attention_width, model.divided_ffn, model.expert_ffn or None, model.layers)
        check_fp8_sizes(config.model, f"{role.name}.layout", layout, widths)
        if role.trained is not None:
            own = replace(model, weight_map=model.weight_map.without_output()) if role.value_head else model
            own.with_lora(adapters_of(role.trained, model.config, f"{role.name}.lora"), f"{role.name}.lora")
            _check_experts(f"{role.name}.experts", role.trained.experts, model)
            _check_patterns(role.name, role.trained, model)
        if config.model.int4_experts and role.name in ("policy", "reference"):
            format = _experts_format(config.model.int4_experts)
            _check_format(format, "model.int4_experts", f"{role.name}.layout", layout, model)
    if config.routing_replay != "none" and not read_shape("model.path", config.model.path).experts:
        reason = f"is for mixtures of experts, and the model in '{config.model.path}' has none"
        raise ConfigError.of("policy.routing.replay", config.routing_replay, reason, allowed="'none'")
    _check_served(config)
    if config.sampling is not None:
        model = read_shape("model.path", config.model.path)
        # what training asks of layouts with experts is not asked of an engine
        _check_layout("rollout", Layout(tp=config.sampling.tp), replace(model, experts=0))


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


def _check_served(config: AnyConfig) -> None:
    """Refuse a folder that engines cannot be sent weights for, and rounding to other weights than theirs."""
    if config.sampling is None:
        return
    served, field = config.sampling.servers.model_path, "rollout.servers.model_path"
    group, format = config.model.int4_experts, None
    if served is not None:
        read_shape(field, served)
        try:
            format = stored_format(load_hf_config(served))
        except ModelError as error:
            raise ModelError(f"{field} is '{served}': {error}") from None
        if format is not None:
            model = read_shape("model.path", config.model.path)
            _check_format(format, field, "policy.layout", config.policy.layout, model)
    if group and format != _experts_format(group):
        remedy = f"name a folder that `megarl convert export --dtype int4-{group}` wrote, or set model.int4_experts to 0"
        raise ConfigError.needs(f"model.int4_experts = {group}", f"engines that serve such weights by {field}", remedy)


def _experts_format(group: int) -> WeightFormat:
    """The format that `model.int4_experts` rounds to."""
    return format_called(f"int4-{group}", "model.int4_experts")


def _check_format(format: WeightFormat, field: str, of_layout: str, layout: Layout, model: ModelShape) -> None:
    try:
        format.check_model(model.config)
        format.check_ranks(model.config, layout.tp, layout.etp)
    except LayoutError as error:
        raise ConfigError(f"{of_layout} does not go with {field}: {error}") from None
    except ModelError as error:
        raise ModelError(f"{field}: {error}") from None


def _with_prediction(model: ModelShape, *, value_head: bool) -> ModelShape:
    """The policy's model with the layer for multi-token prediction that it is to train."""
    reason = None
    if value_head:
        reason = "trains a layer that predicts tokens, and this policy gives scores"
    elif model.weight_map.prediction is None:
        reason = "is for a model that only reads and has one layer for multi-token prediction by its config.json"
    if reason is not None:
        raise ConfigError.of("policy.mtp.train", True, reason, allowed="false")
    return model.with_prediction


def _check_experts(field: str, experts: ExpertsConfig, model: ModelShape) -> None:
    settings = {name: value for name, value in experts.model_dump().items() if value}
    for name, value in settings.items():
        if not model.experts:
            raise ConfigError.of(f"{field}.{name}", value, "is for a model with experts, and this one has none", allowed="0")
    if "bias_update_rate" in settings and not any(
        rule.megatron_name.endswith("expert_bias") for rule in model.weight_map.rules
    ):
        reason = "moves biases that pick experts, and the routers of this model have none"
        raise ConfigError.of(f"{field}.bias_update_rate", experts.bias_update_rate, reason, allowed="0")


def _check_patterns(role: str, trained: TrainedRole, model: ModelShape) -> None:
    sees = model.vision is not None
    if trained.freeze:
        frozen = {rule.megatron_name for rule in check_patterns(f"{role}.freeze", trained.freeze, model.weight_map, sees=sees)}
        if all(rule.megatron_name in frozen for rule in model.weight_map.bound_rules() if not rule.dtype):
            raise ConfigError.of(
                f"{role}.freeze", list(trained.freeze), "leaves nothing to train", allowed="fewer parts or patterns"
            )
    for index, group in enumerate(trained.optimizer.groups):
        check_patterns(f"{role}.optimizer.groups[{index}].match", group.match, model.weight_map, sees=sees)


def _check_length(field: str, longest: int, model: ModelShape) -> None:
    """Refuse sequences for which rotary frequencies would depend on how long each of them is."""
    if model.exact_positions is None or longest <= model.exact_positions[0]:
        return
    tokens, limit_name = model.exact_positions
    raise ConfigError(
        f"{field} is a model whose rotary frequencies depend on the length of a sequence beyond {limit_name} = {tokens} "
        f"tokens, but the longest sequence of this run has {longest}; prompts and responses together must have at most {tokens}"
    )


def _check_layout(field: str, layout: Layout, model: ModelShape, layer_spec: str = "auto", ways: Any = None) -> None:
    try:
        layout.check_layer_spec(layer_spec)
        check_windows(layer_spec, windows=bool(model.window_layers))
        if layer_spec == "transformer_engine":
            heads, windows = {"heads": model.heads, "kv_heads": model.kv_heads}, bool(model.window_layers)
            check_exchange(ways, tp=layout.tp, cp=layout.cp, windows=windows, sinks=model.sinks, **heads)
        if model.biases and model.experts:
            _check_biased_experts(layout)
        if model.latent is not None:
            _check_table_of_angles(layout, model.config)
        for of_kind, _ in model.by_heads:
            layout.check_model(**of_kind.layout_sizes)
        _check_followed(layout, model)
    except LayoutError as error:
        raise error.under(field, ConfigError) from None


def check_layout(layout: Layout, model: ModelShape) -> None:
    """Raise ConfigError, as `check_models` does, where a layout does not divide a model, whatever the layers' spec."""
    _check_layout("policy.layout", layout, model)


def _check_followed(layout: Layout, model: ModelShape) -> None:
    """Layers that read what an earlier one computes must be in its model chunk."""
    followed = architecture_for(model.config).followed(model.config)

    def parted(other: Layout) -> list[int]:
        chunks = [layers for stage in other.stage_layers(model.layers) for layers in stage] if followed else []
        return [layer for layers in chunks for layer in layers if followed.get(layer, layer) < layers[0]]

    if first := parted(layout):
        field = next((name for name in ("vpp", "first_stage_layers", "last_stage_layers") if getattr(layout, name)), "pp")
        reason = f"has layer {first[0]} in another model chunk than layer {followed[first[0]]}, whose results it reads"
        fit = [pp for pp in divisors(model.layers) if not parted(Layout(pp=pp))]
        allowed = (
            closest(fit, layout.pp) if field == "pp" else f"such that none does, or null with pp = {closest(fit, layout.pp)}"
        )
        raise LayoutError.of(field, getattr(layout, field), reason, allowed=allowed)


def _check_table_of_angles(layout: Layout, config: dict[str, Any]) -> None:
    """Latent attention with YaRN: megatron-core 0.16.1 and 0.19.2 cut a table of angles into two chunks for each rank."""
    positions = architecture_for(config).transformer_config_kwargs(config).get("original_max_position_embeddings", 0)
    if layout.cp > 1 and positions % (2 * layout.cp):
        reason = (
            f"does not cut megatron-core's table of {positions} angles (original_max_position_embeddings) into 2 * cp chunks"
        )
        allowed = closest([cp for cp in divisors(positions) if positions % (2 * cp) == 0] or [1], layout.cp)
        raise LayoutError.of("cp", layout.cp, reason, allowed=allowed)


def _check_biased_experts(layout: Layout) -> None:
    """megatron-core splits no biases of experts; whole ones it trains under tensor parallelism only if ranks share them out."""
    if layout.etp > 1:
        raise LayoutError.of("etp", layout.etp, "splits experts that have biases, which megatron-core does not", allowed="1")
    if layout.tp > 1 and layout.ep == 1:
        reason = f"leaves experts that have biases whole on every rank of tp = {layout.tp}, where megatron-core loses gradients"
        raise LayoutError.of("ep", layout.ep, reason, allowed="at least 2")
