"""The architectures, and finding that of a Hugging Face model folder.

A new one is a file beside this and an entry in `_FAMILIES`, or a file of the user's own that `model.architecture` names.
Options bring theirs in the file `families.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.errors import ModelError, nearest
from megarl.models import (
    afmoe,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    gemma2,
    gemma3_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    llama,
    llama4_text,
    mimo_v2_flash,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    solar_open,
    step3p5,
)
from megarl.models.architecture import Architecture
from megarl.option_list import OPTIONS, parts
from megarl.system.user_code import absolute_name, load_user_object

_FAMILIES = (
    llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3, glm4_moe, glm4, olmo2, olmo3, gemma3_text, phi3, smollm3,
    seed_oss, granite, gpt_oss, minimax_m2, ernie4_5, ernie4_5_moe, hunyuan_v1_dense, hunyuan_v1_moe, solar_open, afmoe,
    ministral3, exaone4, exaone_moe, gemma2, glm4_moe_lite, mistral4, llama4_text, step3p5, mimo_v2_flash,
)  # fmt: skip
ARCHITECTURES: tuple[Architecture, ...] = (
    *(family.ARCHITECTURE for family in _FAMILIES),
    *(architecture for module in parts("families") for architecture in module.ARCHITECTURES),
)

_TOWER = (
    "megarl does not train this family's vision tower, and its folders hold the text model under other names; save its text "
    "model as a folder of its own (docs/vision.md, 'Train the text model alone')"
)
REFUSED = {
    "llama4": _TOWER,
    "qwen3_5": _TOWER,
    "qwen3_5_moe": _TOWER,
    "gemma3": _TOWER,
    "mistral3": _TOWER,
    "qwen3_omni_moe": "megarl trains its thinker alone; save that as a folder of its own (docs/audio.md, 'Models')",
    "step3p7": _TOWER,
    "gemma4": _TOWER,
}
"""By `model_type`, why a family that users ask for is not there."""
OPTION_OF_FAMILY = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention"),
    **dict.fromkeys(("kimi_linear", "olmo_hybrid"), "linear_attention"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "sparse_attention"),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h"), "state_spaces"),
    "deepseek_v4": "compressed_attention",
    "gemma4_text": "gemma4",
    "longcat_flash": "shortcut_experts",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "kimi_k25"), "pictures"),
    "qwen3_omni_moe_thinker": "pictures",
}
"""The option that brings a family, also where an installation lacks it: for the sentence that says so."""
REFUSED |= {
    family: f"it needs the option {option}, which this installation does not have"
    for family, option in OPTION_OF_FAMILY.items()
    if option not in OPTIONS
}


CLASSIFIER = "ForSequenceClassification"
"""Ending of names of classes with a scalar head in place of the vocabulary."""

_users_own: dict[str, Architecture] = {}
"""By import path, what `use_architecture` has added in this process."""


def use_architecture(path: str | None) -> None:
    """Know, from here on in this process, the user's own architecture at an import path; None: nothing to add.

    Raises:
        ModelError: it cannot be imported, is no `Architecture`, or has the name or a class of one that is known.
    """
    if path is None or absolute_name(path) in _users_own:
        return
    added = load_user_object(path, _named_by_field, "architecture", lambda found: isinstance(found, Architecture))
    for known in architectures():
        if taken := {added.name, *added.other_types, *added.hf_classes} & {known.name, *known.other_types, *known.hf_classes}:
            raise ModelError(f"model.architecture is '{path}', which says '{min(taken)}', as '{known.name}' does already")
    _users_own[absolute_name(path)] = added


def _named_by_field(sentence: str) -> ModelError:
    return ModelError(f"model.architecture: {sentence}")


def architectures() -> tuple[Architecture, ...]:
    """The families that megarl has, and the user's own."""
    return (*ARCHITECTURES, *_users_own.values())


def architecture_for(hf_config: dict[str, Any]) -> Architecture:
    """The architecture of a config, by `architectures[0]`, or by `model_type` where that is absent.

    Raises:
        ModelError: it is unknown, or of another `model_type`; the message lists the known ones.
    """
    names = hf_config.get("architectures")
    if names is not None and not isinstance(names, list):
        raise ModelError(f"config.json: architectures is {names!r:.80}; it must be a list of names of classes")
    field, name = ("architectures", str(names[0])) if names else ("model_type", str(hf_config.get("model_type")))
    by_type = {name: family for family in architectures() for name in (family.name, *family.other_types)}
    known = {hf_class: family for family in by_type.values() for hf_class in family.hf_classes} if names else by_type
    if name not in known and (why := REFUSED.get(str(hf_config.get("model_type")))):
        raise ModelError(f"config.json: {field} is '{name}', which is not supported: {why}")
    if name not in known:
        new = str(hf_config.get("model_type")) not in by_type
        hint = "; a family of your own goes into a file that model.architecture names (docs/add_a_model.md)" if new else ""
        raise ModelError(f"config.json: {field} is '{name}'; it must be one of {', '.join(known)}{nearest(name, known)}{hint}")
    matched, model_type = known[name], hf_config.get("model_type")
    allowed = (matched.name, *matched.other_types)
    if model_type is not None and model_type not in allowed:
        listed = " or ".join(f"'{allowed_type}'" for allowed_type in allowed)
        raise ModelError(f"config.json: model_type is '{model_type}', but that of the architecture '{name}' is {listed}")
    return matched


def sequence_classifier(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with a scalar head in place of its vocabulary, as critics and reward models have."""
    names = [_classifier_of(name) for name in hf_config.get("architectures") or ()]
    return {**hf_config, "architectures": names, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}


def _classifier_of(name: str) -> str:
    """The class with a scalar head of the family of a class; of an unknown one the class that would be called so."""
    family = next((family for family in architectures() if name in family.hf_classes), None)
    named = [] if family is None else [hf_class for hf_class in family.hf_classes if hf_class.endswith(CLASSIFIER)]
    return named[0] if named else name.replace("ForCausalLM", CLASSIFIER).replace("ForConditionalGeneration", CLASSIFIER)


def sees(folder: str | Path) -> bool:
    """Return whether the model in `folder` takes pictures, by its config.json; False where there is none."""
    return (Path(folder) / "config.json").is_file() and "vision_config" in load_hf_config(folder)


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """The dict of `config.json` in a Hugging Face model folder.

    Raises:
        ModelError: the folder or the file is missing, or it is no JSON object.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder '{path}' does not exist; it must be a local Hugging Face model folder")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model folder '{path}' has no config.json, so it is no Hugging Face model folder") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"'{file}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"'{file}' holds a JSON {type(config).__name__}; it must be an object")
    return config
