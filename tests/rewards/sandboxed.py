"""The sandbox's own modules as its children have them: run by path."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from megarl.rewards.sandbox import judge_pool

SANDBOX = Path(judge_pool.__file__).parent


def in_child(text: str, timeout_s: float = 60) -> str:
    """What `text` prints, run with the sandbox's folder as the path of its imports."""
    program = f"import sys; sys.path.insert(0, {str(SANDBOX)!r})\n{text}"
    return subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True, timeout=timeout_s).stdout


@lru_cache
def landlock_version() -> int:
    """The version of Landlock that this kernel has; 0: none."""
    return int(in_child("import confinement; print(confinement.landlock_version())"))
