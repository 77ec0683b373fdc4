"""`profile`: the steps whose computations are recorded, as the driver sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.config.profile import ProfileConfig
from megarl.trainers.run.roles import Roles
from megarl.workers.rank_calls import RankCalls


class Profiling:
    """Has ranks record the steps that `config` names; `<folder>/step_<step>/<group>-<rank>.*` are their files."""

    def __init__(self, config: ProfileConfig, folder: Path) -> None:
        self._config, self._folder = config, folder

    @contextmanager
    def of_step(self, step: int, roles: Roles) -> Iterator[None]:
        """Around the work of a step. Nothing is written of a step that raises."""
        if step not in self._config.steps:
            yield
            return
        limit_s = roles.config.resources.deadlines.step_s
        folder = self._folder.resolve() / f"step_{step:06d}"
        for name, group in roles.groups.items():
            ranks = range(group.layout.world_size)
            files = [(f"{folder}/{name}-{rank}" if rank in self._config.ranks else None,) for rank in ranks]
            group.wait(group.submit(RankCalls.start_profile, files), phase="profile", deadline_s=limit_s)
        yield
        for group in roles.groups.values():
            group.call(RankCalls.stop_profile, phase="profile", deadline_s=limit_s)
