"""Merges adapters into the weights beside which they stand, tensor by tensor: W + scale·B·A in float32, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megarl.config.section import TEMPLATE_FILE
from megarl.errors import ModelError
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.hf_fields import without_tied_output
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for, sequence_classifier
from megarl.options.lora.peft_folder import AdapterFolder
from megarl.options.lora.peft_header import SCORE
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import OUTPUT_LAYER

OUTPUT_WEIGHT = f"{OUTPUT}.weight"


def merge_adapters(base: str | Path, adapter: str | Path, target: str | Path) -> int:
    """Write the model in `base` with the adapters in the PEFT folder `adapter` merged in to the new folder `target`.

    Weights keep their dtypes. Where a classifier's head is stored with the adapters, the result is that classifier. An output
    layer that is tied to the embedding gets a weight of its own if it has an adapter. Returns how many layers had an adapter.

    Raises:
        ModelError: a folder is damaged, its weights are quantised, the adapters are of another model, or `target` exists.
    """
    folder = HFFolder(base)
    if folder.config.get("quantization_config"):
        raise ModelError(
            f"'{base}' holds quantised weights (quantization_config in config.json), to which nothing can be added exactly; "
            "write its weights in bfloat16 first, with `megarl convert import` and `export`"
        )
    adapters = AdapterFolder(adapter, folder.config)
    config = sequence_classifier(folder.config) if adapters.has_score else folder.config
    if OUTPUT in adapters.lora.targets and _output_of(folder) != OUTPUT_WEIGHT:
        config = without_tied_output(config)
    template = Path(adapter) / TEMPLATE_FILE
    write_hf_folder(target, _merged(folder, adapters), config, extra_files_from=base, template=template)
    return len(adapters.lora.targets)


def _merged(folder: HFFolder, adapters: AdapterFolder) -> Iterator[tuple[str, Tensor]]:
    adapter_names, rows = set(adapters.names), architecture_for(folder.config).rows_together(folder.config)
    output, names = _output_of(folder), list(folder.names)
    if OUTPUT in adapters.lora.targets and not adapters.has_score:
        adapters.check_output(folder.get_slice(output), slice(None))
        names = list(dict.fromkeys([*names, OUTPUT_WEIGHT]))  # a tied one may be stored as the embedding alone
    for name in names:
        if adapters.has_score and name in (OUTPUT_WEIGHT, SCORE):
            continue
        weight = folder.get_slice(output if name == OUTPUT_WEIGHT else name)[:]
        layer = name.removesuffix(".weight")
        if layer + LORA_B not in adapter_names:
            yield name, weight
            continue
        place = rows.place(name) if rows is not None else None
        of_a = (place.stored if place is not None else name).removesuffix(".weight") + LORA_A
        a, b = (adapters.get_slice(tensor_name)[:].float() for tensor_name in (of_a, layer + LORA_B))
        yield name, (weight.float() + b @ a * adapters.lora.scale).to(weight.dtype)
    if adapters.has_score:
        yield SCORE, adapters.get_slice(SCORE)[:]


def _output_of(folder: HFFolder) -> str:
    """The tensor that is the output layer's weight: its own, or the embedding's where they are tied."""
    weight_map = architecture_for(folder.config).weight_map(folder.config)
    [name] = weight_map.rule_for(f"{OUTPUT_LAYER}.weight").hf_names
    return name
