"""Why SGLang serves none of these families for megarl."""

from __future__ import annotations

from megarl.models.architecture import SglangFacts

_WHY = "it does"
NOT_IN_SGLANG = SglangFacts(refusal=lambda hf_config: _WHY)
