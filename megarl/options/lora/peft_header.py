"""The content of a PEFT folder, by its config and the header of its tensors, checked against the model's config. Without torch.

`adapter_config.json` is read into what megarl knows of adapters, and written (`peft.LoraConfig` of peft 0.21.2).
Tensors are called `base_model.model.`, the hub's name of the layer, `.lora_A.weight` `[rank, in]` or `.lora_B.weight`
`[out, rank]`. Layers that the hub stores one below another have one adapter together; each expert has its own, as in PEFT for
transformers 4. What PEFT for transformers 5 writes, one adapter for all experts of a layer, is read, too. Beside an adapter of
the output layer PEFT stores that layer's own weight, which must be the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.config.sections import TrainedRole
from megarl.errors import ModelError, nearest
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.registry import architecture_for
from megarl.options.lora.section import OUTPUT, LoraConfig, section_of
from megarl.options.lora.weight_map import Lora, layer_shapes

CONFIG_FILE = "adapter_config.json"

_OFF = {
    "use_dora": "scales the rows of each weight anew",
    "lora_bias": "adds a bias to each adapter",
    "fan_in_fan_out": "is for weights stored transposed",
    "use_qalora": "pools the adapters' inputs",
    "use_bdlora": "makes adapters of diagonal blocks",
    "alora_invocation_tokens": "turns adapters on in the middle of a text",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "trains rows of the embedding",
    "rank_pattern": "gives some layers another rank",
    "alpha_pattern": "gives some layers another scale",
    "arrow_config": "routes between adapters",
    "kasa_config": "computes otherwise than W + scale·B·A",
    "monteclora_config": "computes otherwise than W + scale·B·A",
}
"""Fields of LoraConfig that must be false, null or empty, and what each does otherwise."""
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Initial values under which PEFT leaves the weights of the model as they are."""
_SAVED = ("score", "classifier")
"""Modules that PEFT stores whole beside adapters of a classifier; those that the model lacks have no tensors."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The dict of `adapter_config.json`.

    Raises:
        ModelError: the folder or the file is missing, it is no JSON object, or it asks for more than plain LoRA.
    """
    file = Path(folder) / CONFIG_FILE
    if not Path(folder).is_dir():
        raise ModelError(f"adapter folder '{folder}' does not exist; it must be a local PEFT folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"adapter folder '{folder}' has no {CONFIG_FILE}, so it is no PEFT folder") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"'{file}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"'{file}' holds a JSON {type(config).__name__}; it must be an object")
    _check(file, config)
    return config


def _check(file: Path, config: Mapping[str, Any]) -> None:
    def refused(field: str, reason: str, allowed: str) -> ModelError:
        return ModelError.of(f"{field} in '{file}'", config.get(field), reason, allowed=allowed)

    if config.get("peft_type") != "LORA":
        raise refused("peft_type", "", "'LORA'")
    for field, what in _OFF.items():
        if config.get(field):
            raise refused(field, what, "false, null or empty")
    if config.get("bias", "none") != "none":
        raise refused("bias", "trains biases of the model", "'none'")
    if not set(config.get("modules_to_save") or ()) <= set(_SAVED):
        raise refused("modules_to_save", "stores modules of the model whole", "null or ['score']")
    if config.get("init_lora_weights", True) not in _INITIAL:
        reason = "has changed the weights of the model that the adapters are for"
        allowed = f"{', '.join(str(value).lower() for value in _INITIAL)}; let PEFT convert the adapters to plain LoRA"
        raise refused("init_lora_weights", reason, allowed)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refused("r", "", "a positive integer")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise refused("lora_alpha", "", "a positive number")


def config_of(lora: Lora, base: str, target_modules: Iterable[str], *, score: bool) -> dict[str, Any]:
    """Contents of `adapter_config.json` for adapters of the model at `base`; `score`: its head is stored, too."""
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if score else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": ["score"] if score else None,
        "target_modules": sorted(target_modules),
    }


WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
SCORE = "score.weight"
"""The head of a classifier, stored whole beside its adapters."""

OUTPUT_WEIGHT = f"{OUTPUT}.base_layer.weight"
"""The output layer's own weight, which PEFT stores beside its adapter."""

_ALL_EXPERTS = re.compile(r"(.*)\.mlp\.experts(\.base_layer)*")


@dataclass(frozen=True)
class ExpertPart:
    """One expert's tensor in one of all `experts`: rows of A; of B every `experts`-th column, and of these the rows `rows`."""

    stored: str
    expert: int
    experts: int
    rows: slice


def lora_of(role: TrainedRole, hf_config: Mapping[str, Any], field: str) -> Lora:
    """The adapters of a role that has some; see `models.adapters.adapters_of`."""
    return lora_of_section(section_of(role), hf_config, field)


