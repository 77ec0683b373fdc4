"""The scripts of tools/supply, which are no package, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """Import `tools/supply/<name>.py`, which imports those beside it by their names."""
    folder = str(ROOT / "tools/supply")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
