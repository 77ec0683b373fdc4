"""Solar-Open: GLM-4.5's experts in every layer, behind plain grouped attention."""

from __future__ import annotations

from typing import Any

from megarl.models import dense, glm4_moe
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse, with_defaults
from megarl.models.text_family import NOT_IN_SGLANG, text_family

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 1280,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
"""transformers' defaults that differ from those of other families, and what it has of none."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with defaults, and a width for the MLP that no layer has."""
    filled = with_defaults(hf_config, DEFAULTS)
    return {"intermediate_size": filled["moe_intermediate_size"], **filled}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """GLM-4.5's arguments.

    Raises:
        ModelError: dense layers, norms of heads, or anything that GLM-4.5 refuses.
    """
    refuse(hf_config, "first_k_dense_replace", 0, "transformers gives every layer experts")
    refuse(hf_config, "use_qk_norm", False, "transformers does not norm queries and keys")
    return glm4_moe.transformer_config_kwargs(hf_config, sizes)


ARCHITECTURE = text_family(
    "solar_open",
    ("SolarOpenForCausalLM", "SolarOpenForSequenceClassification"),
    transformer_config_kwargs,
    glm4_moe.weight_map,
    text_config=text_config,
    sglang=NOT_IN_SGLANG,
)
