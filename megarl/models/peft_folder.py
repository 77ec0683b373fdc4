"""PEFT folders of adapters, in and out, without peft: `adapter_config.json` and `adapter_model.safetensors`.

Tensors are called `base_model.model.`, the hub's name of the layer, `.lora_A.weight` `[rank, in]` or `.lora_B.weight`
`[out, rank]`. Layers that the hub stores one below another have one adapter together; each expert has its own, as in PEFT for
transformers 4. What PEFT for transformers 5 writes, one adapter for all experts of a layer, is read, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.lora import ALL_LINEAR
from megarl.errors import ModelError, nearest
from megarl.models.expert_tensors import RowSlice, joined
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_folder import new_folder
from megarl.models.lora import LORA_A, LORA_B, Lora, layer_shapes
from megarl.models.peft_config import CONFIG_FILE, config_of, lora_of, read_config
from megarl.models.registry import architecture_for
from megarl.models.safetensors_layout import read_entries

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
SCORE = "score.weight"
"""The head of a classifier, stored whole beside its adapters."""

_ALL_EXPERTS = re.compile(r"(.*)\.mlp\.experts(\.base_layer)*")


@dataclass(frozen=True)
class _ExpertPart:
    """One expert's tensor in one of all `experts`: rows of A; of B every `experts`-th column, and of these the rows `rows`."""

    stored: str
    expert: int
    experts: int
    rows: slice


def read_adapter_config(folder: str | Path, hf_config: Mapping[str, Any]) -> Lora:
    """Rank, scale and layers (by their whole names) of the adapters in a PEFT folder for the model of `config.json`.

    Raises:
        ModelError: as `AdapterFolder`.
    """
    return AdapterFolder(folder, hf_config).lora


class AdapterFolder:
    """A PEFT folder opened for reading, checked against the model's config. Tensors have the names that weight maps have."""

    def __init__(self, path: str | Path, hf_config: Mapping[str, Any]) -> None:
        """Read the folder's config, and the header of its tensors.

        Raises:
            ModelError: the folder is no PEFT folder, asks for more than plain LoRA, is damaged, or is of another model.
        """
        self.path, self.config = Path(path), read_config(path)
        self._file = self.path / WEIGHTS_FILE
        if not self._file.exists():
            raise ModelError(f"adapter folder '{self.path}' has no {WEIGHTS_FILE}; adapters must be safetensors")
        self._family, config = architecture_for(dict(hf_config)), dict(hf_config)
        self._rows = self._family.fused_rows(config) if self._family.fused_rows is not None else None
        self._layers = layer_shapes(self._family.weight_map(config), self._rows)
        self._entries = read_entries(self._file)
        self._stored = {self._hub_name(name): name for name in self._entries}
        self._of_experts: dict[str, _ExpertPart] = {}
        self.lora = lora_of(self.config, self._checked_layers())
        """Rank, scale and layers, by their whole names."""
        self._whole = lru_cache(maxsize=4)(lambda stored: self._slice(stored)[:])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tensor, by the names that weight maps have, and the classifier's head if there is one."""
        found = [layer + kind for layer in self.lora.targets for kind in (LORA_A, LORA_B)]
        return (*(part for name in found for part in self._parts(name)), *([SCORE] if self.has_score else []))

    @property
    def has_score(self) -> bool:
        """Whether the head of a classifier is stored beside the adapters."""
        return SCORE in self._stored

    def get_slice(self, name: str) -> Any:
        """A tensor, or what gives a tensor where it is indexed (`[:]`, `[a:b]`, `[:, a:b]`).

        Raises:
            ModelError: there is no such tensor, or the file is damaged.
        """
        if (part := self._of_experts.get(name)) is not None:
            whole, rank = self._whole(part.stored), self.lora.rank
            if name.endswith(LORA_A):
                return whole[part.expert * rank : (part.expert + 1) * rank].contiguous()
            return whole[part.rows, part.expert :: part.experts].contiguous()
        place = self._rows.place(_weight(name)) if self._rows is not None and name.endswith(LORA_B) else None
        stored = name if place is None else _of_layer(place.stored)
        if stored not in self._stored:
            raise ModelError(f"adapter folder '{self.path}' has no tensor '{name}'{nearest(name, self.names)}")
        source = self._slice(self._stored[stored])
        return source if place is None else RowSlice(source, place)

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

    def _parts(self, name: str) -> list[str]:
        """The tensors of a weight map in one of the hub's."""
        if self._rows is None or not name.endswith(LORA_B):
            return [name]
        return [_of_layer(part) for part in self._rows.names_of(_weight(name))]

    def _hub_name(self, stored: str) -> str:
        """What the hub calls a tensor of the file, without the prefix."""
        name = stored.removeprefix(PREFIX)
        for other, hub in self._family.other_names:
            if name.startswith(other):
                return hub + name.removeprefix(other)
        return name

    def _checked_layers(self) -> list[str]:
        """The layers with adapters, in the order of the model.

        Raises:
            ModelError: a tensor has no place in the model, another shape, or no counterpart; or there are none.
        """
        rank, found = self.config["r"], set()
        for name, stored in self._stored.items():
            layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
            if name == SCORE:
                continue
            if name == layer or not stored.startswith(PREFIX):
                raise ModelError(f"tensor '{stored}' in '{self._file}' is neither A nor B of an adapter")
            self._check_pair(layer, stored)
            if match := _ALL_EXPERTS.fullmatch(layer):
                found |= self._experts(layer, match[1], rank)
                continue
            if layer not in self._layers:
                raise ModelError(
                    f"tensor '{stored}' in '{self._file}' has no place in the model that config.json describes: "
                    f"'{layer}' is no linear layer of its decoder{nearest(layer, self._layers)}"
                )
            outputs, inputs = self._layers[layer]
            wanted = (rank, inputs) if name.endswith(LORA_A) else (outputs, rank)
            if self._entries[stored].shape != wanted:
                raise ModelError(
                    f"tensor '{stored}' in '{self._file}' has shape {list(self._entries[stored].shape)}, but config.json and "
                    f"{CONFIG_FILE} imply {list(wanted)}"
                )
            found.add(layer)
        if not found:
            raise ModelError(f"'{self._file}' has no adapters")
        return [layer for layer in self._layers if layer in found]

    def _check_pair(self, layer: str, stored: str) -> None:
        for kind in (LORA_A, LORA_B):
            if layer + kind not in self._stored:
                raise ModelError(f"'{self._file}' has '{stored}', but no '{layer}{kind}'")

    def _experts(self, layer: str, block: str, rank: int) -> set[str]:
        """The adapters of all experts of a layer, stored as one pair: A `[experts·rank, in]`, B `[out, rank·experts]`."""
        hub, entries = self._family.hub, self._entries
        gate, up, down = hub.expert
        prefix = f"{block.removesuffix('.mlp')}.{hub.block}.experts."
        of_one = [name for name in self._layers if name.startswith(prefix) and name.endswith(f".{down}")]
        experts = len(of_one)
        a, b = (self._stored[layer + kind] for kind in (LORA_A, LORA_B))
        ffn, hidden = self._layers.get(f"{prefix}0.{gate}", (0, 0))
        shapes = entries[a].shape, entries[b].shape
        halves = {gate: slice(0, 2 * ffn, 2), up: slice(1, 2 * ffn, 2)}
        if not hub.alternating:
            halves = {gate: slice(0, ffn), up: slice(ffn, 2 * ffn)}
        if shapes == ((experts * rank, hidden), (2 * ffn, experts * rank)):
            rows = halves
        elif shapes == ((experts * rank, ffn), (hidden, experts * rank)):
            rows = {down: slice(0, hidden)}
        else:
            raise ModelError(
                f"tensor '{a}' in '{self._file}' has shape {list(shapes[0])}, which is no adapter of rank {rank} "
                f"for {experts} experts of width {ffn}"
            )
        for expert in range(experts):
            for which, part in rows.items():
                for kind, stored in ((LORA_A, a), (LORA_B, b)):
                    self._of_experts[f"{prefix}{expert}.{which}{kind}"] = _ExpertPart(stored, expert, experts, part)
        return {f"{prefix}{expert}.{which}" for expert in range(experts) for which in rows}


