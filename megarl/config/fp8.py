"""FP8 training as values: what each recipe asks of the GPU and of sizes, and which settings go together.

The rules are Transformer Engine's (its documentation of each recipe, `get_align_size_for_quantization`, `check_*_support`)
and megatron-core's (`TransformerConfig.__post_init__` of 0.16.1 and 0.19). Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.layout import Layout, divisors
from megarl.config.sections import ModelConfig, TrainedRole
from megarl.errors import ConfigError, either


@dataclass(frozen=True)
class Recipe:
    """The demands of one recipe. `multiple`: tokens and widths of every rank are multiples of it.

    `capability` is the lowest compute capability, `below` the first one that is too new, `cuda` the lowest CUDA version of
    torch; `gpus` says the same in words.
    """

    multiple: int
    capability: tuple[int, int]
    gpus: str
    below: tuple[int, int] = (99, 0)
    cuda: tuple[int, int] = (12, 1)


RECIPES: dict[str, Recipe] = {
    "delayed": Recipe(16, (8, 9), "Ada, Hopper or newer"),
    "tensorwise": Recipe(16, (8, 9), "Ada, Hopper or newer"),
    "blockwise": Recipe(128, (9, 0), "Hopper or newer with CUDA 12.9 or newer", cuda=(12, 9)),
    "mxfp8": Recipe(32, (10, 0), "Blackwell of compute capability 10", below=(12, 0)),
}


def token_multiple(fp8: str, recipe: str) -> int:
    """The multiple to which every rank pads the tokens of a micro-batch: the recipe's multiple, 1 without FP8."""
    return 1 if fp8 == "none" else RECIPES[recipe].multiple


def device_problem(recipe: str, capability: tuple[int, int], cuda: str | None) -> str | None:
    """Why a GPU of this compute capability, under torch's CUDA version such as "13.0", cannot run `recipe`; None if it can."""
    needs = RECIPES[recipe]
    version = tuple(int(part) for part in (cuda or "0.0").split(".")[:2])
    if needs.capability <= capability < needs.below and version >= needs.cuda:
        return None
    here = f"compute capability {capability[0]}.{capability[1]} under CUDA {cuda}"
    return f"model.fp8_recipe is '{recipe}', which needs {needs.gpus}; this GPU has {here}"


def check_fp8(model: ModelConfig, *, trained: dict[str, TrainedRole], frozen: list[str]) -> None:
    """Refuse FP8 settings that contradict each other.

    Args:
        model: the config's model section.
        trained: config section -> every role that the run trains.
        frozen: every model of the run that is never trained, in words.

    Raises:
        ConfigError: one sentence about the first contradiction.
    """
    if model.int4_experts and model.fp8 != "none":
        reason = f"rounds weights that model.fp8 = '{model.fp8}' would round again"
        raise ConfigError.of("model.int4_experts", model.int4_experts, reason, allowed="0, or set model.fp8 to 'none'")
    if model.fp8 == "none":
        for field, is_set in (("fp8_param", model.fp8_param), ("fp8_bf16_layers", any(model.fp8_bf16_layers))):
            if is_set:
                raise ConfigError.needs_set(f"model.{field}", "FP8 products", "model.fp8 to 'hybrid' or 'e4m3'")
        return
    if model.layer_spec in ("reference", "local"):
        reason = f"only model.layer_spec = 'transformer_engine' computes, not '{model.layer_spec}'"
        allowed = "'none', or set model.layer_spec to 'transformer_engine'"
        raise ConfigError.of("model.fp8", model.fp8, reason, allowed=allowed)
    if model.dtype != "bfloat16":
        reason = f"model.fp8 = '{model.fp8}' cannot use: what is not in FP8 is in BF16"
        raise ConfigError.of("model.dtype", model.dtype, reason, allowed="'bfloat16', or set model.fp8 to 'none'")
    if model.fp8_recipe == "delayed":
        _check_delayed(model, frozen)
    for name, role in trained.items():
        fraction = role.optimizer.offload_fraction
        if model.fp8_param and fraction:
            field, allowed = f"{name}.optimizer.offload_fraction", "0, or remove model.fp8_param"
            reason = "would start the offloaded weights from their rounded FP8 values (model.fp8_param)"
            raise ConfigError.of(field, fraction, reason, allowed=allowed)


