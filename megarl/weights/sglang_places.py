"""Places of tensors in the parameters of a rank of SGLang; runs inside the server.

SGLang fuses q, k, v and gate, up and the experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megarl.models.transformers_names import with_prefix
from megarl.option_list import functions, parts
from megarl.weights.rank_plan import SliceKey

PARTS_OF = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_expert.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "linear_attn.in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
    "merger.gate_up_proj": ("gate_proj", "up_proj"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""By the end of an engine's fused parameter, the hub's names for what it is fused of, in models that have it."""
FUSED = {
    f"{fused.rpartition('.')[0]}.{part}": (fused, position, len(parts))
    for fused, parts in PARTS_OF.items()
    for position, part in enumerate(parts)
}
"""Hugging Face suffix -> (engine suffix, position in the fused parameter, how many are fused there)."""
OF_TWO_LENGTHS = (".qkv_proj.", ".fused_qkv_a_proj_with_mqa.", ".in_proj_qkvz.")
"""Fused parameters of which the first tensor may be of another length than the others: q beside k and v, which Qwen3.5 has in
one tensor beside the gates."""
DERIVED_FROM = ".self_attn.kv_b_proj."
"""Name of a parameter that latent attention does not compute with itself, but by copies of its halves (`w_kc`, `w_vc`)."""
HUB_PREFIXES = (("model.visual.", "visual."), ("model.language_model.", "model."))
"""Beginnings of names of some vision-language models on the hub, and in engines."""
RENAMED = ((".mlp.gate.wg.", ".mlp.gate."), (".mlp.moe_statics.", ".mlp.gate."))
"""Parts of names on the hub (Hunyuan, ERNIE 4.5), and what engines have in their place."""
TOWER = "visual."
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")

EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\."
    r"(?:weight(?P<part>_scale_inv|_packed|_scale|_shape)?|(?P<bias>bias))"
)
# projection of an expert -> (engine suffix, position among the expert's projections in it, how many); w1, w3, w2: Mixtral's
EXPERTS, BIAS = "w13_weight", "_bias"
SUMMED_BIAS = "w2_weight_bias"
"""Bias of the experts' outputs, which the ranks that split an expert add up: the first has it, the others zeros."""
EXPERT_FUSED = {
    "gate_proj": (EXPERTS, 0, 2),
    "w1": (EXPERTS, 0, 2),
    "up_proj": (EXPERTS, 1, 2),
    "w3": (EXPERTS, 1, 2),
    "down_proj": ("w2_weight", 0, 1),
    "w2": ("w2_weight", 0, 1),
}


@dataclass(frozen=True)
class ModelParameters:
    """A rank's parameters and adapters by name, and of parameters of experts: in which up comes before gate, as some of
    SGLang's kernels want it, and in which rows of both alternate, as gpt-oss has them."""

    tensors: Mapping[str, torch.Tensor]
    up_first: Collection[str] = ()
    alternating: Collection[str] = ()
    of_draft: tuple[str, ...] = ()
    """Beginnings of names that are not this model's, but its draft's."""

    @property
    def device(self) -> torch.device:
        """The device of all of them."""
        return next(iter(self.tensors.values())).device

    @classmethod
    def of(cls, model: Any) -> ModelParameters:
        """The parameters of a model of SGLang's, but for scales of the KV cache, which no update sends
        (0.5.23: layers/moe/fused_moe_triton/layer.py says how its experts lie, layers/quantization/kv_cache.py of the scales).

        Raises:
            ValueError: its experts are transposed or interleaved for the kernels that were chosen, or the shared experts among
                them.
        """
        up_first, alternating = [], []
        for name, module in model.named_modules():
            if not (hasattr(module, EXPERTS) or hasattr(module, f"{EXPERTS}_packed")):
                continue
            method = getattr(module, "weight_load_method", None) or module.quant_method
            if module.use_triton_kernels or getattr(method, "w13_swiglu_interleaved", False):
                raise ValueError(
                    f"SGLang holds {name} transposed or interleaved; rollout.engine_args.moe_runner_backend must "
                    "not be 'triton_kernel', and SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED must not be set"
                )
            if module.num_fused_shared_experts:
                raise ValueError(
                    f"SGLang holds the shared experts among {name}; rollout.engine_args.disable_shared_experts_fusion must be "
                    "true, and enforce_shared_experts_fusion must not be set"
                )
            if module.use_flashinfer_trtllm_moe or getattr(method, "load_up_proj_weight_first", False):
                up_first += [f"{name}.{EXPERTS}", f"{name}.{EXPERTS}_scale_inv"]
            if hasattr(module, EXPERTS + BIAS) and module.moe_runner_config.gemm1_alpha is not None:
                alternating += [f"{name}.{EXPERTS}", f"{name}.{EXPERTS}{BIAS}"]
        tensors = {name: values for name, values in model.named_parameters() if not hasattr(values, "_skip_weight_check")}
        for tensors_of in functions("adapter_place", "tensors_of"):
            tensors |= tensors_of(model)
        of_draft = names.of_the_draft(model) if (names := draft_names()) is not None else ()
        return cls(tensors, frozenset(up_first), frozenset(alternating), of_draft)


