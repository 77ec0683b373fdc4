"""The common part of families with experts: which layers have them, the router's arguments and the experts' rules.

Routing must not move by itself while a policy is trained: megatron-core's auxiliary losses are off, as is its update of
an expert bias; megarl's own are in `megatron/balance_losses.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.dense import HF_LAYER, LAYER, DenseSizes
from megarl.models.hf_fields import refuse, size
from megarl.models.packings import Copy, GateUp
from megarl.models.weight_map import Rule, WeightMap

MLP_KINDS = ("dense", "sparse")


@dataclass(frozen=True)
class MoeSizes:
    """`layers` have `num_experts` of width `expert_ffn_size`, of which each token uses `top_k`; the others are dense.

    `shared_ffn_size` is the width of the experts that every token uses, taken together; 0 without any.
    """

    layers: frozenset[int]
    num_experts: int
    top_k: int
    expert_ffn_size: int
    shared_ffn_size: int = 0

    @classmethod
    def from_hf(
        cls,
        hf_config: dict[str, Any],
        layers: Iterable[int],
        *,
        experts_fields: tuple[str, ...],
        ffn_field: str,
        shared_experts: int = 0,
    ) -> MoeSizes:
        """Read a config; `experts_fields` are the names that versions of transformers give the number of experts.

        Raises:
            ModelError: a field is missing, no positive integer, or contradicts another.
        """
        field = next((name for name in experts_fields if hf_config.get(name) is not None), experts_fields[0])
        num_experts, top_k = size(hf_config, field), size(hf_config, "num_experts_per_tok")
        if top_k > num_experts:
            raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are {num_experts} experts ({field})")
        expert_layers = frozenset(layers)
        if not expert_layers:
            raise ModelError(f"config.json: none of the layers has experts, but {field} is {num_experts}")
        ffn_size = size(hf_config, ffn_field)
        return cls(expert_layers, num_experts, top_k, ffn_size, shared_experts * ffn_size)


def tied_refusal(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang 0.5.23 cannot serve most families of mixtures of experts with tied embeddings; None: they are not tied."""
    if hf_config.get("tie_word_embeddings"):
        return "tie_word_embeddings is true, but SGLang gives the model an output layer of its own"
    return None


def behind_dense_layers(hf_config: dict[str, Any], *, dense_layers: int = 0, shared_experts: int = 0) -> MoeSizes:
    """Experts in all layers but the first ones, as DeepSeek-V3 calls the fields.

    `dense_layers` and `shared_experts` are transformers' defaults for a config that does not say how many there are.

    Raises:
        ModelError: a field is missing, no such integer, or contradicts another.
    """
    first = size(hf_config, "first_k_dense_replace", default=dense_layers, least=0)
    return MoeSizes.from_hf(
        hf_config,
        range(first, size(hf_config, "num_hidden_layers")),
        experts_fields=("n_routed_experts", "num_local_experts"),
        ffn_field="moe_intermediate_size",
        shared_experts=size(hf_config, "n_shared_experts", default=shared_experts, least=0),
    )


def listed_layers(hf_config: dict[str, Any], dense_layers: int) -> list[int]:
    """The layers that `mlp_layer_types` says have experts; without it all but the first `dense_layers`.

    Raises:
        ModelError: it does not say one of `MLP_KINDS` for each layer.
    """
    layers, kinds = size(hf_config, "num_hidden_layers"), hf_config.get("mlp_layer_types")
    if kinds is None:
        return [*range(dense_layers, layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in MLP_KINDS for kind in kinds):
        raise ModelError(
            f"config.json: mlp_layer_types is {kinds!r:.80}; it must say {' or '.join(map(repr, MLP_KINDS))} for each of the "
            f"{layers} layers"
        )
    return [layer for layer, kind in enumerate(kinds) if kind == MLP_KINDS[1]]


def in_every_layer(hf_config: dict[str, Any]) -> MoeSizes:
    """Experts in all layers, as Mixtral calls the fields. Raises ModelError as `MoeSizes.from_hf`."""
    layers, fields = range(size(hf_config, "num_hidden_layers")), ("num_local_experts", "num_experts")
    return MoeSizes.from_hf(hf_config, layers, experts_fields=fields, ffn_field="intermediate_size")


def weight_map(
    sizes: DenseSizes,
    experts: MoeSizes,
    attention: Iterable[Rule],
    of_experts: Iterable[Rule],
    *,
    hf_norm: str = "post_attention_layernorm",
    hf_block: str = "mlp.",
    **more: Any,
) -> WeightMap:
    """`dense.weight_map` of a family whose layers without experts have a dense MLP, the hub's `hf_block`, behind `hf_norm`."""
    dense_layers = frozenset(range(sizes.num_layers)) - experts.layers
    mlp = [*dense.mlp_rules(sizes, dense_layers, hf_norm=hf_norm, hf_block=hf_block), *of_experts]
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts, **more)


def transformer_config_kwargs(moe: MoeSizes, num_layers: int) -> dict[str, Any]:
    """TransformerConfig's arguments for the experts; how the router scores is the family's."""
    everywhere = len(moe.layers) == num_layers
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_layer_freq": 1 if everywhere else [int(layer in moe.layers) for layer in range(num_layers)],
        "moe_router_topk": moe.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def softmax_router_kwargs(moe: MoeSizes, *, normalised: bool) -> dict[str, Any]:
    """A softmax over all experts of which each token takes the `top_k`, that sum to one if `normalised`.

    transformers computes the router's product in the model's dtype, and so does megatron-core without `moe_router_dtype`.
    """
    # The softmax over the top-k logits is the normalised one. With a single expert it is 1, which megatron-core refuses.
    if normalised and moe.top_k == 1:
        raise ModelError("config.json: num_experts_per_tok is 1, but where the weights sum to one it must be at least 2")
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalised}


