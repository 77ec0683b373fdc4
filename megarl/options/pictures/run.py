"""Options by which a role's model finds the pictures of a run."""

from __future__ import annotations

from typing import Any

from megarl.config import AnyConfig


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: where the pictures of prompts are kept."""
    return {"media_folder": str(config.data.kept_in(config.run_folder))}
