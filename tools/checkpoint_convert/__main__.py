"""`python tools/checkpoint_convert ACTION …` is `megarl convert ACTION …`, for machines where only this checkout is at hand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