def _check_delayed(model: ModelConfig, frozen: list[str]) -> None:
    others = "'tensorwise', 'blockwise' or 'mxfp8'"
    if any(model.fp8_bf16_layers):
        reason = "model.fp8_recipe = 'delayed' cannot do: it takes all layers or none"
        allowed = f"[0, 0], or set model.fp8_recipe to {others}"
        raise ConfigError.of("model.fp8_bf16_layers", model.fp8_bf16_layers, reason, allowed=allowed)
    if frozen:
        reason = f"learns its scales in training passes, and {frozen[0]} is never trained"
        raise ConfigError.of("model.fp8_recipe", "delayed", reason, allowed=others)


@dataclass(frozen=True)
class Fp8Widths:
    """Widths of a model that FP8 must be able to split: see `models/shape.ModelShape`. None: the model has no such part."""

    hidden: int
    attention: int
    ffn: int | None
    expert_ffn: int | None
    layers: int


def check_fp8_sizes(model: ModelConfig, field: str, layout: Layout, widths: Fp8Widths) -> None:
    """Refuse a model whose widths FP8 cannot split as `layout` (the config field `field`) says.

    Raises:
        ConfigError: a width is no multiple of what the recipe needs, or more layers stay in BF16 than a stage has.
    """
    if model.fp8 == "none":
        return
    multiple, recipe = RECIPES[model.fp8_recipe].multiple, f"model.fp8_recipe = '{model.fp8_recipe}'"
    for width, name, dimension in (
        (widths.hidden, "hidden size", None),
        (widths.attention, "attention width", "tp"),
        (widths.ffn, "feed-forward width", "tp"),
        (widths.expert_ffn, "experts' feed-forward width", "etp"),
    ):
        ranks = getattr(layout, dimension) if dimension else 1
        if width is None or width % (ranks * multiple) == 0:
            continue
        fit = [n for n in divisors(width) if width // n % multiple == 0]
        if dimension and fit:
            reason = f"splits the model's {name} of {width} into parts that are no multiple of {multiple}, which {recipe} needs"
            rule = f"splits the {name} into parts that FP8 cannot hold"
            raise ConfigError.of(f"{field}.{dimension}", ranks, reason, allowed=either(fit), rule=rule)
        what = f"multiples of {multiple}, and the {name} of the model of {field} is {width}"
        raise ConfigError.needs(recipe, what, _other_recipes(width))
    _check_bf16_layers(model, field, layout, widths.layers)


def _other_recipes(width: int) -> str:
    fit = [f"'{name}'" for name, recipe in RECIPES.items() if width % recipe.multiple == 0]
    return f"set model.fp8_recipe to {either(fit)}" if fit else "set model.fp8 to 'none'"


def _check_bf16_layers(model: ModelConfig, field: str, layout: Layout, layers: int) -> None:
    exempt, of_stage = model.fp8_bf16_layers, layers // layout.pp
    if max(exempt) > of_stage:
        rule = "is more than the layers of a pipeline stage"
        reason = f"is more than the {of_stage} layers of a pipeline stage of {field}"
        raise ConfigError.of("model.fp8_bf16_layers", exempt, reason, allowed=f"two numbers from 0 to {of_stage}", rule=rule)
    if sum(exempt) >= layers:
        reason, rule = f"leaves none of the model's {layers} layers in FP8", "leaves no layer in FP8"
        allowed = f"two numbers that add up to less than {layers}, or set model.fp8 to 'none'"
        raise ConfigError.of("model.fp8_bf16_layers", exempt, reason, allowed=allowed, rule=rule)
