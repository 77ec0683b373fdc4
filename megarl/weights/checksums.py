"""The content of every rank of an engine after an update, and whether it does: boxes of tensors and a digest of each.

The boxes are the reshard plan's (`weights/sglang_targets.py`). The sender takes the digests of what it sends; the engine's
process
reads its parameters back and takes them again (`sglang_loader.py`). Models of which this cannot be done are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from megarl.errors import EngineError
from megarl.models.adapters import AdapterSpec, is_adapter_tensor
from megarl.models.architecture import HFConfig
from megarl.models.registry import architecture_for
from megarl.models.weight_map import WeightMap
from megarl.weights.cuda_ipc import checksums
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.slices import engine_slices
from megarl.weights.tensors import TensorTable

CPU_PADDING = 32  # on a CPU SGLang pads each rank's feed-forward width to a multiple of this

UNCHECKED = ""
"""The checksum of what was sent without taking one, or cannot be read back."""


@dataclass(frozen=True)
class EngineLayout:
    """Facts that decide how an engine holds a model's weights: which model, and how its ranks share it."""

    model: ServedModel
    target: EngineTarget = field(default_factory=EngineTarget)

    @classmethod
    def of_model(
        cls,
        model_path: str | Path,
        dtype: str,
        tp: int = 1,
        device: str = "cpu",
        target: EngineTarget | None = None,
        *,
        predicts: bool = False,
        lora: AdapterSpec | None = None,
    ) -> EngineLayout:
        """Layout for the Hugging Face folder `model_path` in an engine of `tp` ranks that computes in `dtype` on `device`.

        `target` says how they share the model if not by tensor parallelism alone. `predicts`: its draft has the layer for
        multi-token prediction, whose weights come with the others. `lora`: the adapters that it adds.

        Raises:
            EngineError: config.json cannot be read, or SGLang would not hold this model's weights as they are sent.
        """
        check_model(model_path, tp, device)
        return cls(ServedModel(_config(model_path), dtype, predicts, lora), target or EngineTarget(tp=tp))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the engine computes in."""
        return getattr(torch, self.model.dtype)  # type: ignore[no-any-return]

    @property
    def server_arguments(self) -> Mapping[str, Any]:
        """SGLang's arguments without which its servers would hold weights elsewhere."""
        return architecture_for(dict(self.model.config)).sglang.arguments

    @cached_property
    def _weight_map(self) -> WeightMap:
        weight_map = self.model.weight_map
        return weight_map if self.model.format is None else self.model.format.quantised_map(weight_map)

    @cached_property
    def _own_dtypes(self) -> dict[str, str]:
        """Dtypes of the tensors that keep theirs whatever the engine computes in, by name."""
        return {name: rule.dtype for rule in self._weight_map.bound_rules() if rule.dtype for name in rule.hf_names}

    def sent_dtype(self, name: str) -> str:
        """The dtype that a tensor is sent in, as `getattr(torch, ...)` takes it."""
        return self._own_dtypes.get(name, self.model.dtype)

    @cached_property
    def slices(self) -> dict[str, list[SliceKey]]:
        """The slices that the ranks hold of each tensor of the weights, by name."""
        return self._slices_of(self._weight_map)

    @cached_property
    def adapter_slices(self) -> dict[str, list[SliceKey]]:
        """The slices that the ranks hold of each tensor of the adapters, by name."""
        return self._slices_of(self.model.adapter_map) if self.model.lora is not None else {}

    def _slices_of(self, weight_map: WeightMap) -> dict[str, list[SliceKey]]:
        tensors = TensorTable.of(weight_map, 1)
        keys_by_tensor: dict[str, list[SliceKey]] = {name: [] for name in tensors.names}
        slices = engine_slices(tensors, self.target, weight_map.num_experts)
        columns = (slices.tensor, slices.engine_rank, slices.rows, slices.row, slices.col, slices.rows, slices.cols)
        for tensor, *box in zip(*(column.tolist() for column in columns), strict=True):
            keys_by_tensor[tensors.names[tensor]].append(SliceKey(tensors.names[tensor], *box))
        return keys_by_tensor

    def pieces(self, name: str, weight: torch.Tensor) -> list[WeightSlice]:
        """The pieces that each rank is to be sent of a whole tensor, as views.

        Raises:
            EngineError: the engine's model has no such tensor, or one of another shape.
        """
        slices = self.adapter_slices if is_adapter_tensor(name) else self.slices
        if name not in slices:
            raise EngineError(f"the engine's model has no tensor {name} of its own; leave it out")
        pieces = []
        for key in slices[name]:
            # `row, col` are where the slice lies in the whole tensor
            rows = weight[key.row : key.row + key.rows]
            part = rows if weight.ndim == 1 else rows.flatten(1)[:, key.col : key.col + key.cols]
            if part.numel() != key.rows * key.cols:
                raise EngineError(f"{name} was sent as {list(weight.shape)}, which is not the shape of the engine's")
            pieces.append(WeightSlice(key._replace(row=0, col=0), part))
        return pieces

    def expected(self, *, adapters_alone: bool = False) -> Iterator[SliceKey]:
        """The slices that all ranks hold of weights and adapters, or of adapters alone."""
        tensors = self.adapter_slices if adapters_alone else self.slices | self.adapter_slices
        return (slice_key for of_tensor in tensors.values() for slice_key in of_tensor)

    def missing(
        self, sent: Collection[SliceKey], *, adapters_alone: bool = False, of_ranks: Collection[int] | None = None
    ) -> list[SliceKey]:
        """The slices of which not every element is in `sent`, boxes that do not overlap; those `of_ranks` (None: of all)."""
        elements: dict[tuple[str, int], int] = {}
        for box in sent:
            key = box.tensor, box.engine_rank
            elements[key] = elements.get(key, 0) + box.rows * box.cols
        return [
            slice_key._replace(row=0, col=0)
            for slice_key in self.expected(adapters_alone=adapters_alone)
            if (of_ranks is None or slice_key.engine_rank in of_ranks)
            and elements.get((slice_key.tensor, slice_key.engine_rank)) != slice_key.rows * slice_key.cols
        ]


