"""Ministral 3: Mistral's decoder, whose queries grow with the logarithm of their position beyond the original context."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig, QueryScale
from megarl.models.hf_fields import refuse_biases, with_defaults
from megarl.models.rope import ORIGINAL, Rope, refuse_partial
from megarl.models.text_family import text_family
from megarl.models.windows import in_all_layers

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144}
"""transformers' defaults that differ from those of other families; of rotary parameters `ROPE`."""
IN_SGLANG = 16384
"""Span of the scale that SGLang takes where `original_max_position_embeddings` is not beside the rotary parameters."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    filled = with_defaults(hf_config, DEFAULTS)
    return filled if filled.get("rope_parameters") or filled.get("rope_scaling") else filled | {"rope_parameters": ROPE}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder without biases, with a window in all layers where the config has one.

    Raises:
        ModelError: biases, a scale of queries that is not said, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    query_scale(hf_config)
    sliding = in_all_layers(hf_config, sliding=hf_config.get("sliding_window") is not None)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding)


def query_scale(hf_config: HFConfig) -> QueryScale:
    """The scale that `llama_4_scaling_beta` and `original_max_position_embeddings` of the rotary parameters say.

    Raises:
        ModelError: one of them is missing or makes no sense, or the latter is said twice.
    """
    rope = Rope.from_hf(hf_config)
    refuse_partial(rope)
    inside, outside = hf_config[rope.field].get(ORIGINAL), hf_config.get(ORIGINAL)
    if outside is not None and outside != inside:
        raise ModelError(
            f"config.json: {ORIGINAL} is {outside!r}, but {rope.field}.{ORIGINAL}, by which queries are scaled, is {inside!r}; "
            "they must be equal"
        )
    return QueryScale(rope.number("llama_4_scaling_beta"), rope.number(ORIGINAL, least=1.0))


def traits(hf_config: HFConfig) -> DecoderTraits:
    """The scale of queries. Raises ModelError as `query_scale`."""
    return DecoderTraits(query_scale=query_scale(text_config(hf_config)))


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if not hf_config.get("rope_parameters"):
        return "its config.json must have rope_parameters: SGLang reads no others in this family"
    span, read = query_scale(hf_config).span, hf_config.get(ORIGINAL, IN_SGLANG)
    if span == read:
        return None
    return f"it scales queries beyond {read} tokens; its config.json must say {ORIGINAL} = {span:g} beside rope_parameters"


ARCHITECTURE = text_family(
    "ministral3",
    ("Ministral3ForCausalLM", "Ministral3ForSequenceClassification"),
    transformer_config_kwargs,
    text_config=text_config,
    refusal=_sglang_refusal,
    serves_windows=False,
    traits=traits,
)
