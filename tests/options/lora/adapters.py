"""Low-rank adapters by the real `peft` beside the tiny models of `tests/families`, under megarl's names of their tensors.

transformers holds all experts of a layer in two parameters. There peft has one A for gate and up, megarl one for each, as there
is in folders: the same as peft's with twice the rank, of which half is the gate's and half is up's, and zeros elsewhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for
from megarl.options.lora.weight_map import Lora, layer_shapes
from tests.families import by_hub_name, kinds_of_layers, linear, state_spaces

LORA = Lora(rank=3, alpha=5.0)
"""A rank that no number of ranks divides."""
SPREAD = 0.07
"""Of the random values, so that adapters matter and transformers in float32 is near its float64."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def with_adapters(model: Any, folder: Path, lora: Lora = LORA, spread: float = SPREAD) -> Any:
    """peft's model of `model`, whose folder is `folder`, with seeded random adapters that matter."""
    from peft import LoraConfig, get_peft_model

    config = HFFolder(folder).config
    architecture = architecture_for(config)
    names = layer_shapes(architecture.weight_map(config), architecture.rows_together(config))
    chosen = [name for name in names if lora.has_adapter(name)]
    experts = {name for name in chosen if _EXPERT.search(name)}
    more: dict[str, Any] = {}
    if experts:
        for module in model.modules():
            if type(module).__name__ == "Llama4TextExperts":  # transformers tells peft of other families' that they are
                module.is_transposed = True
        together = [name for name, values in model.named_parameters() if ".experts." in name and values.dim() == 3]
        more = {
            "target_parameters": sorted({".".join(name.split(".")[3:]) for name in together}),
            "rank_pattern": {r".*\.gate_up_proj": 2 * lora.rank},
            "alpha_pattern": {r".*\.gate_up_proj": 2 * lora.alpha},
        }
    given = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=[name for name, _ in model.named_modules() if _on_the_hub(config["model_type"], name) in chosen],
        **more,
    )
    # peft takes `layers.1.mlp.gate_proj` for an expert's, and would leave that dense layer out
    with patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # of parameters: they do count
        made = get_peft_model(model, given)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for values in made.parameters():
            if values.requires_grad:
                values.copy_(spread * torch.randn(values.shape, generator=generator))
        for wrapper, alternating in _gate_and_up(made):
            _blocks(wrapper, alternating)
    return made.eval()


def tensors(made: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """The values of all adapters, or their gradients, by megarl's names."""
    from peft.tuners.lora.layer import ParamWrapper

    found: dict[str, Tensor] = {}
    for name, module in made.named_modules():
        if not hasattr(module, "lora_A") or "default" not in module.lora_A:
            continue
        a, b = (_of(getattr(module, part)["default"].weight, gradients=gradients) for part in ("lora_A", "lora_B"))
        name = re.sub(r"(\.base_layer)+$", "", name.removeprefix("base_model.model."))
        if isinstance(module, ParamWrapper):
            found |= _of_experts(made, name, module, a, b)
        else:
            layer = _on_the_hub(made.base_model.model.config.model_type, name)
            found |= {f"{layer}{LORA_A}": a, **_parts(made, layer, b)}
    return found


def _on_the_hub(model_type: str, layer: str) -> str:
    return kinds_of_layers.hub_name(model_type, state_spaces.hub_name(model_type, linear.hub_layer(model_type, layer)))


def _of(parameter: Tensor, *, gradients: bool) -> Tensor:
    values = parameter.grad if gradients else parameter.data
    return torch.zeros_like(parameter) if values is None else values


def _parts(made: Any, layer: str, b: Tensor) -> dict[str, Tensor]:
    """B of a layer, or of those that transformers holds in one."""
    folder_config = made.base_model.model.config.to_dict()
    fused = architecture_for(folder_config).rows_together(folder_config)
    stored = f"{layer}.weight"
    found = {}
    for name in fused.names_of(stored) if fused is not None else [stored]:
        place = fused.place(name) if fused is not None else None
        rows = b if place is None else b[place.start : place.stop]
        found[name.removesuffix(".weight") + LORA_B] = rows
    return found


def _of_experts(made: Any, module: str, wrapper: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    of_a = a.reshape(wrapper.num_experts, -1, a.shape[-1])
    of_b = b.reshape(len(b), -1, wrapper.num_experts)
    together = iter([(f"{module}.{wrapper.parameter_name}", wrapper.get_param())])
    names = [name.removesuffix(".weight") for name in by_hub_name(made.base_model.model, together)]
    found: dict[str, Tensor] = {}
    for name in names:
        expert, own = (
            int(_EXPERT.findall(name)[0]),
            [other for other in names if _EXPERT.findall(other) == _EXPERT.findall(name)],
        )
        rank, place = of_a.shape[1] // len(own), own.index(name)
        rows = _halves(of_b[:, :, expert], _is_alternating(made))[place] if len(own) == 2 else of_b[:, :, expert]
        ranks = slice(place * rank, (place + 1) * rank)
        found |= {f"{name}{LORA_A}": of_a[expert, ranks], f"{name}{LORA_B}": rows[:, ranks]}
    return found


def _gate_and_up(made: Any) -> Iterator[tuple[Any, bool]]:
    from peft.tuners.lora.layer import ParamWrapper

    for module in made.modules():
        if isinstance(module, ParamWrapper) and module.parameter_name == "gate_up_proj":
            yield module, _is_alternating(made)


def _is_alternating(made: Any) -> bool:
    return made.base_model.model.config.model_type == "gpt_oss"


def _halves(rows: Tensor, alternating: bool) -> tuple[Tensor, Tensor]:
    return (rows[0::2], rows[1::2]) if alternating else rows.chunk(2)


def _blocks(wrapper: Any, alternating: bool) -> None:
    """Set what would mix the gate's A with up's B to zero, and the other way round."""
    weight = wrapper.lora_B["default"].weight
    of_b = weight.reshape(len(weight), -1, wrapper.num_experts)
    rank = of_b.shape[1] // 2
    gate, up = _halves(of_b, alternating)
    gate[:, rank:], up[:, :rank] = 0.0, 0.0
