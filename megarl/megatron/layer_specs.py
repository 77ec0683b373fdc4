"""Layer specs by name: `transformer_engine`, megatron-core's own `local`, and `reference` (plain torch, any device).

`reference` brings what `local` refuses: an RMSNorm that works under sequence parallelism, attention over packed streams
with shared prompts, and latent attention. Its parameter names are those of `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_te_version

from megarl.errors import LayoutError
from megarl.megatron.attention import ReferenceAttention, core_attention_called, variant_of
from megarl.megatron.branches import BranchLayer
from megarl.megatron.core_traits import with_score_traits
from megarl.megatron.head_gates import HeadGatedSelfAttention
from megarl.megatron.latent_attention import LatentSelfAttention, has_no_positions
from megarl.megatron.latent_experts import latent_mixture
from megarl.megatron.model_config import has_experts
from megarl.megatron.norms import KeyNorm, LateNorm, QueryNorm, ReferenceRMSNorm, UnitNorm
from megarl.megatron.own_mixtures import parts_of
from megarl.megatron.rotary import RotarySetSelfAttention
from megarl.megatron.routers import CorrectedSoftmaxRouter
from megarl.megatron.value_heads import WideValueSelfAttention
from megarl.models.architecture import DecoderTraits
from megarl.models.context_exchange import check_exchange, oldest_engine
from megarl.models.deepseek_v3 import LATENT_NORM_EPS
from megarl.models.layer_ropes import LayerRope
from megarl.models.vision import vision_part
from megarl.models.windows import check_windows
from megarl.option_list import part

PLAIN = DecoderTraits()
CORE_VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])


class GatedSelfAttention(SelfAttention):
    """megatron-core's attention whose output is gated, also where several tensor ranks share a KV head.

    There megatron-core (0.16.1) picks the rank's query heads out of their group's, but leaves it the gates of the whole group.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Query, key, value `[S, 1, heads, d]` and the gates of the query's heads."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.shape[2]
        if gate.shape[2] != heads:
            ranks_of_group = gate.shape[2] // heads
            gate = gate.narrow(2, self.pg_collection.tp.rank() % ranks_of_group * heads, heads)
        return query, key, value, gate


