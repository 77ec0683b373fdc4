"""What one rank finds out about megatron-core's model of a folder; runs in the tests' world of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit
from megarl.models.registry import load_hf_config
from megarl.models.weight_map import WeightMap

TEMPERATURE = 0.7
PROMPTS = ([5, 130, 0, 77, 12, 41], [90, 3, 3, 118, 60, 7, 22, 125, 9])


def megatron_names(
    weight_map: WeightMap,
    layer_indices: Iterable[int],
    pre_process: bool,
    post_process: bool,
    *,
    experts: Iterable[int] | None = None,
    te_names: bool = False,
) -> list[str]:
    """Every parameter of a pipeline stage holding these layers, these experts of each (all by default), the embedding
    (`pre_process`) and the output (`post_process`). `te_names` gives the Transformer Engine spec's spelling.
    """
    layers, experts = list(layer_indices), list(range(weight_map.num_experts) if experts is None else experts)
    names = []
    for rule in weight_map.rules:
        name = rule.spellings()[-1 if te_names else 0]
        if rule.stage == "layer":
            for layer in filter(rule.has_layer, layers):
                names += [name.format(layer=layer, expert=expert) for expert in (experts if rule.is_expert else (None,))]
        elif pre_process if rule.stage == "first" else post_process and not (rule.tied_copy and pre_process):
            names.append(name)
    return names


def units() -> list[Unit]:
    """Two prompts with three responses each, longer ones beyond the positions where Llama 3's scaling and YaRN begin."""
    generator = torch.Generator().manual_seed(3)
    found, index = [], 0
    for prompt in PROMPTS:
        responses = []
        for length in (7, 24, 12):
            tokens = torch.randint(0, 131, (length,), generator=generator)
            weights = torch.randn(length, generator=generator) / 20
            responses.append(Response(index, tokens, torch.rand(length, generator=generator) < 0.8, {"weights": weights}))
            index += 1
        found.append(Unit(torch.tensor(prompt), responses))
    return found


def objective(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """Log-probs and entropy both matter, each token with a weight of its own."""
    return -(stream.columns["weights"] * (output[:, 0] + 0.3 * output[:, 1])).sum(), {}


def facts(rank: int, world_size: int, folders: list[str], layer_spec: str) -> dict[str, dict[str, Any]]:
    """By folder: `shapes` of parameters and buffers, `logits` of the first unit's responses, `gradients` by hub name,
    `exported` tensors, and those `after` an optimizer step.
    """
    from megarl.megatron.build import initialize_layout

    initialize_layout(Layout(), seed=1)
    return {folder: _facts(folder, layer_spec) for folder in folders}


def _facts(folder: str, layer_spec: str) -> dict[str, Any]:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config

    from megarl.megatron.global_names import global_tensors
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    options = ModelOptions(folder, Layout(), layer_spec=layer_spec, temperature=TEMPERATURE, logit_chunk_tokens=5)
    role = RankModel(options, OptimizerOptions(lr=1e-2))
    core = role.chunks[0].module
    found: dict[str, Any] = {
        "shapes": {name: list(tensor.shape) for name, tensor in global_tensors(role.chunks)},
        "state": [name for name, value in core.state_dict().items() if torch.is_tensor(value)],
        "exported": {name: tensor.clone() for name, tensor in role.export()},
        "logits": _logits(role, core, load_hf_config(folder)),
    }
    if core.config.multi_latent_attention:
        attention = next(layer.self_attention for layer in core.decoder.layers if hasattr(layer.self_attention, "frequencies"))
        found["rotary"] = (attention.frequencies, attention.rotary_scale)
    else:
        rotary = core.rotary_pos_emb
        found["rotary"] = (rotary.rotary.inv_freq, _yarn_get_concentration_factor_from_config(core.config))
    role.update([units()], objective)
    found["after"] = {name: tensor.clone() for name, tensor in role.export()}
    for chunk in role.chunks:
        chunk.train()
    again = RankModel(options, OptimizerOptions(lr=1e-2))
    forward_backward(again.chunks, options, [units()], objective)
    with torch.no_grad():
        for parameter in again.chunks[0].parameters():
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    found["gradients"] = {name: tensor.clone() for name, tensor in again.export()}
    return found


def _logits(role: Any, core: Any, hf_config: dict[str, Any]) -> list[Tensor]:
    """`[L, V]` for each response of the first unit on its own: the decoder's output times the output matrix, divided or capped
    as the config says."""
    from megarl.data.stream import split_shared_prompts

    found = []
    hidden: list[Tensor] = []
    handle = core.decoder.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    weight = core.shared_embedding_or_output_weight() if core.share_embeddings_and_output_weights else core.output_layer.weight
    for unit in split_shared_prompts(units()[:1]):
        role.forward([[unit]])
        logits = hidden.pop()[:, 0] @ weight.T / hf_config.get("logits_scaling", 1.0)
        if cap := hf_config.get("final_logit_softcapping"):
            logits = (logits / cap).tanh() * cap
        found.append(logits[len(unit.prompt_ids) - 1 :].detach())
    handle.remove()
    return found


def embedded(rank: int, world_size: int, folder: str, ids: Tensor, dtype: str) -> Tensor:
    """`[L, H]`: what the decoder is given for these ids."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    [core] = RankModel(ModelOptions(folder, Layout(), trainable=False, dtype=dtype)).chunks
    return core.embedding(ids[None], torch.arange(len(ids))[None])[:, 0].detach()


def load_and_write(rank: int, world_size: int, folder: str, target: str, dtype: str = "float32") -> list[str]:
    """Write the role of `folder` to `target`; returns what was logged while loading it."""
    import logging

    from megarl.megatron.build import initialize_layout
    from megarl.megatron.hf_export import write_role
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megarl").addHandler(handler)
    try:
        write_role(RankModel(ModelOptions(folder, Layout(), trainable=False, dtype=dtype)), target)
    finally:
        logging.getLogger("megarl").removeHandler(handler)
    return messages
