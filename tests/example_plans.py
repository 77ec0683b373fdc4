"""The plans in examples/plans that this installation can read: all, unless an option was deleted."""

from __future__ import annotations

from pathlib import Path

from megarl.config import load_any
from megarl.config.option_sections import OPTION_OF_FIELD
from megarl.errors import ConfigError, ModelError
from megarl.models.registry import OPTION_OF_FAMILY, architecture_for, load_hf_config
from megarl.option_list import OPTIONS

ROOT = Path(__file__).parents[1]


def is_readable(plan: Path) -> bool:
    """Return whether no option is missing that the plan asks for."""
    try:
        for folder in load_any(plan).model_folders.values():
            architecture_for(load_hf_config(ROOT / folder))
    except (ConfigError, ModelError) as error:
        if "which this installation does not have" not in str(error):
            raise
        return False
    return True


IS_WHOLE = {*OPTION_OF_FIELD.values(), *OPTION_OF_FAMILY.values()} <= {*OPTIONS}
PLANS = [plan for plan in sorted(ROOT.glob("examples/plans/*.yaml")) if IS_WHOLE or is_readable(plan)]