def lora_of_section(section: LoraConfig, hf_config: Mapping[str, Any], field: str) -> Lora:
    """The adapters that a section `lora` at `field` asks for beside the model of `hf_config`.

    Raises:
        ModelError: `adapter` names no PEFT folder for this model.
    """
    if section.adapter is None:
        return Lora(section.rank, section.alpha, section.rslora, section.targets, section.exclude)
    try:
        return replace(AdapterHeader(section.adapter, hf_config).lora, folder=section.adapter)
    except ModelError as error:
        raise ModelError(f"{field}.adapter: {error}") from None


class AdapterHeader:
    """A PEFT folder's config and the names and shapes of its tensors, by the names that weight maps have."""

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
        self.fused_rows = self._family.rows_together(config)
        self._layers = layer_shapes(self._family.weight_map(config), self.fused_rows)
        self._shapes = _shapes(self._file)
        self.stored = {self._hub_name(name): name for name in self._shapes}
        self.of_experts: dict[str, ExpertPart] = {}
        alpha, rslora = float(self.config["lora_alpha"]), bool(self.config.get("use_rslora"))
        self.lora = Lora(self.config["r"], alpha, rslora, tuple(self._checked_layers()))
        """Rank, scale and layers, by their whole names."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tensor, by the names that weight maps have, and the classifier's head if there is one."""
        names = [layer + kind for layer in self.lora.targets for kind in (LORA_A, LORA_B)]
        return (*(part for name in names for part in self._parts(name)), *([SCORE] if self.has_score else []))

    @property
    def has_score(self) -> bool:
        """Return whether the head of a classifier is stored beside the adapters."""
        return SCORE in self.stored

    def _parts(self, name: str) -> list[str]:
        """The tensors of a weight map in one of the hub's."""
        if self.fused_rows is None or not name.endswith(LORA_B):
            return [name]
        return [lora_b(part) for part in self.fused_rows.names_of(weight_of(name))]

    def _hub_name(self, stored: str) -> str:
        """The hub's name for a tensor of the file, without the prefix."""
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
        rank, adapted = self.config["r"], set()
        for name, stored in self.stored.items():
            layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
            if name == SCORE:
                continue
            if name == OUTPUT_WEIGHT:
                self._check_shape(stored, self._layers.get(OUTPUT))
                continue
            if name == layer or not stored.startswith(PREFIX):
                raise ModelError(f"tensor '{stored}' in '{self._file}' is neither A nor B of an adapter")
            self._check_pair(layer, stored)
            if match := _ALL_EXPERTS.fullmatch(layer):
                adapted |= self._experts(layer, match[1], rank)
                continue
            if layer not in self._layers:
                raise ModelError(
                    f"tensor '{stored}' in '{self._file}' has no place in the model that config.json describes: "
                    f"'{layer}' is no linear layer of its decoder or its output{nearest(layer, self._layers)}"
                )
            outputs, inputs = self._layers[layer]
            expected = (rank, inputs) if name.endswith(LORA_A) else (outputs, rank)
            self._check_shape(stored, expected)
            adapted.add(layer)
        if not adapted:
            raise ModelError(f"'{self._file}' has no adapters")
        return [layer for layer in self._layers if layer in adapted]

    def _check_shape(self, stored: str, expected: tuple[int, ...] | None) -> None:
        if expected is None:
            raise ModelError(f"tensor '{stored}' in '{self._file}' has no place in the model that config.json describes")
        if self._shapes[stored] != expected:
            raise ModelError(
                f"tensor '{stored}' in '{self._file}' has shape {list(self._shapes[stored])}, but config.json and "
                f"{CONFIG_FILE} imply {list(expected)}"
            )

    def _check_pair(self, layer: str, stored: str) -> None:
        for kind in (LORA_A, LORA_B):
            if layer + kind not in self.stored:
                raise ModelError(f"'{self._file}' has '{stored}', but no '{layer}{kind}'")

    def _experts(self, layer: str, block: str, rank: int) -> set[str]:
        """The adapters of all experts of a layer, stored as one pair: A `[experts·rank, in]`, B `[out, rank·experts]`."""
        hub = self._family.hub
        gate, up, down = hub.expert
        prefix = f"{block.removesuffix('.mlp')}.{hub.block}.experts."
        of_one = [name for name in self._layers if name.startswith(prefix) and name.endswith(f".{down}")]
        experts = len(of_one)
        a, b = (self.stored[layer + kind] for kind in (LORA_A, LORA_B))
        ffn, hidden = self._layers.get(f"{prefix}0.{gate}", (0, 0))
        shapes = self._shapes[a], self._shapes[b]
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
                    self.of_experts[f"{prefix}{expert}.{which}{kind}"] = ExpertPart(stored, expert, experts, part)
        return {f"{prefix}{expert}.{which}" for expert in range(experts) for which in rows}


def weight_of(lora_b: str) -> str:
    """The name of the weight beside which B is."""
    return lora_b.removesuffix(LORA_B) + ".weight"


def lora_b(weight: str) -> str:
    """The name of B beside a weight."""
    return weight.removesuffix(".weight") + LORA_B


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"'{file}' is damaged or cut short: {error}") from None
