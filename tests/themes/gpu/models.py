"""Random models of sizes that FP8 and fused attention can compute, responses to score, and transformers' answers to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.stream import Unit, split_shared_prompts
from megarl.models.hf_folder import write_hf_folder
from megarl.models.weight_tensors import hf_from_shards
from tests.families import hub_gradients, hub_tensors

VOCAB_SIZE = 1024
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "mlp_only_layers": [1]}
        | {"norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
        | {"moe_intermediate_size": 256, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 128}
        | {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
        | {"num_nextn_predict_layers": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256}
        | {"first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    ),
}


def hugging_face(family: str) -> Any:
    """The model of `family` in float32 on the CPU: 4 layers, every width a multiple of 128, seeded random weights."""
    import transformers

    name, extra = CLASSES[family]
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "pad_token_id": None, "attn_implementation": "eager", "experts_implementation": "eager",
    } | extra  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = "norm" in parameter_name
            parameter.copy_((1.0 if norm else 0.0) + 0.06 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())  # so that every implementation starts from the same weights
    return model


def write_folder(family: str, path: Path) -> None:
    """The model as a Hugging Face folder."""
    model = hugging_face(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    write_hf_folder(path, hub_tensors(model).items(), config)


def units(count: int = 12, longest: int = 96) -> list[Unit]:
    """Prompts with one response each, of many lengths."""
    from megarl.data.stream import Response

    generator = torch.Generator().manual_seed(5)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator)

    found = []
    for index in range(count):
        tokens = ids(1, longest)
        weights = torch.randn(len(tokens), generator=generator) / 100
        response = Response(index, tokens, torch.ones(len(tokens), dtype=torch.bool), {"weights": weights})
        found.append(Unit(ids(2, longest), [response]))
    return found


def objective(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """A weighted sum of log-probs and entropies."""
    return -(stream.columns["weights"] * (output[:, 0] + 0.3 * output[:, 1])).sum(), {}


def hugging_face_answer(family: str, dtype: torch.dtype, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs of all response tokens, gradients of `objective` by hub name) by transformers, on the CPU in float32."""
    model = hugging_face(family).to(device=device, dtype=dtype)
    scores = []
    for unit in split_shared_prompts(units()):
        response = unit.responses[0]
        tokens = torch.cat([unit.prompt_ids, response.token_ids]).to(device)
        logits = model(tokens[None]).logits[0, len(unit.prompt_ids) - 1 : -1].float()
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, response.token_ids.to(device)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        (-(response.columns["weights"].to(device) * (chosen + 0.3 * entropy)).sum()).backward()
        scores.append(chosen.detach().cpu())
    return torch.cat(scores), {name: gradient.float().cpu() for name, gradient in hub_gradients(model).items()}


def role_for(folder: Path, *, adam: dict[str, Any] | None = None, **options: Any) -> Any:
    """A role on this rank, trained by Adam with `adam`'s settings unless `trainable` is false."""
    from megarl.config.layout import Layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    model = ModelOptions(str(folder), Layout(), **options)
    return RankModel(model, OptimizerOptions(lr=1e-3, eps=1e-4, **(adam or {})) if model.trainable else None)


def log_probs_of(role: Any, per_micro_batch: int = 12) -> Tensor:
    """Log-probs of all response tokens, on the CPU."""
    chosen = units()
    parts = [chosen[start : start + per_micro_batch] for start in range(0, len(chosen), per_micro_batch)]
    answers = role.forward(parts)
    return torch.cat([answers[index][:, 0].float().cpu() for index in sorted(answers)])


def gradients_of(role: Any) -> dict[str, Tensor]:
    """Gradients of `objective` by hub name, in float32 on the CPU."""
    from megarl.megatron.step import forward_backward

    for chunk in role.chunks:
        chunk.train()
    forward_backward(role.chunks, role.options, [units()], objective)
    return _by_hub_name(role, lambda parameter: getattr(parameter, "main_grad", None))  # buffers have none


def optimizer_state(role: Any) -> dict[str, Tensor]:
    """`<moment> <hub name>` to Adam's moments and the float32 weights (`param`), on the CPU."""
    found = {}
    for adam in getattr(role.optimizer, "chained_optimizers", [role.optimizer]):
        for moment in ("param", "exp_avg", "exp_avg_sq"):
            states = {
                id(parameter): adam._get_main_param_and_optimizer_states(parameter)[moment]
                for buffer in adam.buffers
                for parameter in buffer.params
            }
            named = _by_hub_name(role, lambda parameter, states=states: states.get(id(parameter)))
            found |= {f"{moment} {name}": tensor for name, tensor in named.items()}
    return found


def _by_hub_name(role: Any, tensor_of: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """What belongs to each parameter of a role on one rank, as float32 tensors named and shaped as Hugging Face's."""
    from megarl.megatron.global_names import global_tensors

    found = {}
    for name, parameter in global_tensors(role.chunks):
        tensor, rule = tensor_of(parameter), role.weight_map.rule_for(name)
        if tensor is not None and not rule.tied_copy:
            whole = tensor.detach().float().cpu().view(parameter.shape)
            found |= {hub_name: part.clone() for hub_name, part in hf_from_shards(rule, [whole])}
    return found


def root_mean_square(tensor: Tensor) -> float:
    """Over all elements."""
    return float(tensor.double().square().mean().sqrt())
