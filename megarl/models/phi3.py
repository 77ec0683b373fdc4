"""Phi-4 and Phi-3: Llama's decoder, stored with q, k, v in one tensor and gate, up in another; a share of a head rotates."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig
from megarl.models.fused_rows import FusedRows, gate_over_up, queries_keys_values
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.windows import in_all_layers


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder without biases, with windows in all layers where the config says how long they are.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    sliding = in_all_layers(hf_config, sliding="sliding_window" in hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding)


def gpt_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Vocabulary, positions and tying.

    Raises:
        ModelError: the rotary embedding is scaled otherwise than in the models for long contexts (`longrope`).
    """
    Rope.from_hf(hf_config, kinds=("default", "longrope"))
    return dense.gpt_kwargs(hf_config, sizes, partial_rotary=True)


def fused_rows(hf_config: HFConfig) -> FusedRows:
    """Queries, keys and values are one tensor, gate and up another."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    projections = queries_keys_values(sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim)
    return FusedRows(projections | gate_over_up(sizes.ffn_size), sizes.hidden_size)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    share = Rope.from_hf(hf_config).partial
    if share == float(hf_config.get("partial_rotary_factor") or 1.0):
        return None
    return f"its config.json must say partial_rotary_factor = {share:g} beside rope_parameters, where SGLang does not read it"


ARCHITECTURE = text_family(
    "phi3",
    ("Phi3ForCausalLM", "Phi3ForSequenceClassification"),
    transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    defaults={"rms_norm_eps": 1e-5},
    refusal=_sglang_refusal,
    serves_windows=False,
    fused_rows=fused_rows,
)
