"""A small run on a Ray that is there, as `megarl rehearse` makes it: `rehearsal.py CONFIG FOLDER RAY_ADDRESS STEPS REWARD`."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.config import AnyConfig, Config, load_config
from megarl.launch.small_run import small_run
from megarl.trainers.rl.train import train


def changed(small: AnyConfig, steps: int, reward: str) -> Config:
    """The same run with so many steps and, if it is named, another reward."""
    assert isinstance(small, Config)
    rewards = (small.rewards[0].model_copy(update={"name": reward}),) if reward else small.rewards
    return small.model_copy(update={"run": small.run.model_copy(update={"steps": steps}), "rewards": rewards})


if __name__ == "__main__":
    config, folder, address, steps, reward = sys.argv[1:]
    train(changed(small_run(load_config(config), Path(folder), address), int(steps), reward))
