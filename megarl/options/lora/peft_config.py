"""`adapter_config.json` of a PEFT folder: read into what megarl knows of adapters, and written.

Source: `peft.LoraConfig` of peft 0.21.2. No torch, no peft.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ModelError
from megarl.options.lora.weight_map import Lora

CONFIG_FILE = "adapter_config.json"

_OFF = {
    "use_dora": "scales the rows of each weight anew",
    "lora_bias": "adds a bias to each adapter",
    "fan_in_fan_out": "is for weights stored transposed",
    "use_qalora": "pools the adapters' inputs",
    "use_bdlora": "makes adapters of diagonal blocks",
    "alora_invocation_tokens": "turns adapters on in the middle of a text",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "trains rows of the embedding",
    "rank_pattern": "gives some layers another rank",
    "alpha_pattern": "gives some layers another scale",
    "arrow_config": "routes between adapters",
    "kasa_config": "computes otherwise than W + scale·B·A",
    "monteclora_config": "computes otherwise than W + scale·B·A",
}
"""Fields of LoraConfig that must be false, null or empty, and what each does otherwise."""
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Initial values under which PEFT leaves the weights of the model as they are."""
_SAVED = ("score", "classifier")
"""Modules that PEFT stores whole beside adapters of a classifier; those that the model lacks have no tensors."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The dict of `adapter_config.json`.

    Raises:
        ModelError: the folder or the file is missing, it is no JSON object, or it asks for more than plain LoRA.
    """
    file = Path(folder) / CONFIG_FILE
    if not Path(folder).is_dir():
        raise ModelError(f"adapter folder '{folder}' does not exist; it must be a local PEFT folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"adapter folder '{folder}' has no {CONFIG_FILE}, so it is no PEFT folder") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"'{file}' is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"'{file}' holds a JSON {type(config).__name__}; it must be an object")
    _check(file, config)
    return config


def _check(file: Path, config: Mapping[str, Any]) -> None:
    def refused(field: str, reason: str, allowed: str) -> ModelError:
        return ModelError.of(f"{field} in '{file}'", config.get(field), reason, allowed=allowed)

    if config.get("peft_type") != "LORA":
        raise refused("peft_type", "", "'LORA'")
    for field, what in _OFF.items():
        if config.get(field):
            raise refused(field, what, "false, null or empty")
    if config.get("bias", "none") != "none":
        raise refused("bias", "trains biases of the model", "'none'")
    if not set(config.get("modules_to_save") or ()) <= set(_SAVED):
        raise refused("modules_to_save", "stores modules of the model whole", "null or ['score']")
    if config.get("init_lora_weights", True) not in _INITIAL:
        reason = "has changed the weights of the model that the adapters are for"
        allowed = f"{', '.join(str(value).lower() for value in _INITIAL)}; let PEFT convert the adapters to plain LoRA"
        raise refused("init_lora_weights", reason, allowed)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refused("r", "", "a positive integer")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise refused("lora_alpha", "", "a positive number")


def plain_lora(config: Mapping[str, Any], layers: Iterable[str]) -> Lora:
    """Rank and scale of a config that `read_config` gave, with the adapters of `layers`."""
    rslora = bool(config.get("use_rslora"))
    return Lora(rank=config["r"], alpha=float(config["lora_alpha"]), rslora=rslora, targets=tuple(layers))


def config_of(lora: Lora, base: str, target_modules: Iterable[str], *, score: bool) -> dict[str, Any]:
    """What `adapter_config.json` says of adapters of the model at `base`; `score`: a classifier's head is stored with them."""
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if score else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": ["score"] if score else None,
        "target_modules": sorted(target_modules),
    }
