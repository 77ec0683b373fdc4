"""The adapters in a distributed checkpoint of a run, written as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.format.dist_format import DistFolder
from megarl.config.yaml_tree import read_yaml
from megarl.convert.sources import DistSource
from megarl.errors import CheckpointError, ConfigError
from megarl.models.adapters import IN_CHECKPOINTS, LORA_A
from megarl.options.lora.peft_folder import write_peft_folder
from megarl.options.lora.peft_header import SCORE, lora_of_section
from megarl.options.lora.section import LoraConfig

_VALUE_HEAD = "output_layer.weight"


def export_adapters(source: DistSource, target: str | Path) -> int:
    """Write the adapters in `source`, the checkpoint of a run's role, to the new PEFT folder `target`.

    Their scale is in the run's config. Returns their number.

    Raises:
        CheckpointError: the checkpoint is damaged, or in no run's folder.
        ModelError: `target` has something in it.
    """
    folder, hf_config = source.dist, source.hf_config
    assert folder is not None, "it has been read"
    lora = lora_of_section(_section(source.path), hf_config, f"{source.path.resolve().name}.lora")
    names = {key.removeprefix(IN_CHECKPOINTS): key for key in folder.keys if key.startswith(IN_CHECKPOINTS)}
    if _VALUE_HEAD in folder.keys:
        names[SCORE] = _VALUE_HEAD
    tensors = ((name, _whole(folder, key)) for name, key in names.items())
    base, template = str(source.companions), source.template
    write_peft_folder(target, tensors, lora, base=base, hf_config=hf_config, template=template)
    return sum(name.endswith(LORA_A) for name in names)


def _section(path: Path) -> LoraConfig:
    """The section `lora` of the role whose checkpoint this is, `<run>/checkpoints/step_N/<role>`."""
    resolved = path.resolve()
    file = resolved.parents[2] / "config.yaml" if len(resolved.parents) > 2 else resolved / "config.yaml"
    try:
        section: Any = read_yaml(file)[resolved.name]["lora"]
        return LoraConfig(**{name: value for name, value in section.items() if name in LoraConfig.model_fields})
    except (ConfigError, LookupError, TypeError, AttributeError, ValueError):
        raise CheckpointError(
            f"'{path}' holds adapters alone, whose scale is in the config of their run, and '{file}' does not have it; it must "
            "be <run>/checkpoints/step_N/<role>"
        ) from None


def _whole(folder: DistFolder, key: str) -> Tensor:
    stored = folder.keys[key]
    whole, filled = torch.empty(stored.shape, dtype=stored.dtype), 0
    for chunk in stored.chunks:
        region = whole
        for axis, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            region = region.narrow(axis, start, size)
        nbytes = region.numel() * stored.dtype.itemsize
        with (folder.path / chunk.file).open("rb") as file:
            file.seek(folder.data_offset(key, chunk))
            data = bytearray(file.read(nbytes))
        region.copy_(torch.frombuffer(data, dtype=stored.dtype).view(chunk.sizes))
        filled += region.numel()
    if filled != whole.numel():
        raise CheckpointError(f"'{key}' in '{folder.path}' is incomplete or has chunks that overlap")
    return whole
