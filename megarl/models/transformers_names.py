"""A transformers model's tensors under the names that a checkpoint on the hub gives them.

transformers holds all experts of a layer in one parameter, calls every feed-forward block `mlp` and keeps DeepSeek's expert
bias as a buffer; on the hub every expert has tensors of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.errors import ModelError
from megarl.models.architecture import Architecture, HFConfig, HubNames
from megarl.models.fused_rows import FusedRows
from megarl.models.registry import architecture_for, architectures, load_hf_config


def config_in_transformers(folder: str | Path) -> Any:
    """The config object of a folder whose `model_type` transformers does not have, because it differs in the name alone.

    None: transformers reads the folder's own config. Classes that the config names are not imported.
    """
    from transformers import AutoConfig

    try:
        config = load_hf_config(folder)
    except ModelError:
        return None
    known_family = next((family for family in architectures() if config.get("model_type") in family.other_types), None)
    if known_family is None:
        return None
    fields = {name: value for name, value in config.items() if name not in ("model_type", "auto_map")}
    return AutoConfig.for_model(known_family.name, **fields)


def auto_class(hf_config: HFConfig) -> Any:
    """transformers' class that makes and loads a config's models: also those of text that it lists with models that see."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as listed

    of_text, of_both = listed.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, listed.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    model_type = hf_config.get("model_type")
    tell_transformers(model_type)
    sees = "vision_config" in hf_config or (model_type in of_both and model_type not in of_text)
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def tell_transformers(model_type: str | None) -> None:
    """Tell transformers of the model of text that megarl has of a family of whose layers alone transformers knows."""
    for family in architectures():
        if family.name == model_type and family.module is not None:
            importlib.import_module(family.module)


def loader_of(folder: str | Path) -> Callable[..., Any]:
    """transformers' function that loads the model of a folder, with the attention that computes all of it: PyTorch's own does
    not cap scores, and says nothing."""
    try:
        hf_config = load_hf_config(folder)
        caps = architecture_for(hf_config).traits(hf_config).score_cap is not None
    except ModelError:  # transformers says what is wrong with it
        hf_config, caps = {}, False
    return partial(auto_class(hf_config).from_pretrained, **({"attn_implementation": "eager"} if caps else {}))


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """Hub name -> view, so that writing to it writes to `model`: parameters and the buffers that a checkpoint holds.

    A tied output layer appears once, as the embeddings.
    """
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    family = next((family for family in architectures() if family.name == model.config.model_type), None)
    hub, others = (family.hub, family.other_names) if family is not None else (HubNames(), ())
    on_the_hub = family.hub_name if family is not None else str
    fused = _together(family, model.config.to_dict()) if family is not None else None
    return {
        hub_name: view
        for name, tensor in model.state_dict().items()
        if name in names
        for hub_name, view in _as_on_the_hub(with_prefix(on_the_hub(name), others), tensor, hub, fused)
    }


def _together(family: Architecture, hf_config: HFConfig) -> FusedRows | None:
    """What transformers holds in one parameter; None: nothing but experts."""
    return family.in_transformers(hf_config) if family.in_transformers is not None else family.rows_together(hf_config)


def with_prefix(name: str, others: Iterable[tuple[str, str]]) -> str:
    """The name with what the hub's begins with; `others` as in `Architecture.other_names`."""
    for other, on_the_hub in others:
        if name.startswith(other):
            return on_the_hub + name.removeprefix(other)
    return name


def _as_on_the_hub(name: str, tensor: Tensor, hub: HubNames, fused: FusedRows | None) -> Iterator[tuple[str, Tensor]]:
    """A tensor's hub names and parts: fused experts `[E, 2F, H]` (gate over up) and `[E, H, F]` (down) come one by one, and
    so do matrices that the hub stores one below another.

    Where gate and up alternate, experts are `[E, H, 2F]` and `[E, F, H]`, with biases.
    """
    if fused is not None and (names := fused.names_of(name)) != [name]:
        for part in names:
            if (place := fused.place(part)) is not None:
                yield part, tensor[place.start : place.stop]
        return
    if (block := name.removesuffix(HubNames.expert_bias)) != name:
        name = block + hub.expert_bias
    name = name.replace(".mlp.", f".{hub.block}.")
    for part, on_the_hub in hub.renamed:
        name = name.replace(part, on_the_hub)
    for end, on_the_hub in hub.ends:
        name = name.removesuffix(end) + on_the_hub if name.endswith(end) else name
    gate, up, down = hub.expert
    prefix, _, part = name.rpartition(".experts.")
    tensor = tensor.mT if hub.transposed and prefix and tensor.dim() == 3 else tensor
    stored, _, bias = part.partition("_proj")
    if hub.alternating and prefix:
        kind = bias.removeprefix("_") or "weight"
        for expert, matrix in enumerate(tensor):
            rows = matrix.mT if matrix.dim() == 2 else matrix
            halves = {down: rows} if stored == "down" else {gate: rows[::2], up: rows[1::2]}
            for projection, values in halves.items():
                yield f"{prefix}.experts.{expert}.{projection}.{kind}", values
    elif part == "gate_up_proj":
        for expert, rows in enumerate(tensor):
            for projection, half in zip((gate, up), rows.chunk(2), strict=True):
                yield f"{prefix}.experts.{expert}.{projection}.weight", half
    elif part in ("up_proj", "down_proj"):
        for expert, rows in enumerate(tensor):
            yield f"{prefix}.experts.{expert}.{up if part == 'up_proj' else down}.weight", rows
    else:
        yield name, tensor
