"""One tiny random Hugging Face model per architecture family, for every test that compares megatron-core with transformers.

`FAMILIES: dict[str, Family]` holds one entry per family, `VARIANTS` the same families with what only one process has to
prove. `build_folder(family, path)` writes config.json and model.safetensors (hub tensor names); `hugging_face(family)` is
the same model as a transformers module, `by_hub_name(model, ...)` renames its fused experts' tensors or gradients.

Each has 4 layers, hidden size 32, 4 heads, a vocabulary of 131 (odd: it needs padding) and no padding row; every parameter
and buffer is random (norms, biases, expert bias). tp up to 4, pp up to 4, ep up to 4 and etp up to 4 fit.
`ODD` has models for worlds of three ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.hf_folder import write_hf_folder
from megarl.option_list import OPTIONS
from tests.families import (
    compressed,
    kinds_of_layers,
    linear,
    mixtures,
    positions_and_caps,
    settings,
    shortcut,
    sparse,
    state_spaces,
)
from tests.families.family import SIZES, SPREAD, Family

_LISTS = (settings, linear, mixtures, positions_and_caps, sparse, state_spaces, compressed, kinds_of_layers, shortcut)
FAMILIES: dict[str, Family] = {name: family for listed in _LISTS for name, family in listed.FAMILIES.items()}
VARIANTS: dict[str, Family] = {name: family for listed in _LISTS for name, family in listed.VARIANTS.items()}
ODD: dict[str, Family] = {name: family for listed in _LISTS for name, family in listed.ODD.items()}
WIDE = settings.WIDE

ABSENT = {name for name, family in (VARIANTS | ODD).items() if family.comes_with not in (None, *OPTIONS)}
"""Families of an option that this installation does not have: a test that asks for the model of one is skipped."""
FAMILIES, VARIANTS, ODD = (
    {name: family for name, family in families.items() if name not in ABSENT} for families in (FAMILIES, VARIANTS, ODD)
)


UNDER_TRANSFORMER_ENGINE = [
    name
    for name, family in VARIANTS.items()
    if not family.class_prefix.startswith(("Olmo", "Exaone4")) and family.comes_with is None and not family.needs_reference
]
"""Families whose layers Transformer Engine can compute; linear attention needs kernels there that need a GPU, and attention to
chosen keys has no layers there."""


DRAWN = ("e_score_correction_bias", ".expert_bias", ".router_bias", ".layer_scalar")
"""Ends of names of buffers that are given random values as parameters are."""
CHOOSES = (*DRAWN, ".ffn.gate.bias", compressed.TABLE)
"""Ends of names of what is only added to choose experts, or is no parameter, and has no gradient."""


def hugging_face(family: str) -> Any:
    """The model of `family` (a key of VARIANTS, ODD or WIDE) in float32, for evaluation, with seeded random values."""
    import transformers

    if family in ABSENT:
        pytest.skip(f"{family} comes with an option that this installation does not have")
    entry = (VARIANTS | ODD | WIDE)[family]
    settings = (
        SIZES
        | {
            "pad_token_id": None,
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        }
        | entry.settings
    )
    config = getattr(transformers, entry.config_class)(**settings)
    model = entry.model_class(config).float().eval()
    for embedding in (module for module in model.modules() if isinstance(module, torch.nn.Embedding)):
        embedding.padding_idx = None  # which may not be null in every config
    generator = torch.Generator().manual_seed(7)
    values = dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name.endswith(DRAWN)}
    with torch.no_grad():
        for name, value in values.items():
            centre = 1.0 if "norm" in name and (not entry.norms_less_one or ".linear_attn." in name) else 0.0
            centre = -3.0 if name.endswith("A_log") else centre  # states that last, as models have them
            if entry.class_prefix == "Gemma4" and name.endswith(("scale", ".layer_scalar")):
                centre = 1.0
            elif entry.class_prefix == "Gemma4" and name.endswith(".q_norm.weight"):
                centre = value.numel() ** -0.5  # nothing else scales scores
            spread = SPREAD / 5 if name.endswith(CHOOSES) else SPREAD  # tokens must still matter
            spread = spread / 10 if entry.small is not None and entry.small in name else spread
            value.copy_(centre + spread * torch.randn(value.shape, generator=generator))
        if entry.comes_with == "compressed_attention":
            compressed.finish(model, generator)
    return model


def by_hub_name(model: Any, named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors named and shaped as the module's parameters (values or gradients), as a hub checkpoint has them.

    transformers fuses all experts of a layer into one parameter; on disk each expert has its own.
    """
    found: dict[str, Tensor] = {}
    mixtral, alternating = model.config.model_type in ("mixtral", "minimax_m2"), model.config.model_type == "gpt_oss"
    renamed = (pair for name, tensor in _apart(model, named) for pair in linear.on_the_hub(model.config, name, tensor))
    for name, tensor in renamed:
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        name = name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics.")  # ERNIE's
        name = name.replace(".gate.e_score", ".e_score") if model.config.model_type == "exaone_moe" else name
        name = kinds_of_layers.hub_name(model.config.model_type, state_spaces.hub_name(model.config.model_type, name))
        name = compressed.hub_name(name) if model.config.model_type == "deepseek_v4" else name
        prefix, fused, part = name.partition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        if alternating:
            stored, _, bias = part.partition("_proj")
            kind = "bias" if bias else "weight"
            for expert, matrix in enumerate(tensor):
                rows = matrix.T if kind == "weight" else matrix
                halves = {"gate_proj": rows[0::2], "up_proj": rows[1::2]} if stored == "gate_up" else {"down_proj": rows}
                found |= {f"{prefix}.experts.{expert}.{which}.{kind}": half for which, half in halves.items()}
            continue
        tensor = tensor.mT if model.config.model_type == "llama4_text" else tensor
        gate, up, down = (
            ("w1", "w3", "w2")
            if mixtral or model.config.model_type in ("kimi_linear", "deepseek_v4")
            else ("gate_proj", "up_proj", "down_proj")
        )
        for expert, rows in enumerate(tensor):
            alone = up if part == "up_proj" else down
            halves = dict(zip((gate, up), rows.chunk(2), strict=True)) if part == "gate_up_proj" else {alone: rows}
            found |= {f"{prefix}.experts.{expert}.{which}.weight": half for which, half in halves.items()}
    return found


