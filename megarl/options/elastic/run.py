"""Slow ranks of a run: after each step every rank says its seconds of own work; one that stays behind its peers is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megarl.config import AnyConfig
from megarl.errors import DeadlineError, WorkerError
from megarl.observe import MetricsFile
from megarl.observe.run_state import SlowRank
from megarl.options.elastic.busy_time import PHASES, seconds_of_a_token
from megarl.options.elastic.section import slow_share_of
from megarl.options.elastic.slow_ranks import STEPS, RoleWatch, Slowness, peers_of
from megarl.runs.observers import RunObserver, RunStart
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.runs.training_side import TrainingSide

ROLES = ("policy", "critic")
"""Groups whose own role is watched; what else lives in their processes has the same ranks."""


class SlowRanks(RunObserver):
    """Names slow ranks in a line, in `slow_ranks.jsonl`, in two metrics, and to who watches."""

    def __init__(self, folder: Path, threshold: float) -> None:
        self._path, self._threshold = folder / "slow_ranks.jsonl", threshold
        self._watches: dict[str, RoleWatch] = {}
        self._lines: list[str] = []
        self._file: MetricsFile | None = None
        self._resume_after: int | None = None

    def started(self, start: RunStart) -> None:
        """Have who watches ask here; lines of steps that will be done again go."""
        self._resume_after = start.resume_after_step
        start.state.slow_ranks = self._named
        if self._path.exists():
            self._file = MetricsFile(self._path, resume_after_step=self._resume_after)

    def recorded(self, step: int, roles: TrainingSide) -> Mapping[str, float]:
        """Ask the ranks that have peers; `slow_ranks/number` and `slow_ranks/most_behind` where there are some."""
        from megarl.workers.group import WorkerGroup

        for role in ROLES:
            group = roles.groups.get(role)
            if not isinstance(group, WorkerGroup) or not peers_of(group.layout):
                continue
            try:
                seconds = np.array(roles.ask(role, seconds_of_a_token))
            except (WorkerError, DeadlineError):
                continue  # the next call finds out, where a lost rank can be replaced
            watch = self._watches.setdefault(role, RoleWatch(PHASES, self._threshold))
            for change in watch.take(group.layout, group.host_and_pid, seconds):
                self._tell(step, role, change)
        if not self._watches:
            return {}
        number = len({(role, rank) for role, watch in self._watches.items() for rank, _ in watch.named})
        most = max(watch.most_behind() for watch in self._watches.values())
        return {"slow_ranks/number": number, "slow_ranks/most_behind": most}

    def _tell(self, step: int, role: str, change: Slowness) -> None:
        node, process = change.process
        who = f"rank {change.rank} of {role} (process {process} on {node})"
        if change.is_slow:
            peers = "its peer" if change.peers == 1 else f"the median of its {change.peers} peers"
            how = f"a token of {change.phase} takes it {change.behind:.0%} longer than {peers}, over {STEPS} steps"
            self._lines.append(f"warning: {who} is slow: {how}, without what it waits for others")
        else:
            self._lines.append(f"{who} is not slow in {change.phase} any more, or was replaced")
        if self._file is None:
            self._file = MetricsFile(self._path, resume_after_step=self._resume_after)
        row = {"role": role, "rank": change.rank, "node": node, "process": process, "phase": change.phase}
        self._file.log(step, {**row, "behind": change.behind, "state": "slow" if change.is_slow else "well"})

    def _named(self) -> list[SlowRank]:
        found = [(role, slow) for role, watch in [*self._watches.items()] for slow in [*watch.named.values()]]
        return [SlowRank(role, slow.rank, slow.process[0], slow.phase, slow.behind) for role, slow in found]

    def take_lines(self) -> list[str]:
        """Ranks that were found slow, and those that are no longer."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def observe(config: AnyConfig, checkpoints: CheckpointFolder) -> SlowRanks | None:
    """The observer of slow ranks; None where no rank has peers, or nobody wants to know."""
    threshold = slow_share_of(config.resources)
    if threshold is None or not any(map(peers_of, config.layouts.values())):
        return None
    return SlowRanks(Path(config.run_folder), threshold)
