"""Models that a user names by their ids on the Hugging Face hub, or by the run that made them, as folders of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import AnyConfig
from megarl.errors import ModelError
from megarl.system.hub import MODEL_FILES, NOT_OF_MODELS, HubRepo

Root = TypeVar("Root", bound=AnyConfig)
CHECKPOINTS = (".metadata", "state.json", "*/state.json", "checkpoints/*/state.json")
"""Files of a role's folder, a checkpoint, a folder of checkpoints, or a run."""


def models_here(config: Root, *, weights: bool = True) -> Root:
    """`config` with a local folder in place of each id and of each run; what is missing in the cache is downloaded.

    Args:
        config: where ids may be: the fields of `model_folders`, and `rollout.servers.model_path`.
        weights: download them too, not only what describes the model.

    Raises:
        ModelError: one sentence that names the field.
    """
    folders = dict(config.model_folders)
    served = config.sampling.servers.model_path if config.sampling is not None else None
    if served is not None:
        folders["rollout.servers.model_path"] = served
    for field, name in folders.items():
        folder = model_here(name, field, weights=weights)
        if folder != name:
            config = _replaced(config, _place(field), folder)
    return config


def model_here(name: str, field: str, *, weights: bool = True) -> str:
    """The local folder of the model called `name`, an id of the hub or a folder (see `model_in`). Raises as `models_here`."""
    repo = HubRepo.meant_by("model", name)
    if repo is None:
        return model_in(name, field)
    files = MODEL_FILES if weights else [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]
    return str(repo.download(files, NOT_OF_MODELS, error=ModelError, named=f"{field} is '{name}'"))


def model_in(folder: str, field: str) -> str:
    """`folder` itself, or the model that it exported if it is a run.

    Raises:
        ModelError: it is a run or a checkpoint without such a model.
    """
    path = Path(folder)
    if (path / "config.json").is_file():
        return folder
    model = path / "model"
    if (model / "config.json").is_file():
        return str(model)
    if (model / "adapter_config.json").is_file():
        raise ModelError(
            f"{field} is '{folder}', a run that exported adapters; "
            f"`megarl convert merge --base MODEL --adapter {model} --out FOLDER` makes a model of them"
        )
    if any(True for pattern in CHECKPOINTS for _ in path.glob(pattern)):
        raise ModelError(
            f"{field} is '{folder}', a run or checkpoint without an exported model; `megarl convert export {folder} FOLDER` "
            "writes one"
        )
    return folder


def _replaced(value: Any, place: list[str | int], new: str) -> Any:
    """A copy of a config section, or of a list of them, with `new` at `place` inside it."""
    if not place:
        return new
    first, *rest = place
    if isinstance(first, int):
        return (*value[:first], _replaced(value[first], rest, new), *value[first + 1 :])
    return value.model_copy(update={first: _replaced(getattr(value, first), rest, new)})


def _place(field: str) -> list[str | int]:
    """`teacher.named[0].path` as the names and numbers on the way there."""
    return [int(part) if part.isdigit() else part for part in re.findall(r"\w+", field)]
