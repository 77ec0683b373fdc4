"""PEFT folders of adapters, in and out, without peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import ModelError, nearest
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.chat_template_file import carry_template
from megarl.models.expert_tensors import RowSlice, joined
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_folder import new_folder
from megarl.models.registry import architecture_for
from megarl.options.lora.peft_header import (
    CONFIG_FILE,
    OUTPUT_WEIGHT,
    PREFIX,
    SCORE,
    WEIGHTS_FILE,
    AdapterHeader,
    config_of,
    lora_b,
    weight_of,
)
from megarl.options.lora.weight_map import Lora, layer_shapes


class AdapterFolder(AdapterHeader):
    """A PEFT folder opened for reading, checked against the model's config. Tensors have the names that weight maps have."""

    def __init__(self, path: str | Path, hf_config: Mapping[str, Any]) -> None:
        """Open the folder as `AdapterHeader` does."""
        super().__init__(path, hf_config)
        self._whole = lru_cache(maxsize=4)(lambda stored: self._slice(stored)[:])

    def get_slice(self, name: str) -> Any:
        """A tensor, or what gives a tensor where it is indexed (`[:]`, `[a:b]`, `[:, a:b]`).

        Raises:
            ModelError: there is no such tensor, or the file is damaged.
        """
        if (part := self.of_experts.get(name)) is not None:
            whole, rank = self._whole(part.stored), self.lora.rank
            if name.endswith(LORA_A):
                return whole[part.expert * rank : (part.expert + 1) * rank].contiguous()
            return whole[part.rows, part.expert :: part.experts].contiguous()
        place = self.fused_rows.place(weight_of(name)) if self.fused_rows is not None and name.endswith(LORA_B) else None
        stored = name if place is None else lora_b(place.stored)
        if stored not in self.stored:
            raise ModelError(f"adapter folder '{self.path}' has no tensor '{name}'{nearest(name, self.names)}")
        source = self._slice(self.stored[stored])
        return source if place is None else RowSlice(source, place)

    def check_output(self, base: Any, rows: slice) -> None:
        """Compare `rows` of the output layer's own weight, if it is stored, with those of `base`, a slice or a tensor.

        Raises:
            ModelError: they differ, so the adapters are of another model.
        """
        if (stored := self.stored.get(OUTPUT_WEIGHT)) is None:
            return
        weight = self._slice(stored)[rows]
        if not torch.equal(weight, base[rows].to(weight.dtype)):
            raise ModelError(
                f"tensor '{stored}' in '{self._file}' differs from the model's output layer: the adapters were trained beside "
                "another one; they must be of this model"
            )

    def _slice(self, stored: str) -> Any:
        try:
            return self._opened.get_slice(stored)
        except SafetensorError as error:
            raise ModelError(f"'{self._file}' does not give tensor '{stored}': {error}") from None

    @cached_property
    def _opened(self) -> Any:
        try:
            return safe_open(self._file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"'{self._file}' is damaged or cut short: {error}") from None


def write_peft_folder(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    lora: Lora,
    *,
    base: str,
    hf_config: Mapping[str, Any],
    template: str | Path | None = None,
) -> None:
    """Write a PEFT folder that appears whole or not at all. All tensors are held until then.

    Args:
        path: a new or an empty folder.
        tensors: A and B of every adapter under the names that weight maps have, in any order, and perhaps `score.weight`.
        lora: their rank and scale.
        base: the folder or the hub's id of the model that they are for.
        hf_config: that model's `config.json`.
        template: a file with the chat template that they were trained with, where it is not the model's own.

    Raises:
        ModelError: `path` is a file or a folder with something in it, a tensor comes twice, or a part of one is missing.
    """
    family = architecture_for(dict(hf_config))
    rows = family.rows_together(dict(hf_config))
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors if rows is None else _joined(replace(rows, columns=lora.rank), tensors):
        if name in weights:
            raise ModelError(f"tensor '{name}' comes twice; each tensor is exported once")
        weights[name] = tensor.detach().cpu().contiguous()
    layers = {name.removesuffix(LORA_A) for name in weights if name.endswith(LORA_A)}
    config = config_of(lora, base, _targets(layers, hf_config), score=SCORE in weights)
    with new_folder(path, CONFIG_FILE, config) as staging:
        save_file(
            {PREFIX + name: tensor for name, tensor in weights.items()}, staging / WEIGHTS_FILE, metadata={"format": "pt"}
        )
        carry_template(Path(template) if template is not None else None, staging)


def _targets(layers: set[str], hf_config: Mapping[str, Any]) -> set[str]:
    """The ends of the names of `layers`, by which PEFT finds exactly these in the model; else the whole names.

    Modules of a vision tower are not known here, and may end alike.
    """
    config = dict(hf_config)
    family = architecture_for(config)
    if family.vision(config) is not None:
        return layers
    weight_map, ends = family.weight_map(config), {_end(layer) for layer in layers}
    modules = {name.rpartition(".")[0] for name in weight_map.hf_shapes()}
    modules |= layer_shapes(weight_map, family.rows_together(config)).keys()
    return ends if {module for module in modules if _end(module) in ends} == layers else layers


def _end(module: str) -> str:
    return module.rpartition(".")[2]


def _joined(rows: FusedRows, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with the Bs of layers that the hub stores one below another in one."""
    parts: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if name.endswith(LORA_B):
            parts.append((weight_of(name), tensor))
        else:
            yield name, tensor
    for name, tensor in joined(rows, parts):
        yield lora_b(name), tensor
