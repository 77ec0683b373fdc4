"""Why megarl has SGLang serve none of these families."""

from __future__ import annotations

from megarl.models.architecture import SglangFacts

_WHY = (
    "its Mamba-2 layers have kernels for GPUs alone, which megarl has not compared with the layers that it trains; "
    "rollout.engine 'embedded' serves it"
)
NOT_IN_SGLANG = SglangFacts(refusal=lambda hf_config: _WHY)