def draft_names() -> ModuleType | None:
    """An option's `draft_weights.py`, which knows the draft that a server has beside the policy."""
    return next(iter(parts("draft_weights")), None)


def engine_name(parameters: ModelParameters, name: str) -> tuple[str, int, int]:
    """(the engine's parameter, position among the tensors that it is fused of, how many these are) of a tensor.

    Experts' parameters have one more axis, the first, of which the tensor is in one entry.
    """
    name = with_prefix(name, HUB_PREFIXES)
    if name.startswith(TOWER):
        name = name.replace(".attn.qkv.", ".attn.qkv_proj.")
    for part, of_engines in RENAMED:
        name = name.replace(part, of_engines)
    if expert := EXPERT.fullmatch(name):
        suffix, position, count = EXPERT_FUSED[expert["projection"]]
        expert_name = f"{expert['experts']}.{suffix}{expert['part'] or ''}{BIAS if expert['bias'] else ''}"
        # SGLang has one shape for gate and up, which it does not read
        return (expert_name, 0, 1) if expert["part"] == "_shape" else (expert_name, position, count)
    for suffix, (fused, position, count) in FUSED.items():
        if f".{suffix}." in name and (fused_name := name.replace(suffix, fused)) in parameters.tensors:
            return fused_name, position, count
    return name, 0, 1


def region(parameters: ModelParameters, held: SliceKey) -> torch.Tensor:
    """The rows of a parameter in which this rank holds a tensor, as a matrix.

    Raises:
        ValueError: the parameter has no place for a tensor of so many rows and columns.
    """
    name, position, count = engine_name(parameters, held.tensor)
    parameter = parameters.tensors[name].data
    if expert := EXPERT.fullmatch(held.tensor):
        parameter = parameter[int(expert["expert"]) % len(parameter)]
        if parameter.ndim == 2 and getattr(parameters.tensors[name], "is_transposed", False):  # INT4
            parameter = parameter.T
        position = count - 1 - position if name in parameters.up_first else position
    matrix = parameter.unsqueeze(1) if parameter.ndim == 1 else parameter.flatten(1)
    if name in parameters.alternating:
        matrix, position, count = matrix[position::count], 0, 1
    first = 0 if position == 0 else len(matrix) - (count - position) * held.of_rows
    of_one_length = count * held.of_rows == len(matrix)
    if name.startswith(TOWER) and not of_one_length:  # padded at the end of each of its parts
        first, of_one_length = len(matrix) // count * position, count * held.of_rows < len(matrix)
    is_full = of_one_length or name.endswith(VOCABULARY) or any(fused in name for fused in OF_TWO_LENGTHS)
    if not (is_full and 0 <= first <= len(matrix) - held.of_rows and held.col + held.cols <= matrix.shape[1]):
        raise ValueError(f"{held} has {held.of_rows} rows here, which have no place in {name} {list(parameter.shape)}")
    return matrix[first : first + held.of_rows]


def box(parameters: ModelParameters, held: SliceKey) -> torch.Tensor:
    """The elements of a parameter that `held` names, as a matrix; raises ValueError as `region`."""
    return region(parameters, held)[held.row : held.row + held.rows, held.col : held.col + held.cols]