def _apart(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with q, k, v and gate, up one by one, where transformers has a parameter for each of both sets."""
    for name, tensor in named:
        if name.endswith(".self_attn.qkv_proj.weight"):
            query = model.config.num_attention_heads * model.model.layers[0].self_attn.head_dim
            rows = (query, (len(tensor) - query) // 2, (len(tensor) - query) // 2)
            for which, part in zip("qkv", tensor.split(rows), strict=True):
                yield name.replace("qkv_proj", f"{which}_proj"), part
        elif name.endswith(".shared_mlp.input_linear.weight"):
            for which, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("input_linear", f"{which}_proj"), part
        elif name.endswith(".mlp.gate_up_proj.weight"):
            for which, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{which}_proj"), part
        else:
            yield name, tensor


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """What the model's safetensors file holds."""
    tied = model.config.tie_word_embeddings
    state = ((name, value) for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight"))
    return by_hub_name(model, state)


def hub_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of every parameter after a backward pass, by hub name; an expert no token reached has zeros."""
    gradients = (
        (name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters() if p.requires_grad
    )
    return by_hub_name(model, gradients)


def build_folder(family: str, path: Path) -> None:
    """Write the model of `family` (a key of VARIANTS, ODD or WIDE) to the new folder `path`."""
    model = hugging_face(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    config["model_type"] = (VARIANTS | ODD | WIDE)[family].model_type or config["model_type"]
    write_hf_folder(path, hub_tensors(model).items(), config)