def _config(model_path: str | Path) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(model_path) / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_path}/config.json cannot be read ({error}); it must be a Hugging Face folder") from error


def check_model(model_path: str | Path, tp: int = 1, device: str = "cpu") -> None:
    """Raise EngineError if SGLang cannot be given this model's weights, or would compute something else with them."""
    config = _config(model_path)
    facts = architecture_for(config).sglang
    why = facts.refusal(config)
    if why is None and facts.padded_heads(config) % tp:
        why = f"with rollout.tp = {tp} it pads the {facts.padded_heads(config)} heads of the vision tower; tp must divide them"
    if device == "cpu" and why is None:
        why = _refusal_on_cpu(config, tp)
    if why is not None:
        raise EngineError(
            f"rollout.engine is 'sglang', which cannot serve the model in {model_path}: {why}; it must be 'embedded'"
        )


def _refusal_on_cpu(config: HFConfig, tp: int) -> str | None:
    if config.get("quantization_config"):
        return "on a CPU it does not compute with quantised weights"
    if isinstance(config.get("moe_intermediate_size"), list):
        return "on a CPU it takes moe_intermediate_size for one number, and not for a list of one for each layer"
    if architecture_for(config).traits(config).score_cap is not None:
        return "on a CPU its attention does not cap scores"
    unit = CPU_PADDING * tp
    config = architecture_for(config).text_config(config)
    sizes = {field: config.get(field) or 0 for field in ("intermediate_size", "moe_intermediate_size")}
    padded = [f"{field} = {size}" for field, size in sizes.items() if size % unit]
    if padded:
        return f"on a CPU with rollout.tp = {tp} it pads {' and '.join(padded)}, which must be a multiple of {unit}"
    return None


RunningDigest = xxhash.xxh3_128
"""`digest` on a CPU, for bytes that come part by part."""


def digest(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's bits: XXH3 with 128 bits on a CPU (15 GiB/s a core), `cuda_ipc.checksums` on CUDA.

    It tells damage and mistakes, not malice.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        return checksums([tensor])[0]
    running = RunningDigest()
    running.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # which, unlike `RunningDigest(...)`, releases the GIL
    return running.hexdigest()


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The checksum of each of these tensors, of one device; on CUDA the host waits once for all of them."""
    if tensors and tensors[0].is_cuda:
        return checksums([tensor.detach() for tensor in tensors])
    return [digest(tensor) for tensor in tensors]


def compare(sent: Mapping[Any, str], held: Mapping[Any, str]) -> None:
    """Check that the engine holds exactly what was sent, name by name; of `UNCHECKED` ones, that they were sent.

    Raises:
        EngineError: names the first parameters that differ, were not sent, or are not in the engine.
    """
    both = sent.keys() & held.keys()
    differ = sorted(str(name) for name in both if UNCHECKED not in (sent[name], held[name]) and sent[name] != held[name])
    missing = sorted(map(str, held.keys() - sent.keys()))
    unknown = sorted(map(str, sent.keys() - held.keys()))
    problems = [
        ("the engine's values differ from those sent for", differ),
        ("nobody sent", missing),
        ("the engine has no parameter for", unknown),
    ]
    faults = [f"{what} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" for what, names in problems if names]
    if faults:
        counts = f"{len(differ)} differ, {len(missing)} missing, {len(unknown)} unknown of {len(held)}"
        raise EngineError(f"weight update failed its check ({counts}): " + "; ".join(faults))
