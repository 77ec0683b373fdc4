"""FP8 training as values: what each recipe asks of the GPU and of sizes, and which settings go together.

The rules are Transformer Engine's (its documentation of each recipe, `get_align_size_for_quantization`, `check_*_support`)
and megatron-core's (`TransformerConfig.__post_init__` of 0.16.1 and 0.19). Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megarl.config.layout import Layout, divisors
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.schema import ModelConfig, TrainedRole

Fp8Format = Literal["none", "hybrid", "e4m3"]
Fp8RecipeName = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]


@dataclass(frozen=True)
class Recipe:
    """What one recipe asks for. `multiple`: tokens and widths of every rank are multiples of it.

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
    """What every rank's tokens of a micro-batch are padded to: the recipe's multiple, 1 without FP8."""
    return 1 if fp8 == "none" else RECIPES[recipe].multiple


def device_problem(recipe: str, capability: tuple[int, int], cuda: str | None) -> str | None:
    """Why a GPU of this compute capability, under torch's CUDA version such as "13.0", cannot run `recipe`; None if it can."""
    needs = RECIPES[recipe]
    version = tuple(int(part) for part in (cuda or "0.0").split(".")[:2])
    if needs.capability <= capability < needs.below and version >= needs.cuda:
        return None
    here = f"compute capability {capability[0]}.{capability[1]} under CUDA {cuda}"
    return f"model.fp8_recipe is '{recipe}', which needs {needs.gpus}, but this GPU has {here}"


def check_fp8(model: ModelConfig, *, trained: dict[str, TrainedRole], frozen: list[str]) -> None:
    """Refuse FP8 settings that contradict each other.

    Args:
        model: the config's model section.
        trained: config section -> every role that the run trains.
        frozen: every model of the run that is never trained, in words.

    Raises:
        ConfigError: one sentence about the first contradiction.
    """
    if model.fp8 == "none":
        if model.fp8_param:
            raise ConfigError(
                "model.fp8_param is true, but model.fp8 is 'none'; it may be false, or model.fp8 'hybrid' or 'e4m3'"
            )
        if any(model.fp8_bf16_layers):
            raise ConfigError(
                f"model.fp8_bf16_layers is {list(model.fp8_bf16_layers)}, but model.fp8 is 'none', where all layers are in "
                "BF16; it may be [0, 0]"
            )
        return
    if model.layer_spec in ("reference", "local"):
        raise ConfigError(
            f"model.fp8 is '{model.fp8}', but only model.layer_spec = 'transformer_engine' computes in FP8; it may be 'none'"
        )
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.fp8 is '{model.fp8}', but model.dtype is '{model.dtype}'; what is not in FP8 is in BF16, so it may be "
            "'bfloat16'"
        )
    if model.fp8_recipe == "delayed":
        _check_delayed(model, frozen)
    for name, role in trained.items():
        if model.fp8_param and role.optimizer.offload_fraction:
            raise ConfigError(
                f"{name}.optimizer.offload_fraction is {role.optimizer.offload_fraction}, but the offloaded copy of weights "
                "that are in FP8 only (model.fp8_param) would start from their rounded values; it may be 0"
            )


def _check_delayed(model: ModelConfig, frozen: list[str]) -> None:
    if any(model.fp8_bf16_layers):
        raise ConfigError(
            f"model.fp8_bf16_layers is {list(model.fp8_bf16_layers)}, but model.fp8_recipe = 'delayed' takes all layers or "
            "none; it may be [0, 0], or model.fp8_recipe 'tensorwise', 'blockwise' or 'mxfp8'"
        )
    if frozen:
        raise ConfigError(
            f"model.fp8_recipe is 'delayed', which learns its scales in training passes, but {frozen[0]} is never trained; it "
            "may be 'tensorwise', 'blockwise' or 'mxfp8'"
        )


def check_fp8_sizes(model: ModelConfig, field: str, layout: Layout, sizes: dict[str, Any]) -> None:
    """Refuse a model whose widths FP8 cannot split as `layout` (the config field `field`) says.

    Args:
        sizes: `checks.read_sizes` of the model.

    Raises:
        ConfigError: a width is no multiple of what the recipe needs, or more layers stay in BF16 than a stage has.
    """
    if model.fp8 == "none":
        return
    multiple = RECIPES[model.fp8_recipe].multiple
    for width, name, dimension in (
        (sizes["hidden_size"], "hidden size", None),
        (sizes["attention_width"], "attention width", "tp"),
        (sizes["ffn_size"], "feed-forward width", "tp"),
        (sizes["expert_ffn_size"], "experts' feed-forward width", "etp"),
    ):
        ranks = getattr(layout, dimension) if dimension else 1
        if width is None or width % (ranks * multiple) == 0:
            continue
        needed = f"must be a multiple of {multiple} under model.fp8_recipe = '{model.fp8_recipe}'"
        fit = [n for n in divisors(width) if width // n % multiple == 0]
        if dimension and fit:
            raise ConfigError(
                f"{field}.{dimension} is {ranks}, but every rank's share of the model's {name} of {width} {needed}; "
                f"{dimension} may be {', '.join(map(str, fit))}"
            )
        raise ConfigError(f"the {name} of {field}'s model is {width}, but it {needed}; {_other_recipes(width)}")
    _check_bf16_layers(model, field, layout, sizes["num_layers"])


def _other_recipes(width: int) -> str:
    fit = [f"'{name}'" for name, recipe in RECIPES.items() if width % recipe.multiple == 0]
    return f"that may be {' or '.join(fit)}" if fit else "model.fp8 may be 'none'"


def _check_bf16_layers(model: ModelConfig, field: str, layout: Layout, layers: int) -> None:
    of_stage = layers // layout.pp
    if max(model.fp8_bf16_layers) > of_stage:
        raise ConfigError(
            f"model.fp8_bf16_layers is {list(model.fp8_bf16_layers)}, but a pipeline stage of {field} has {of_stage} layers; "
            f"each number may be 0 to {of_stage}"
        )
    if sum(model.fp8_bf16_layers) >= layers:
        raise ConfigError(
            f"model.fp8_bf16_layers is {list(model.fp8_bf16_layers)}, which leaves none of the model's {layers} layers in FP8; "
            "the numbers may add up to less, or model.fp8 be 'none'"
        )
