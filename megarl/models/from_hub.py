"""Models that a config names by their ids on the Hugging Face hub, as folders of this machine."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from megarl.config import AnyConfig
from megarl.errors import ModelError
from megarl.system.hub import MODEL_FILES, NOT_OF_MODELS, HubRepo

Root = TypeVar("Root", bound=AnyConfig)


def models_here(config: Root, *, weights: bool = True) -> Root:
    """`config` with a local folder in place of each id; what is missing in the cache is downloaded.

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
    """The local folder of the model called `name`: `name` itself, unless it is an id of the hub. Raises as `models_here`."""
    repo = HubRepo.meant_by("model", name)
    if repo is None:
        return name
    files = MODEL_FILES if weights else [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]
    return str(repo.download(files, NOT_OF_MODELS, error=ModelError, named=f"{field} is '{name}'"))


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