def write_peft_folder(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    lora: Lora,
    *,
    base: str,
    hf_config: Mapping[str, Any],
) -> None:
    """Write a PEFT folder that appears whole or not at all. All tensors are held until then.

    Args:
        path: a new or an empty folder.
        tensors: A and B of every adapter under the names that weight maps have, in any order, and perhaps `score.weight`.
        lora: their rank and scale.
        base: the folder or the hub's id of the model that they are for.
        hf_config: that model's `config.json`.

    Raises:
        ModelError: `path` is a file or a folder with something in it, a tensor comes twice, or a part of one is missing.
    """
    family = architecture_for(dict(hf_config))
    rows = family.fused_rows(dict(hf_config)) if family.fused_rows is not None else None
    held: dict[str, Tensor] = {}
    for name, tensor in tensors if rows is None else _joined(replace(rows, columns=lora.rank), tensors):
        if name in held:
            raise ModelError(f"tensor '{name}' comes twice; each tensor is exported once")
        held[name] = tensor.detach().cpu().contiguous()
    layers = {name.removesuffix(LORA_A) for name in held if name.endswith(LORA_A)}
    ends = lora.targets == (ALL_LINEAR,) and not lora.exclude and family.vision(dict(hf_config)) is None
    targets = {layer.rsplit(".", 1)[-1] for layer in layers} if ends else layers
    config = config_of(lora, base, targets, score=SCORE in held)
    with new_folder(path, CONFIG_FILE, config) as staging:
        save_file({PREFIX + name: tensor for name, tensor in held.items()}, staging / WEIGHTS_FILE, metadata={"format": "pt"})


def _joined(rows: FusedRows, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with the Bs of layers that the hub stores one below another in one."""
    parts: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if name.endswith(LORA_B):
            parts.append((_weight(name), tensor))
        else:
            yield name, tensor
    for name, tensor in joined(rows, parts):
        yield _of_layer(name), tensor


def _weight(lora_b: str) -> str:
    return lora_b.removesuffix(LORA_B) + ".weight"


def _of_layer(weight: str) -> str:
    return weight.removesuffix(".weight") + LORA_B
