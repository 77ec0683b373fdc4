"""DeepSeek-V4, as transformers 5.19 has it.

* The residual stream is `hc_mult` streams. Before attention and before experts a hyper-connection reads all of them to say how
  they are collapsed to one, how the output joins each, and how they are mixed (a matrix that Sinkhorn's and Knopp's steps make
  doubly stochastic). `hc_head` collapses them before the last norm.
* All heads have one key, which is also the value. Its last dimensions rotate in pairs, and what attention gives is rotated back
  at the query's position. Each head has a sink. Queries see the last `sliding_window` tokens.
* Heavily compressed layers see a key for each whole window of 128 tokens too, a mean weighted channel by channel. Compressed
  sparse layers have overlapping windows of 8 tokens, one for each 4, of which an indexer with compressed keys of its own
  chooses `index_topk`. These two kinds rotate by frequencies of their own.
* Heads are projected in groups. Scores of experts are the root of a softplus, clamped gates as gpt-oss has them. In the first
  layers a table says the experts of each token id (`tid2eid`), and the router their weights alone.

transformers gives the indexer no gradient, so it stays as it is. What it leaves out of the published model (FP8, Hadamard
transforms, both without effect on exact numbers, and the layer for multi-token prediction) is not here either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, HubNames, SglangFacts
from megarl.models.hf_fields import positive, refuse, refuse_biases, size, with_defaults
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.compressed_attention.sizes import VARIANT, CompressedSizes, LayerKind

SLIDING, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = (SLIDING, CHOSEN, HEAVY)
BY_TOKEN, ROUTED = "hash_moe", "moe"
OF_RATIO = {0: SLIDING, 4: CHOSEN, 128: HEAVY}
RATES = {CHOSEN: 4, HEAVY: 128}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
"""transformers'."""
OTHER_NAMES = {"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_local_experts"}
"""Of fields in transformers, which reads both."""
HASHED_LAYERS, ROTATED = 3, 64 / 512
COMPRESSED_ROPE = "compressed_rope_parameters"
"""Field of the text config, which no folder has: `rope_parameters` of the layers with compressed keys."""
NOT_SERVED = "its kernels for this model need a GPU and have not been compared with these layers; the embedded engine serves it"
_ON_THE_HUB = (
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".position_bias", ".ape"),
    (".attn.sinks", ".attn.attn_sink"),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".kv_proj.", ".wkv."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.", ".ffn."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
)
_OUTSIDE = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


