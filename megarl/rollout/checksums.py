"""What SGLang's own checksums of its parameters must be, computed from the weights that were sent.

SGLang fuses q, k, v and gate, up and all experts of a layer, and splits over tensor-parallel ranks; `/weights_checker` hashes
what each rank holds (sha256 on CPU, a Triton hash on CUDA). This file says what each rank must hold, and refuses models of
which it cannot.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.errors import EngineError
from megarl.rollout.same_model import ModelFacts

VOCAB_PADDING = 64  # SGLang's VocabParallelEmbedding pads the vocabulary to a multiple of this
CPU_PADDING = 32  # and on a CPU each rank's feed-forward width to a multiple of this

# HF suffix -> (engine suffix, position in the fused parameter)
FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
PARTS = {"self_attn.qkv_proj": 3, "mlp.gate_up_proj": 2}
SPLIT_BY_COLUMN = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
SPLIT_BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")

UNCHECKED = ""
"""The checksum of a weight that was sent without taking one."""

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
# projection of an expert -> (engine suffix, position among the expert's projections in it); w1, w3, w2 are Mixtral's
EXPERT_FUSED = {
    "gate_proj": ("w13_weight", 0),
    "w1": ("w13_weight", 0),
    "up_proj": ("w13_weight", 1),
    "w3": ("w13_weight", 1),
    "down_proj": ("w2_weight", 0),
    "w2": ("w2_weight", 0),
}
EXPERT_PARTS = {"w13_weight": 2, "w2_weight": 1}
"""How many projections of each expert a fused parameter holds."""


@dataclass(frozen=True)
class EngineLayout:
    """What decides how the engine holds a model's weights. `checks_experts`: whether those of experts are known, too.

    `model` says which model it is, where that is known.
    """

    kv_heads: int
    tied_embeddings: bool
    dtype: torch.dtype
    tp: int = 1
    num_experts: int = 0
    checks_experts: bool = True
    model: ModelFacts | None = None

    @classmethod
    def of_model(cls, model_path: str | Path, dtype: str, tp: int = 1, device: str = "cpu") -> EngineLayout:
        """Layout for the Hugging Face folder `model_path` in an engine of `tp` ranks that computes in `dtype` on `device`.

        Raises:
            EngineError: config.json cannot be read, or SGLang would not hold this model's weights as they are sent.
        """
        check_model(model_path, tp, device)
        config = _config(model_path)
        num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        checks_experts = device == "cpu" and tp == 1
        if num_experts and not checks_experts:
            logging.getLogger(__name__).warning(
                "the checksums of expert weights are not compared after an update: on %s with tp %d their order is not known",
                device,
                tp,
            )
        return cls(
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=getattr(torch, dtype),
            tp=tp,
            num_experts=num_experts,
            checks_experts=checks_experts,
            model=ModelFacts(config, dtype),
        )


def _config(model_path: str | Path) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(model_path) / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_path}/config.json cannot be read ({error}); it must be a Hugging Face folder") from error


def check_model(model_path: str | Path, tp: int = 1, device: str = "cpu") -> None:
    """Raise EngineError if SGLang cannot be given this model's weights, or would compute something else with them."""
    config = _config(model_path)
    model_type, why = config.get("model_type"), None
    if model_type == "deepseek_v3":
        why = "how it holds the weights of a 'deepseek_v3' model is not known here, so an update could not be checked"
    elif model_type == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        why = "it gives every layer experts, whatever mlp_only_layers and decoder_sparse_step say"
    elif device == "cpu":
        unit = CPU_PADDING * tp
        sizes = {field: config.get(field) or 0 for field in ("intermediate_size", "moe_intermediate_size")}
        padded = [f"{field} = {size}" for field, size in sizes.items() if size % unit]
        if padded:
            why = f"on a CPU with rollout.tp = {tp} it pads {' and '.join(padded)}, which may only be a multiple of {unit}"
    if why is not None:
        raise EngineError(
            f"rollout.engine is 'sglang', which cannot serve the model in {model_path}: {why}; rollout.engine may be 'embedded'"
        )


def engine_name(name: str) -> tuple[str, int]:
    """(parameter of the engine, position of this weight in it) of a Hugging Face name."""
    if expert := EXPERT.fullmatch(name):
        suffix, position = EXPERT_FUSED[expert["projection"]]
        return f"{expert['experts']}.{suffix}", int(expert["expert"]) * EXPERT_PARTS[suffix] + position
    for suffix, (fused, position) in FUSED.items():
        if f".{suffix}." in name:
            return name.replace(suffix, fused), position
    return name, 0


def is_of_experts(parameter: str) -> bool:
    """Whether a parameter of the engine holds the experts of a layer."""
    return parameter.rpartition(".experts.")[2] in EXPERT_PARTS