def sigmoid_router_kwargs(hf_config: dict[str, Any], experts: MoeSizes) -> dict[str, Any]:
    """Sigmoid scores in float32; the best groups by their two best experts, then the best experts of these groups.

    As DeepSeek-V3 has it (arXiv:2412.19437), with a correction bias that only picks.

    Raises:
        ModelError: weights that are not normalised, or groups that megatron-core ranks otherwise.
    """
    refuse(hf_config, "norm_topk_prob", True, "megatron-core's sigmoid router normalises the chosen experts' weights")
    groups, top_groups = size(hf_config, "n_group", default=1), size(hf_config, "topk_group", default=1)
    if experts.top_k == 1 or (groups > 1 and experts.top_k // top_groups != 2):
        raise ModelError(
            f"config.json: num_experts_per_tok is {experts.top_k} with topk_group={top_groups} and n_group={groups}, but "
            "megatron-core ranks groups as DeepSeek-V3 does only if num_experts_per_tok // topk_group is 2"
        )
    if experts.num_experts % groups or top_groups > groups:
        raise ModelError(
            f"config.json: n_group is {groups} and topk_group {top_groups}, but n_group must divide "
            f"n_routed_experts={experts.num_experts} and be at least topk_group"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": top_groups if groups > 1 else None,
        "moe_router_topk_scaling_factor": float(hf_config.get("routed_scaling_factor") or 1.0),
    }


def mlp_rules(
    moe: MoeSizes,
    hidden_size: int,
    *,
    hf_norm: str = "post_attention_layernorm",
    hf_block: str = "mlp.",
    hf_expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    hf_router: str = "gate",
    hf_shared: str = "shared_experts.",
    hf_shared_parts: tuple[str, str, str] | None = None,
    hf_shared_gate: str | None = None,
    expert_bias: bool = False,
    hf_expert_bias: str = "gate.e_score_correction_bias",
    expert_bias_is_row: bool = False,
    bias: bool = False,
) -> list[Rule]:
    """Norm, router and experts of the layers that have them; `expert_bias` is DeepSeek's, added to pick the experts.
    `expert_bias_is_row`: the hub has it as a matrix of one row, and so has the router.

    `hf_shared` and `hf_shared_gate` are what the shared expert is called, and what scales its output, if anything does;
    `hf_shared_parts` its projections, None: as those of the others.
    `bias`: router and experts have biases (gpt-oss).
    """
    hidden, block, hf = hidden_size, LAYER + "mlp.", HF_LAYER + hf_block
    gate, up, down = hf_expert
    shared_parts = hf_shared_parts or hf_expert

    def rule(name: str, hf_names: tuple[str, ...], packing: Any, **more: Any) -> Rule:
        return Rule(name, hf_names, packing, layers=moe.layers, **more)

    def gated(
        name: str, hf_name: str, ffn_size: int, te_names: tuple[str | None, str | None], parts: tuple[str, str, str] = hf_expert
    ) -> list[Rule]:
        *halves, last = (f"{hf_name}{part}.weight" for part in parts)
        return [
            rule(name + "linear_fc1.weight", tuple(halves), GateUp(ffn_size, hidden), te_name=te_names[0]),
            rule(name + "linear_fc2.weight", (last,), Copy((hidden, ffn_size), 1), te_name=te_names[1]),
        ]

    grouped = (block + "experts.linear_fc1.weight{expert}", block + "experts.linear_fc2.weight{expert}")
    rules = [
        rule(LAYER + "pre_mlp_layernorm.weight", (f"{HF_LAYER}{hf_norm}.weight",), Copy((hidden,))),
        rule(block + "router.weight", (f"{hf}{hf_router}.weight",), Copy((moe.num_experts, hidden))),
        *gated(block + "experts.local_experts.{expert}.", hf + "experts.{expert}.", moe.expert_ffn_size, grouped),
    ]
    if expert_bias:
        hf_bias = (hf + hf_expert_bias,)
        shape = (1, moe.num_experts) if expert_bias_is_row else (moe.num_experts,)
        rules.append(rule(block + "router.expert_bias", hf_bias, Copy(shape), dtype="float32"))
    if bias:
        rules.append(rule(block + "router.bias", (f"{hf}{hf_router}.bias",), Copy((moe.num_experts,))))
        for name, packing, parts in (("fc1", GateUp(moe.expert_ffn_size, None), (gate, up)), ("fc2", Copy((hidden,)), (down,))):
            rules.append(
                rule(
                    f"{block}experts.local_experts.{{expert}}.linear_{name}.bias",
                    tuple(f"{hf}experts.{{expert}}.{part}.bias" for part in parts),
                    packing,
                    te_name=f"{block}experts.linear_{name}.bias{{expert}}",
                )
            )
    if moe.shared_ffn_size:
        rules += gated(block + "shared_experts.", hf + hf_shared, moe.shared_ffn_size, (None, None), shared_parts)
    if hf_shared_gate is not None:
        rules.append(rule(block + "shared_experts.gate_weight", (hf + hf_shared_gate,), Copy((1, hidden))))
    return rules