class DirectQueryLatentAttention(MLASelfAttention):
    """megatron-core's latent attention of a model whose queries have no latent: their projection has no norm of its own.

    With `qk_layernorm`, which the latent of keys and values needs, megatron-core 0.19 gives the queries' projection one too.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": submodules.linear_q_proj}


def prepare_biased_experts(chunk: torch.nn.Module) -> None:
    """Have megatron-core's experts that run one after another add their biases as autograd and gradient sums allow.

    It adds the bias of an expert's output in place, to what autograd takes for a view. Under sequence parallelism it marks that
    bias for a sum over tensor parallelism, which the sum over the experts' data parallelism has in it already.
    """
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                output: Any = expert.linear_fc2
                output.register_forward_hook(lambda _, inputs, found: (found[0].clone(), found[1]))
                output.bias.sequence_parallel = False


def block_spec(
    name: str,
    config: TransformerConfig,
    layers: Sequence[int],
    deepstack: int = 0,
    traits: DecoderTraits = PLAIN,
    rope: LayerRope | None = None,
    linear: Any = None,
    *,
    core_attention: str = "spec",
) -> TransformerBlockSubmodules:
    """The spec of a model chunk that holds `layers` (global, zero-based) under the layer spec called `name`.

    Their core attention is the spec's, or the one that is called `core_attention`. Behind the model's first `deepstack` layers
    features of a vision tower are added. The layers of `rope` rotate as it says. `linear`: the sizes of linear attention.

    Raises:
        LayoutError: the layers of that name cannot run the model, or not under its layout, or features are to be added in
            several chunks.
    """
    _check_spec(name, config, traits, core_attention)
    variant, has_variant = variant_of(config), config.linear_attention_freq
    kinds = [
        (
            has_experts(config, layer),
            variant is not None and bool(has_variant[layer]),
            None if rope is None else int(layer in rope.layers),
            traits.query_scale is not None and traits.query_scale.is_in(layer),
            not (config.no_rope_freq and config.no_rope_freq[layer]),
            (layer not in traits.mlp_alone, layer not in traits.attention_alone),
        )
        for layer in layers
    ]

    def make(kind: tuple[bool, bool, int | None, bool, bool, tuple[bool, bool]]) -> ModuleSpec:
        layer = _layer(name, config, with_experts=kind[0], core_attention=core_attention)
        if variant is not None and kind[1]:
            variant.put_into(layer, name, linear)
        else:
            attention = layer.submodules.self_attention.submodules
            scale = traits.query_scale if kind[3] else None
            attention.core_attention = with_score_traits(attention.core_attention, scale, traits.score_cap)
            if traits.unit_heads:
                attention.q_layernorm = attention.k_layernorm = UnitNorm if kind[4] else IdentityOp
        attends, has_mlp = kind[5]
        of_layer = traits if traits.of_variant is None or not kind[1] else traits.of_variant
        rotating = _with_rotary_set(_with_traits(layer, of_layer), kind[2], rope, traits)
        return _only(rotating, attends=attends, has_mlp=has_mlp)

    specs = {kind: make(kind) for kind in set(kinds)}
    of_layers = [specs[kind] for kind in kinds]
    if (own := traits.own_layers) is not None:
        of_layers = part(own.option, "decoder_layers", "this model").placed(of_layers, layers, config, own, name)
    if layers[0] == 0 and deepstack:
        layer = vision_part("tower").DeepstackLayer
        of_layers = [replace(spec, module=layer) if n < deepstack else spec for n, spec in enumerate(of_layers)]
    if len(layers) < deepstack if layers[0] == 0 else layers[0] < deepstack:
        raise LayoutError(f"the vision tower adds features behind {deepstack} layers; they must be in the first model chunk")
    return TransformerBlockSubmodules(layer_specs=of_layers, layer_norm=block_norm(name))


def prediction_spec(name: str, config: TransformerConfig, *, core_attention: str = "spec") -> ModuleSpec:
    """The spec of the layer in a layer for multi-token prediction: full attention, and experts if the model has any."""
    return _layer(name, config, with_experts=True, core_attention=core_attention)


def block_norm(name: str) -> Any:
    """The norm outside the layers of the layer spec called `name`."""
    return ReferenceRMSNorm if name == "reference" else LayerNormImpl


def _check_spec(name: str, config: TransformerConfig, traits: DecoderTraits, core_attention: str) -> None:
    """Raise LayoutError if layers of that name cannot run the model, or not under its layout."""
    check_windows(name, windows=config.window_size is not None)
    if name == "transformer_engine":
        _check_exchange(config)
    if name == "transformer_engine" and not traits.pre_norms:
        raise LayoutError(
            "model.layer_spec is 'transformer_engine', but this model has no norms before attention and MLP, which Transformer "
            "Engine's layers cannot leave out; it must be 'reference'"
        )
    if traits.chunks and config.window_size is not None and (name != "reference" or core_attention != "spec"):
        what = "attention by segments" if core_attention != "spec" else f"layers of model.layer_spec = '{name}'"
        raise LayoutError(f"this model attends within chunks, which {what} do not; model.layer_spec must be 'reference'")
    if traits.score_cap is not None and (name != "reference" or core_attention != "spec"):
        what = "attention by segments" if core_attention != "spec" else f"layers of model.layer_spec = '{name}'"
        raise LayoutError(f"this model caps attention scores, which {what} do not; model.layer_spec must be 'reference'")
    if name == "local" and core_attention == "spec" and traits.query_scale is not None:
        raise LayoutError(
            "model.layer_spec is 'local', but this model scales queries by their positions, which megatron-core's local layers "
            "are not told; it must be 'reference' or 'transformer_engine'"
        )
    if name == "local" and traits.values is not None:
        raise LayoutError(
            "model.layer_spec is 'local', but this model's heads of values are not as wide as those of keys, which "
            "megatron-core's local layers cannot compute; it must be 'reference' or 'transformer_engine'"
        )
    if name == "local" and config.multi_latent_attention:
        raise LayoutError(
            "model.layer_spec is 'local', but this model has latent attention, which megatron-core's local layers cannot run "
            "on packed sequences; it must be 'reference' or 'transformer_engine'"
        )
    if name == "local" and config.experimental_attention_variant is not None:
        raise LayoutError(
            "model.layer_spec is 'local', but this model has linear attention or state spaces, which megatron-core's local "
            "layers do not have; it must be 'reference' or, with linear attention, 'transformer_engine'"
        )
    if name == "local" and config.layernorm_zero_centered_gamma:
        raise LayoutError(
            "model.layer_spec is 'local', but this model's norms are stored less one, which megatron-core's local layers do "
            "not add; it must be 'reference' or 'transformer_engine'"
        )


def _check_exchange(config: TransformerConfig) -> None:
    """Raise LayoutError where the installed Transformer Engine cannot compute the model over context-parallel ranks."""
    ways, kinds = config.cp_comm_type, {"windows": config.window_size is not None, "sinks": config.softmax_type != "vanilla"}
    tp, cp, heads, kv_heads = (
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        config.num_attention_heads,
        config.num_query_groups or config.num_attention_heads,
    )
    check_exchange(ways, tp=tp, cp=cp, heads=heads, kv_heads=kv_heads, **kinds)
    if cp > 1 and isinstance(ways, list) and CORE_VERSION < (0, 19):
        reason = "needs one megatron.cp_comm_type for all layers: megatron-core 0.16 gives each layer the next one's of a list"
        raise LayoutError.of("cp", cp, reason, allowed="1")
    oldest, installed = oldest_engine(ways, **kinds), get_te_version()
    if cp > 1 and oldest is not None and installed and (0,) * 3 < installed.release < oldest:
        needed = ".".join(map(str, oldest))
        reason = f"needs Transformer Engine {needed} with the windows or sinks of this model, and {installed} is installed"
        raise LayoutError.of("cp", cp, reason, allowed="1")


def _with_traits(layer: ModuleSpec, traits: DecoderTraits) -> ModuleSpec:
    """The layer with what the family has beside megatron-core's own."""
    parts = layer.submodules
    if not traits.pre_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        parts.sharded_state_dict_keys_map = {}
    if traits.projection_norms:
        attention = parts.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    if traits.norms_behind_rotary:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = LateNorm
    if traits.corrected_softmax is not None and hasattr(mixture := parts_of(parts.mlp), "router"):
        mixture.router = partial(CorrectedSoftmaxRouter, least_sum=traits.corrected_softmax)
    if traits.post_norms or traits.residual_multiplier != 1.0:
        return replace(layer, module=BranchLayer, params={**layer.params, "traits": traits})
    return layer


