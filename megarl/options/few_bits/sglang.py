"""On which GPUs SGLang changes the layout of quantised weights after it has loaded them, so that no others can be sent to it.

By SGLang 0.5.23 (layers/quantization: fp8.py `process_weights_after_loading` and `_process_mxfp8_moe_weights`, fp8_utils.py
`requant_block_scale_ue8m0_for_deepgemm`, compressed_tensors/schemes/compressed_tensors_wNa16_moe.py). None of the layouts that
are refused here is undone when an update begins; Marlin's of INT4 experts is, and what is made beside the weights is made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.rollout import RolloutConfig
from megarl.errors import ConfigError, EngineError, describe_value
from megarl.options.few_bits.formats import FewBits

MARLIN = ((8, 0), (8, 9))
"""From and to before: GPUs without FP8, where linear layers are packed for Marlin's kernels."""


def check_weight_layout(
    format: FewBits, engine_args: Mapping[str, Any], capability: tuple[int, int], *, has_experts: bool
) -> None:
    """Refuse a server of a model in `format` on GPUs of this compute capability that would pack its weights anew.

    Raises:
        EngineError: names what must be set in `rollout.engine_args`, if anything helps.
    """
    if format.name == "fp8-block":
        check_fp8_layout(engine_args, capability)
        return
    here = f"on GPUs of compute capability {capability[0]}.{capability[1]}"
    if format.name == "mxfp8" and capability[0] != 10:
        raise EngineError(f"SGLang serves no MXFP8 model {here}, but on those of 10: remove rollout.servers.model_path")
    experts = engine_args.get("moe_runner_backend", "auto")
    # on newer GPUs SGLang chooses Triton's kernels for INT4 by itself
    keeps = ["cutlass"] if format.name == "mxfp8" else ["marlin"] if capability[0] >= 10 else ["auto", "marlin"]
    if has_experts and experts not in keeps:
        raise EngineError(
            f"rollout.engine_args.moe_runner_backend is {describe_value(experts)}, with which an engine that serves experts in "
            f"{format.name} {here} packs them anew after loading, so that no weights can be sent to it; it must be "
            f"{keeps[-1]!r}"
        )


def check_delta(format: FewBits, rollout: RolloutConfig) -> None:
    """Refuse updates of what changed alone for engines that repack their weights.

    Raises:
        ConfigError: names `rollout.delta_every`.
    """
    if format.name != "fp8-block":
        served = rollout.servers.model_path
        reason = f"leaves what did not change as SGLang has repacked it, and {served} is in {format.name}"
        raise ConfigError.of("rollout.delta_every", rollout.delta_every, reason, allowed="0")


def check_fp8_layout(engine_args: Mapping[str, Any], capability: tuple[int, int]) -> None:
    """Refuse a server of an FP8 model on GPUs of this compute capability that would pack its weights or their scales anew.

    Raises:
        EngineError: names what must be set in `rollout.engine_args`, if anything helps.
    """
    here = f"on GPUs of compute capability {capability[0]}.{capability[1]}"
    if MARLIN[0] <= capability < MARLIN[1]:
        raise EngineError(
            f"an engine that serves an FP8 model {here} repacks its weights after loading, so that no weights can be sent to "
            "it: remove rollout.servers.model_path"
        )
    # 11 and 12 have other kernels by default (fp8_utils.py: initialize_fp8_gemm_config); of 12.0 only experts are packed
    linear, experts = engine_args.get("fp8_gemm_runner_backend", "auto"), engine_args.get("moe_runner_backend", "auto")
    packs_linear = linear in ("auto", "deep_gemm") if capability[0] == 10 else linear == "deep_gemm" and capability == (12, 1)
    packs_experts = experts == "deep_gemm" and (capability[0] == 10 or capability in ((12, 0), (12, 1)))
    for name, value, packs in (
        ("fp8_gemm_runner_backend", linear, packs_linear), ("moe_runner_backend", experts, packs_experts)
    ):  # fmt: skip
        if packs:
            raise EngineError(
                f"rollout.engine_args.{name} is {describe_value(value)}, with which an engine that serves an FP8 model {here} "
                "packs the scales anew after loading, so that no weights can be sent to it; it must be 'triton'"
            )