def hub_name(name: str) -> str:
    """The hub's name of a tensor of transformers' module, experts still together."""
    if not name.startswith("model.layers."):
        return _OUTSIDE.get(name, name)
    name = name.removeprefix("model.")
    for of_module, on_the_hub in _ON_THE_HUB:
        name = name.replace(of_module, on_the_hub)
    return name


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with its defaults, in the fields of transformers 5: those of earlier versions say the same.

    Raises:
        ModelError: layers are of unknown kinds, or of fewer than there are.
    """
    if COMPRESSED_ROPE in hf_config:
        return hf_config
    other_names = {field: hf_config.get(name) for field, name in OTHER_NAMES.items()}
    filled = with_defaults({**other_names, **hf_config}, DEFAULTS)
    layers, head_dim = size(filled, "num_hidden_layers"), size(filled, "head_dim")
    rates = dict(filled.get("compress_rates") or RATES)
    for kind, old in ((CHOSEN, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        rates[kind] = size({old: filled.get(old, rates.get(kind))}, old)
    filled |= {"compress_rates": rates, "intermediate_size": size(filled, "moe_intermediate_size")}
    filled["layer_types"] = _layer_types(filled, layers)
    hashed = size(filled, "num_hash_layers", default=HASHED_LAYERS, least=0)
    listed = filled.get("mlp_layer_types") or [BY_TOKEN] * min(layers, hashed) + [ROUTED] * max(0, layers - hashed)
    filled["mlp_layer_types"] = _checked("mlp_layer_types", listed, (BY_TOKEN, ROUTED), layers)
    if filled.get("partial_rotary_factor") is None:
        old_size = filled.get("qk_rope_head_dim")
        filled["partial_rotary_factor"] = ROTATED if old_size is None else size(filled, "qk_rope_head_dim") / head_dim
    return filled | _ropes(filled)


def _layer_types(hf_config: HFConfig, layers: int) -> list[str]:
    """Each layer's kind, by `layer_types`, by the `compress_ratios` of published configs, or transformers' default."""
    if hf_config.get("layer_types"):
        return _checked("layer_types", hf_config["layer_types"], KINDS, layers)
    ratios = hf_config.get("compress_ratios")
    if ratios:
        listed = _checked("compress_ratios", ratios, tuple(OF_RATIO), layers)
        return [OF_RATIO[ratio] for ratio in listed]
    first = min(layers, 2)
    return [HEAVY] * first + [CHOSEN if number % 2 else HEAVY for number in range(layers - first)]


def _checked(field: str, listed: Any, allowed: tuple[Any, ...], layers: int) -> list[Any]:
    entries = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    for entry in entries:
        if entry not in allowed:
            named = ", ".join(map(repr, allowed))
            raise ModelError(f"config.json: {field} has {entry!r}; its entries must be among {named}")
    if len(entries) < layers:
        raise ModelError(f"config.json: {field} has {len(entries)} entries; it must have one for each of {layers} layers")
    return entries[:layers]


def _ropes(hf_config: HFConfig) -> HFConfig:
    """Rotary parameters of both kinds of layers: only those with compressed keys are scaled."""
    given = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        of_compressed = given["compress"]
        return {"rope_parameters": given["main"], COMPRESSED_ROPE: of_compressed}
    share = {"partial_rotary_factor": hf_config["partial_rotary_factor"]}
    kind = given.get("rope_type", given.get("type", "default"))
    main = {"rope_type": "default", "rope_theta": hf_config.get("rope_theta", 10000.0), **share}
    of_compressed = {**given, "rope_type": kind, "rope_theta": hf_config["compress_rope_theta"], **share}
    if kind == "yarn":
        of_compressed.setdefault("attention_factor", 1.0)
    return {"rope_parameters": main, COMPRESSED_ROPE: of_compressed}


def compressed_sizes(hf_config: HFConfig) -> CompressedSizes:
    """The sizes of a config with its defaults.

    Raises:
        ModelError: a field is no positive integer, or contradicts another.
    """
    rates, kinds = hf_config["compress_rates"], hf_config["layer_types"]
    heads, groups = size(hf_config, "num_attention_heads"), size(hf_config, "o_groups")
    if heads % groups:
        raise ModelError(f"config.json: o_groups is {groups}; it must divide num_attention_heads={heads}")
    head_dim, index_dim = size(hf_config, "head_dim"), size(hf_config, "index_head_dim")
    rotated = int(head_dim * hf_config["partial_rotary_factor"])
    if index_dim < rotated:
        raise ModelError(f"config.json: index_head_dim is {index_dim}; it must be at least {rotated}, which rotate")
    by_token = (number for number, kind in enumerate(hf_config["mlp_layer_types"]) if kind == BY_TOKEN)
    rope, compressed_rope = (
        {"rope_parameters": hf_config[name], "max_position_embeddings": size(hf_config, "max_position_embeddings")}
        for name in ("rope_parameters", COMPRESSED_ROPE)
    )
    return CompressedSizes(
        num_heads=heads,
        head_dim=head_dim,
        rotated=rotated,
        hidden=size(hf_config, "hidden_size"),
        query_rank=size(hf_config, "q_lora_rank"),
        groups=groups,
        group_rank=size(hf_config, "o_lora_rank"),
        window=size(hf_config, "sliding_window"),
        rates=tuple(0 if kind == SLIDING else rates[kind] for kind in kinds),
        choosing=tuple(kind == CHOSEN for kind in kinds),
        index_heads=size(hf_config, "index_n_heads"),
        index_dim=index_dim,
        top_k=size(hf_config, "index_topk"),
        streams=size(hf_config, "hc_mult"),
        mixing_steps=size(hf_config, "hc_sinkhorn_iters"),
        mixing_epsilon=positive(hf_config, "hc_eps"),
        by_token=frozenset(by_token),
        vocab=size(hf_config, "vocab_size"),
        epsilon=positive(hf_config, "rms_norm_eps", 1e-6),
        rope=rope,
        compressed_rope=compressed_rope,
    )


def experts_of(hf_config: HFConfig) -> moe.MoeSizes:
    """The experts, in all layers, with one shared."""
    layers = range(size(hf_config, "num_hidden_layers"))
    fields = {"experts_fields": ("n_routed_experts",), "ffn_field": "moe_intermediate_size"}
    return moe.MoeSizes.from_hf(hf_config, layers, shared_experts=1, **fields)  # type: ignore[arg-type]


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Arguments of a decoder of experts, with a variant of attention in all layers.

    Raises:
        ModelError: biases, other scores of experts, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "num_key_value_heads", 1, "all heads of this family share one key")
    refuse(hf_config, "n_shared_experts", 1, "transformers computes one shared expert, whatever their number")
    refuse(hf_config, "scoring_func", "sqrtsoftplus", "megarl's router of this family scores so")
    refuse(hf_config, "topk_method", "noaux_tc", "experts of this family are chosen so")
    compressed, experts = compressed_sizes(hf_config), experts_of(hf_config)
    layers = zip(range(sizes.num_layers), compressed.rates, compressed.choosing, strict=True)
    return (
        dense.transformer_config_kwargs({**hf_config, "layer_types": None, "sliding_window": None}, sizes)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(hf_config, experts)
        | {
            "experimental_attention_variant": VARIANT,
            "linear_attention_freq": [
                LayerKind.encoded(rate, chooses=chooses, by_token=layer in compressed.by_token)
                for layer, rate, chooses in layers
            ],
            "linear_conv_kernel_dim": compressed.window,
            "activation_func_clamp_value": positive(hf_config, "swiglu_limit"),
        }
    )


def gpt_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Vocabulary and tying; the rotary embedding is that of layers without compressed keys, which rotate by themselves."""
    return dense.gpt_kwargs(hf_config, sizes, partial_rotary=True)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """Attention, experts and hyper-connections of every kind of layer, under the hub's names."""
    compressed, experts = compressed_sizes(hf_config), experts_of(hf_config)
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, hf_expert=("w1", "w3", "w2"))
    found = dense.weight_map(
        sizes,
        [dense.input_norm_rule(sizes.hidden_size, te_name=None), *_attention_rules(compressed)],
        [*of_experts, *_choice_rules(compressed, experts), *_connection_rules(compressed)],
        num_experts=experts.num_experts,
        left_out=("mtp.",),
    )
    return replace(found, rules=tuple(replace(rule, hf_names=tuple(map(hub_name, rule.hf_names))) for rule in found.rules))


