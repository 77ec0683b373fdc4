"""The tiny models of tests/families with a layer for multi-token prediction, and what it computes, from transformers' parts.

transformers drops these layers, so its own decoder layer, norms and embedding are put together here as the models' papers and
serving engines do: the layer sees norm(embedding of the next token) and norm(what the decoder gives behind its final norm).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.stream import Unit
from megarl.models.hf_folder import write_hf_folder
from tests.families import VARIANTS, by_hub_name, hub_tensors, hugging_face
from tests.families.family import SPREAD

FIELDS = {"num_nextn_predict_layers": 1}
OWN_FIELDS = {"mtp_num_hidden_layers": 1}
PREDICTING = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5")
DRAFTED = ("llama", "qwen2-full", "qwen3")
"""Families without a layer of their own, which may be given one (`megarl convert add-draft`)."""
VARIANTS_PREDICTING = (*PREDICTING, "glm4_moe-grouped", "deepseek_v3-plain", "qwen3_next-plain", "qwen3_5_moe")


class Prediction(torch.nn.Module):
    """The layer behind `model`, a `...ForCausalLM` of transformers, whose embedding and output layer it uses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * len(config.layer_types)
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
        decoder = model.model
        width, norm = config.hidden_size, lambda: type(decoder.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layer = type(decoder.layers[0])(config, 2)
        self.zero_centred = VARIANTS_LINEAR[type(model).__name__]

    def forward(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """`ids` `[n]` → what the decoder gives for the first n - 1, detached, and the layer for them, `[n - 1, H]` each."""
        decoder = model.model
        with torch.no_grad():
            hidden = decoder(ids[None]).last_hidden_state[:, :-1]
            embedded = decoder.embed_tokens(ids[None, 1:])
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        length = joined.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(joined.dtype).min, dtype=joined.dtype).triu(1)[None, None]
        angles = decoder.rotary_emb(joined, positions)
        found = self.layer(joined, attention_mask=mask, position_embeddings=angles, position_ids=positions)
        found = found[0] if isinstance(found, tuple) else found
        return hidden[0], self.norm(found)[0]


VARIANTS_LINEAR = {f"{family.class_prefix}ForCausalLM": family.linear for family in VARIANTS.values()}
"""By class whether norms' weights are stored less one."""


def with_prediction(family: str) -> tuple[Any, Prediction]:
    """The model of `family`, and a layer behind it with seeded random values everywhere."""
    model = hugging_face(family)
    layer = Prediction(model).to(next(model.parameters()).dtype).eval()
    generator = torch.Generator().manual_seed(11)
    biases = {name: buffer for name, buffer in layer.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, value in (dict(layer.named_parameters()) | biases).items():
            centre = 1.0 if "norm" in name and not layer.zero_centred else 0.0
            spread = SPREAD / 5 if name in biases else SPREAD
            value.copy_(centre + spread * torch.randn(value.shape, generator=generator))
    return model, layer


def layer_tensors(model: Any, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of a `Prediction` (values or gradients) as a hub checkpoint names them."""
    linear = VARIANTS_LINEAR[type(model).__name__]
    behind = f"model.layers.{model.config.num_hidden_layers}."
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm", "layer": ""}
    if linear:
        own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
        own["layer"], behind = "layers.0", "mtp."
    renamed = []
    for name, tensor in named:
        module, _, rest = name.partition(".")
        renamed.append((behind + ".".join(part for part in (own[module], rest) if part), tensor))
    return by_hub_name(model, iter(renamed))


def layer_gradients(model: Any, layer: Prediction) -> dict[str, Tensor]:
    """Gradients of every parameter of the layer after a backward pass, by hub name."""
    found = ((name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in layer.named_parameters())
    return layer_tensors(model, found)


def all_tensors(family: str) -> dict[str, Tensor]:
    """What the safetensors file of the model with its layer holds: DeepSeek and GLM store embedding and output layer again."""
    model, layer = with_prediction(family)
    found = hub_tensors(model)
    copies = {}
    if not VARIANTS[family].linear:
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        embedding = found["model.embed_tokens.weight"]
        copies = {"embed_tokens": embedding, "shared_head.head": found.get("lm_head.weight", embedding)}
        copies = {f"{prefix}{name}.weight": tensor.clone() for name, tensor in copies.items()}
    return found | layer_tensors(model, layer.state_dict().items()) | copies


def config_of(family: str) -> dict[str, Any]:
    """Its `config.json`."""
    model = hugging_face(family)
    fields = OWN_FIELDS if VARIANTS[family].linear else FIELDS
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"} | fields
    return config


def build_predicting(family: str, path: Path) -> None:
    """Write the model with its layer to the new folder `path`."""
    write_hf_folder(path, all_tensors(family).items(), config_of(family))


def predicted(
    model: Any, layer: Prediction, units: Iterable[Unit], temperature: float
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By response, float64 log-probs `[n, V]` of the policy and of the layer at each sampled token, and these tokens.

    A token's place 0 behind a prompt of one token has no prediction: the layer needs two tokens before it.
    """
    head = model.lm_head.weight.double()
    found = {}
    for unit in units:
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            places = len(unit.prompt_ids) + response.mask.nonzero().flatten()
            places = places[places >= 2]
            hidden, drafted = layer(model, ids)
            policy = (hidden[places - 1].double() @ head.detach().T / temperature).log_softmax(-1)
            own = (drafted[places - 2].double() @ head.detach().T / temperature).log_softmax(-1)
            found[response.index] = (policy, own, ids[places])
    return found
