"""Which architecture a Hugging Face model folder is of. A new one is a file beside this and an entry in `ARCHITECTURES`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.errors import ModelError, nearest
from megarl.models import deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megarl.models.architecture import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (
    llama.ARCHITECTURE,
    mistral.ARCHITECTURE,
    qwen2.ARCHITECTURE,
    qwen3.ARCHITECTURE,
    mixtral.ARCHITECTURE,
    qwen3_moe.ARCHITECTURE,
    deepseek_v3.ARCHITECTURE,
)


def architecture_for(hf_config: dict[str, Any]) -> Architecture:
    """The architecture of a config, by `architectures[0]`, or by `model_type` where that is absent.

    Raises:
        ModelError: it is unknown, or of another `model_type`; the message lists the known ones and the file to add.
    """
    names = hf_config.get("architectures")
    field, name = ("architectures", str(names[0])) if names else ("model_type", str(hf_config.get("model_type")))
    known = {hf_class: a for a in ARCHITECTURES for hf_class in a.hf_classes} if names else {a.name: a for a in ARCHITECTURES}
    if name not in known:
        new = hf_config.get("model_type") if hf_config.get("model_type") not in {a.name for a in ARCHITECTURES} else None
        hint = f"; a new one is a file megarl/models/{new}.py and its entry in megarl/models/registry.py" if new else ""
        raise ModelError(
            f"config.json: {field} is '{name}', but it may be one of {', '.join(known)}{nearest(name, known)}{hint}"
        )
    found, model_type = known[name], hf_config.get("model_type")
    if model_type is not None and model_type != found.name:
        raise ModelError(f"config.json: model_type is '{model_type}', but that of the architecture '{name}' is '{found.name}'")
    return found


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
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(f"'{file}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"'{file}' holds a JSON {type(config).__name__}, but it must be an object")
    return config