def _attention_rules(sizes: CompressedSizes) -> list[Rule]:
    """Attention and the compression of keys; what all heads share is whole on every tensor rank."""
    width, hidden, head_dim = sizes.num_heads * sizes.head_dim, sizes.hidden, sizes.head_dim
    prefix, hf = dense.LAYER + "self_attention.", dense.HF_LAYER + "self_attn."
    grouped = sizes.groups * sizes.group_rank

    def rule(name: str, hf_name: str, shape: tuple[int, ...], axis: int | None = None) -> Rule:
        return Rule(prefix + name, (hf + hf_name,), Copy(shape, axis))

    return [
        rule("linear_q_down_proj.weight", "q_a_proj.weight", (sizes.query_rank, hidden)),
        rule("q_layernorm.weight", "q_a_norm.weight", (sizes.query_rank,)),
        rule("linear_q_up_proj.weight", "q_b_proj.weight", (width, sizes.query_rank), axis=0),
        rule("linear_kv_proj.weight", "kv_proj.weight", (head_dim, hidden)),
        rule("kv_layernorm.weight", "kv_norm.weight", (head_dim,)),
        rule("core_attention.sinks", "sinks", (sizes.num_heads,), axis=0),
        rule("group_proj.weight", "o_a_proj.weight", (grouped, width // sizes.groups), axis=0),
        rule("linear_proj.weight", "o_b_proj.weight", (hidden, grouped), axis=1),
        *(one for rate, chooses in sizes.kinds for one in _compression_rules(sizes, rate, chooses=chooses)),
    ]


def _compression_rules(sizes: CompressedSizes, rate: int, *, chooses: bool) -> list[Rule]:
    layers = sizes.layers_of(rate, chooses=chooses)
    prefix, hf = dense.LAYER + "self_attention.", dense.HF_LAYER + "self_attn.compressor."

    def compressor(name: str, hf_name: str, head_dim: int) -> list[Rule]:
        wide = head_dim * (2 if chooses else 1)
        shapes = {
            ("linear_kv.weight", "kv_proj.weight"): (wide, sizes.hidden),
            ("linear_gate.weight", "gate_proj.weight"): (wide, sizes.hidden),
            ("position_bias", "position_bias"): (rate, wide),
            ("norm.weight", "kv_norm.weight"): (head_dim,),
        }
        return [Rule(name + own, (hf_name + theirs,), Copy(shape), layers=layers) for (own, theirs), shape in shapes.items()]

    found = compressor(prefix + "compressor.", hf, sizes.head_dim)
    if chooses:
        queries, weights = (sizes.index_heads * sizes.index_dim, sizes.query_rank), (sizes.index_heads, sizes.hidden)
        own, theirs = prefix + "indexer.", hf + "indexer."
        found += [
            *compressor(own + "compressor.", theirs, sizes.index_dim),
            Rule(own + "linear_wq_b.weight", (theirs + "q_b_proj.weight",), Copy(queries), layers=layers),
            Rule(own + "linear_weights_proj.weight", (theirs + "scorer.weights_proj.weight",), Copy(weights), layers=layers),
        ]
    return found


def _choice_rules(sizes: CompressedSizes, experts: moe.MoeSizes) -> list[Rule]:
    """The biases that choose experts, and the tables that do so in their place."""
    own, theirs = dense.LAYER + "mlp.router.", dense.HF_LAYER + "mlp.gate."
    bias, table = Copy((experts.num_experts,)), Copy((sizes.vocab, experts.top_k))
    found = []
    if routed := experts.layers - sizes.by_token:
        hf_bias = (theirs + "e_score_correction_bias",)
        found.append(Rule(own + "expert_bias", hf_bias, bias, layers=routed, dtype="float32"))
    if sizes.by_token:
        found.append(Rule(own + "token_experts", (theirs + "tid2eid",), table, layers=sizes.by_token, dtype="int64"))
    return found


def _connection_rules(sizes: CompressedSizes) -> list[Rule]:
    """Hyper-connections, and the collapse behind the last layer, which that layer has."""
    streams, last = sizes.streams, frozenset({len(sizes.rates) - 1})
    wide, coefficients = streams * sizes.hidden, streams * (2 + streams)

    def connection(name: str, hf: str, rows: int, scales: int, layers: frozenset[int] | None = None) -> list[Rule]:
        shapes = {("projection", "fn"): (rows, wide), ("base", "base"): (rows,), ("scale", "scale"): (scales,)}
        return [
            Rule(f"{dense.LAYER}{name}.{own}", (hf + theirs,), Copy(shape), layers=layers)
            for (own, theirs), shape in shapes.items()
        ]

    return [
        *connection("attention_connection", dense.HF_LAYER + "attn_hc.", coefficients, 3),
        *connection("mlp_connection", dense.HF_LAYER + "ffn_hc.", coefficients, 3),
        *connection("stream_head", "model.hc_head.hc_", streams, 1, last),
    ]


ARCHITECTURE = text_family(
    "deepseek_v4",
    ("DeepseekV4ForCausalLM", "DeepseekV4ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    gpt_kwargs,
    text_config=text_config,
    sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
    hub=HubNames(expert=("w1", "w3", "w2")),
    linear=lambda hf_config: compressed_sizes(text_config(hf_config)),
    traits=lambda hf_config: DecoderTraits(streams=size(text_config(hf_config), "hc_mult")),
    hub_name=hub_name,
)