def held_slices(name: str, weight: torch.Tensor, layout: EngineLayout) -> list[torch.Tensor]:
    """What each tensor-parallel rank holds of `weight`, as views; ranks that hold the same share one object.

    Experts are given to every rank whole: how a rank splits them is left to SGLang.
    """
    tp = layout.tp
    if tp == 1:
        return [weight]
    if name.endswith(SPLIT_BY_VOCABULARY):  # the padding behind the last row belongs to no weight
        rows = (len(weight) + -len(weight) % VOCAB_PADDING) // tp
        return [weight[rank * rows : (rank + 1) * rows] for rank in range(tp)]
    if ".k_proj." in name or ".v_proj." in name:
        # fewer kv heads than ranks: neighbouring ranks hold copies of the same head
        shares = weight.chunk(min(tp, layout.kv_heads))
        return [shares[rank * len(shares) // tp] for rank in range(tp)]
    if name.endswith(SPLIT_BY_COLUMN):
        return list(weight.chunk(tp, dim=1))
    if any(f".{suffix}." in name for suffix in FUSED):
        return list(weight.chunk(tp))
    return [weight] * tp


def _as_held(name: str, part: torch.Tensor, rank: int, vocabulary: int, layout: EngineLayout) -> torch.Tensor:
    """A rank's slice in the engine's dtype, contiguous and with the padding of a vocabulary of `vocabulary` rows."""
    if name.endswith(SPLIT_BY_VOCABULARY):
        rows = (vocabulary + -vocabulary % VOCAB_PADDING) // layout.tp
        part = torch.nn.functional.pad(part, (0, 0, 0, rows - len(part))) if len(part) < rows else part
    return part.detach().to(layout.dtype).contiguous()


def _hash(parts: Sequence[torch.Tensor]) -> str:
    """SGLang's hash of the concatenation of `parts` (sglang/srt/managers/mm_utils.py, tensor_hash), 16 hex digits."""
    if parts[0].is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(torch.cat([part.flatten() for part in parts])):016x}"
    return sha256_start(parts)


def sha256_start(parts: Sequence[torch.Tensor]) -> str:
    """First 16 hex digits of the sha256 of the bytes of `parts`, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


class SentChecksums:
    """Collects the checksums of the weights that one sender sent in one update.

    The weights that the engine fuses (q, k, v of a layer; gate, up of a layer; a layer's experts) must come through one
    sender, in any buckets and order. Without `values` it only says which parameters were sent, complete, and costs no time.
    """

    def __init__(self, layout: EngineLayout, values: bool = True) -> None:
        self._layout, self._values = layout, values
        self._waiting: dict[str, dict[int, list[torch.Tensor]]] = {}
        self._done: dict[str, str] = {}

    def add(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take in whole weights; what must wait for its neighbours is copied."""
        self.add_slices([(name, held_slices(name, weight, self._layout)) for name, weight in bucket])

    def add_slices(self, bucket: Sequence[tuple[str, Sequence[torch.Tensor]]]) -> None:
        """Take in weights of which the slices of all tensor-parallel ranks are given; copies what must wait."""
        layout, fresh = self._layout, set[str]()
        for name, parts in bucket:
            if name == "lm_head.weight" and layout.tied_embeddings:
                raise EngineError("lm_head.weight was sent although the model ties it to the embeddings; leave it out")
            if EXPERT.fullmatch(name) and not layout.checks_experts:
                continue
            parameter, position = engine_name(name)
            rows = sum(len(part) for part in parts)
            slices = [_as_held(name, part, rank, rows, layout) for rank, part in enumerate(parts)] if self._values else []
            self._waiting.setdefault(parameter, {})[position] = slices
            fresh.add(parameter)
            waiting = self._waiting[parameter]
            if len(waiting) == self._part_count(parameter):
                for rank in range(layout.tp):
                    held = [waiting[i][rank] for i in sorted(waiting)] if self._values else []
                    self._done[f"{parameter}@{rank}"] = _hash(held) if held else UNCHECKED
                del self._waiting[parameter]
                fresh.discard(parameter)
        for parameter in fresh:
            for position, slices in self._waiting[parameter].items():
                self._waiting[parameter][position] = [part.clone() for part in slices]

    def result(self) -> dict[str, str]:
        """`<engine parameter>@<tp rank>` -> checksum, of everything added.

        Raises:
            EngineError: a fused parameter lacks some of its parts.
        """
        for parameter, parts in self._waiting.items():
            raise EngineError(f"only {len(parts)} of the {self._part_count(parameter)} weights that make {parameter} were sent")
        return dict(self._done)

    def _part_count(self, parameter: str) -> int:
        if count := EXPERT_PARTS.get(parameter.rpartition(".experts.")[2]):
            return count * self._layout.num_experts
        return next((count for suffix, count in PARTS.items() if f".{suffix}." in parameter), 1)


def compare(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Check that the engine holds exactly what was sent, parameter by parameter; of `UNCHECKED` ones, that they were sent.

    Raises:
        EngineError: names the first parameters that differ, were not sent, or are not in the engine.
    """
    both = sent.keys() & held.keys()
    differ = sorted(name for name in both if UNCHECKED not in (sent[name], held[name]) and sent[name] != held[name])
    missing = sorted(held.keys() - sent.keys())
    unknown = sorted(sent.keys() - held.keys())
    problems = [
        ("the engine's values differ from those sent for", differ),
        ("nobody sent", missing),
        ("the engine has no parameter for", unknown),
    ]
    found = [f"{what} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" for what, names in problems if names]
    if found:
        counts = f"{len(differ)} differ, {len(missing)} missing, {len(unknown)} unknown of {len(held)}"
        raise EngineError(f"weight update failed its check ({counts}): " + "; ".join(found))
