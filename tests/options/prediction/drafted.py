"""Tiny models with few tokens for speculative decoding, and the exact distribution of their responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.transformers_names import hub_tensors
from megarl.options.prediction.column import DraftCounts
from megarl.options.prediction.embedded_drafts import MtpLayer
from megarl.rollout.engines.protocol import Generation, SamplingParams

END = 0
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": END,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
WINDOW_THEN_ALL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 4}),
    "gemma3": ("Gemma3", WINDOW_THEN_ALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "rope_parameters": ROPES}),
    "olmo3": ("Olmo3", WINDOW_THEN_ALL | {"rope_parameters": ROPES}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "head_dim": 8}),
    "glm4_moe": ("Glm4Moe", EXPERTS | {"head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", EXPERTS | LATENT | {"rope_scaling": None}),
    "qwen3_next": ("Qwen3Next", {"num_experts": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
}


def write_model(folder: Path, kind: str, vocab_size: int, seed: int = 1, spread: float = 0.3) -> Path:
    """Write a model of `MODELS` with random weights to a new folder, with its prediction layer if it has one."""
    class_prefix, settings = MODELS[kind]
    of_text = "Text" if class_prefix == "Gemma3" else ""
    config = getattr(transformers, f"{class_prefix}{of_text}Config")(**SIZES | settings | {"vocab_size": vocab_size})
    model = getattr(transformers, f"{class_prefix}ForCausalLM")(config).float().eval()
    tensors = dict(hub_tensors(model))
    if settings.get("num_nextn_predict_layers"):
        tensors |= hub_tensors(MtpLayer(model).named)
    generator = torch.Generator().manual_seed(seed)
    for name, value in tensors.items():
        value.detach().copy_((1.0 if "norm" in name else 0.0) + spread * torch.randn(value.shape, generator=generator))
    plain = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    write_hf_folder(folder, tensors.items(), plain)
    return folder


def load(folder: Path) -> Any:
    """The policy as transformers has it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def limited(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities by which a token is to be drawn from `logits` [V], written out in float64."""
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs = (logits.double() / params.temperature).softmax(-1)
    kept = torch.ones_like(probs, dtype=torch.bool)
    order = probs.argsort(descending=True).tolist()
    for place, token in enumerate(order):
        if params.top_k and place >= params.top_k:
            kept[token] = False
        if sum(float(probs[one]) for one in order[:place]) >= params.top_p:
            kept[token] = False
        if probs[token] < params.min_p * probs[order[0]]:
            kept[token] = False
    return torch.where(kept, probs, 0.0) / probs[kept].sum()


@torch.no_grad()
def exact_distribution(model: Any, prompt: Sequence[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each possible response, by whole passes without a cache."""
    found: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    while open_ones:
        ids = torch.tensor([[*prompt, *response] for response in open_ones])
        longer: dict[tuple[int, ...], float] = {}
        for (response, probability), logits in zip(open_ones.items(), model(ids).logits[:, -1], strict=True):
            for token, share in enumerate(limited(logits, params).tolist()):
                one = (*response, token)
                has_ended = token == END or len(one) == params.max_new_tokens
                if share:
                    (found if has_ended else longer)[one] = probability * share
        open_ones = longer
    return found


def p_value(drawn: Sequence[Generation], exact: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test that responses are drawn from `exact`; those expected less than five times are one cell.

    0 if one was drawn that cannot be.
    """
    counts = Counter(tuple(one.response_ids) for one in drawn)
    if counts.keys() - exact.keys():
        return 0.0
    cells = list(_cells(counts, exact, len(drawn)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half_degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def _cells(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float], total: int) -> Iterator[tuple[float, float]]:
    rare_seen = rare_expected = 0.0
    for response, probability in exact.items():
        expected = total * probability
        if expected >= 5:
            yield counts[response], expected
        else:
            rare_seen, rare_expected = rare_seen + counts[response], rare_expected + expected
    if rare_expected:
        yield rare_seen, rare_expected


@torch.no_grad()
def predicted(folder: Path, prompt: Sequence[int], new_tokens: int, steps: int) -> tuple[list[int], DraftCounts]:
    """A greedy response and what drafting it with the folder's prediction layer does, by whole passes without a cache.

    The layer is transformers' own, as the only one of a model: it is fed eh_proj(enorm(e(t + 1)), hnorm(h(t))), where h are the
    policy's states behind its last norm, and then the layer's own (DeepSeek-V3, equations 21 to 23).
    """
    policy, stored = load(folder), HFFolder(folder)
    number = policy.config.num_hidden_layers
    weights = {name: stored.get_slice(name)[:] for name in stored.names}
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": None, "layer_types": None}
    config = type(policy.config)(
        **{name: value for name, value in policy.config.to_dict().items() if name not in sizes}
        | {name: value for name, value in sizes.items() if value is not None}
    )
    alone = type(policy)(config).float().eval()
    for name, value in hub_tensors(alone).items():
        own = name.replace("model.layers.0.", f"model.layers.{number}.")
        own = f"model.layers.{number}.shared_head.norm.weight" if name == "model.norm.weight" else own
        value.copy_(weights[own])

    def extra(name: str) -> Tensor:
        return weights[f"model.layers.{number}.{name}.weight"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + policy.config.rms_norm_eps).rsqrt()

    def draft(ids: list[int], known: int) -> list[int]:
        """Behind `ids`, of which the policy has computed all but the last."""
        states = list(policy.model(torch.tensor([ids[:-1]])).last_hidden_state[0])
        following, found = list(ids[1:]), []
        for _ in range(known):
            embedded = norm(policy.model.embed_tokens(torch.tensor(following)), extra("enorm"))
            fed = torch.cat([embedded, norm(torch.stack(states), extra("hnorm"))], -1) @ extra("eh_proj").T
            state = alone.model(inputs_embeds=fed[None]).last_hidden_state[0, -1]
            found.append(int(policy.lm_head(state).argmax()))
            following, states = [*following, found[-1]], [*states, state]
        return found

    def greedy(ids: list[int]) -> int:
        return int(policy(torch.tensor([ids])).logits[0, -1].argmax())

    response, counts = [greedy(list(prompt))], DraftCounts()
    while len(response) < new_tokens:
        ids = [*prompt, *response]
        proposed = draft(ids, min(steps, new_tokens - len(response) - 1))
        accepted = 0
        while accepted < len(proposed) and greedy(ids + proposed[:accepted]) == proposed[accepted]:
            accepted += 1
        response += [*proposed[:accepted], greedy(ids + proposed[:accepted])]
        counts += DraftCounts(1, len(proposed), accepted)
    return response, counts
