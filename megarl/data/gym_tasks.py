"""reasoning_gym, imported without what its own imports would print: cellpylib's SyntaxWarnings, at every start where no
compiled file of it can be kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def gym_tasks() -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """reasoning_gym's `create_dataset`, and its tasks by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    return create_dataset, DATASETS
