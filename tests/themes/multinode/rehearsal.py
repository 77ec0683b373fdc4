"""A small run on a Ray that is there, as `megarl rehearse` makes it: `python rehearsal.py CONFIG FOLDER RAY_ADDRESS`."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.config import load_config
from megarl.launch.rehearse import small_run
from megarl.trainers.rl.loop import train

if __name__ == "__main__":
    config, folder, address = sys.argv[1:]
    train(small_run(load_config(config), Path(folder), address))