def _with_rotary_set(layer: ModuleSpec, number: int | None, rope: LayerRope | None, traits: DecoderTraits) -> ModuleSpec:
    """The layer whose attention rotates by the set of frequencies of this number; None: there is one for all layers."""
    if number is not None and rope is not None:
        attention = layer.submodules.self_attention
        attention.module = HeadGatedSelfAttention if traits.head_gates else RotarySetSelfAttention
        attention.params = {**attention.params, "rotary_set": number, "heads": rope.heads}
        if traits.values is not None:
            attention.module = WideValueSelfAttention
            attention.params |= {"values": traits.values, "has_sinks": bool(number) or not traits.sinks_in_windows}
    return layer


def _only(layer: ModuleSpec, *, attends: bool, has_mlp: bool) -> ModuleSpec:
    """The layer without its attention, or without its MLP."""
    parts = layer.submodules
    if not attends:
        parts.input_layernorm, parts.self_attention, parts.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
    if not has_mlp:
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
    return layer


def set_latent_norm_epsilon(model: Any) -> None:
    """Give the norms of latents the epsilon that transformers gives them: megatron-core gives all norms of a model one.

    Transformer Engine has them in the linear layers behind them.
    """
    for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        for name in ("linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"):
            module: Any = getattr(layer.self_attention, name, None)
            if hasattr(module, "eps"):
                module.eps = LATENT_NORM_EPS


def stop_rotation(model: Any) -> None:
    """Have latent attention rotate by no angle in layers without positions, which megatron-core knows of other attention."""
    for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        rotary: Any = getattr(layer.self_attention, "rotary_pos_emb", None)
        if rotary is not None and has_no_positions(layer.config, layer.layer_number):
            rotary.inv_freq = torch.zeros_like(rotary.inv_freq)


def _transformer_engine(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        use_te_activation_func=config.use_te_activation_func,
    )
    if isinstance(config, MLATransformerConfig) and config.q_lora_rank is None:
        layer.submodules.self_attention.module = DirectQueryLatentAttention
    return layer


def _local(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    return get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )


def _reference(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer = _local(config, num_experts)
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = ReferenceRMSNorm
    attention.core_attention = ReferenceAttention
    # A checkpoint names the norms as under Transformer Engine, which fuses some of them into the linear layers.
    fused = {} if num_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if config.multi_latent_attention:
        parts.self_attention.module = LatentSelfAttention
        attention.q_layernorm = attention.kv_layernorm = ReferenceRMSNorm
        fused |= {f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    else:
        fused["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = ReferenceRMSNorm
    parts.sharded_state_dict_keys_map = fused
    return layer


_MAKE: dict[str, Callable[[TransformerConfig, int | None], ModuleSpec]] = {
    "transformer_engine": _transformer_engine,
    "local": _local,
    "reference": _reference,
}


def _layer(name: str, config: TransformerConfig, *, with_experts: bool, core_attention: str) -> ModuleSpec:
    """A layer of the spec called `name` with full attention, and experts if the model has any."""
    layer = _MAKE[name](config, config.num_moe_experts if with_experts else None)
    attention = layer.submodules.self_attention
    if config.attention_output_gate:
        attention.module = GatedSelfAttention
    if with_experts and config.moe_latent_size is not None:
        layer.submodules.mlp = latent_mixture(layer.submodules.mlp, config.moe_latent_size)
    if core_attention != "spec":
        attention.submodules.core_attention = core_attention_called(core_attention).MODULE
    return layer
