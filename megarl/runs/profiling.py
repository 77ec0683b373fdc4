"""`profile`: the steps whose computations are recorded, as the driver sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.config.profile import ProfileConfig
from megarl.runs.training_side import TrainingSide


class Profiling:
    """Has ranks record the steps that `config` names; `<folder>/step_<step>/<group>-<rank>.*` are their files."""

    def __init__(self, config: ProfileConfig, folder: Path) -> None:
        self._config, self._folder = config, folder

    @contextmanager
    def of_step(self, step: int, roles: TrainingSide) -> Iterator[None]:
        """Around the work of a step. Nothing is written of a step that raises."""
        if step not in self._config.steps:
            yield
            return
        roles.start_profile(str(self._folder.resolve() / f"step_{step:06d}"), self._config.ranks)
        yield
        roles.stop_profile()
