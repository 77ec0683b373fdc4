"""A run's folder as values: what was configured, measured, said and done, and what went wrong. Reads, never writes.

A run that is still going on, or that was killed, reads as far as it got. A folder is data from outside: what is damaged or
foreign in it is left out, and told in `damage`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.yaml_tree import read_yaml, tree_leaves
from megarl.errors import ConfigError, DataError, written_out
from megarl.observe.growing_file import RowFile
from megarl.observe.record_types import LINES, read_file
from megarl.observe.sample_file import SampleFile
from megarl.system.near_folders import nearest_folder

LONGEST_KEY = 200
IDENTITY = ("run.name", "run.seed", "run.folder", "run.resume")
"""Config fields in which repetitions of a run differ."""
ROWS = tuple(LINES)
"""Files of which a record has the rows."""


@dataclass(frozen=True)
class RunRecord:
    """One run. `metrics`, `distributions`, `experts`, `trace`, `samples`, `faults`, `reward_errors` and `slow_ranks` are rows
    of the files of these names."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    distributions: Sequence[Mapping[str, Any]]
    experts: Sequence[Mapping[str, Any]]
    trace: Sequence[Mapping[str, Any]]
    samples: SampleFile
    faults: Sequence[Mapping[str, Any]]
    reward_errors: Sequence[Mapping[str, Any]]
    slow_ranks: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    files: RunFiles
    """Files that the rows and samples were read from, to be read on."""
    profiles: Sequence[str]
    """Files of profiled steps, relative to the folder."""
    machine: Mapping[str, Any]
    """The machine and software: `machine`, `versions`, `commit`, `gpus`, `gpu`; of an older run those of its summary."""
    end: Mapping[str, Any]
    """End of a run that ended early: its `state`, `failed` or `interrupted`, and `why`."""
    nodes: int = 1
    """Machines that it had."""
    damage: Sequence[str] = ()
    """Sentences on files of the folder that are damaged, or lines of them."""

    def section(self, *names: str) -> Mapping[str, Any]:
        """The section of the config under `names`, one within the other; empty where it is none."""
        found: Any = self.config
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def fields(self) -> dict[str, Any]:
        """The config's leaves by dotted name."""
        return dict(tree_leaves(self.config))

    def curve(self, metric: str) -> dict[int, float]:
        """The values of `metric` by step."""
        return {row["step"]: value for row in self.metrics if (value := figure_of(row, metric)) is not None}

    @property
    def media_folder(self) -> Path:
        """The folder of its samples' pictures: `data.media_folder`, or `media` in the folder, wherever that is now."""
        configured = self.section("data").get("media_folder")
        return Path(configured) if isinstance(configured, str) and configured else self.folder / "media"

    @property
    def answer_key(self) -> str:
        """Key of the gold answer in a sample's row."""
        return str(self.section("data").get("answer_key") or "answer")[:LONGEST_KEY]

    @property
    def metric_names(self) -> list[str]:
        """Every metric that some step has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.metrics for name in row if name != "step"))


class EndRows(RowFile):
    """Only the first and the last of the rows."""

    def take(self, content: dict[str, Any], nbytes: int) -> None:
        super().take(content, nbytes)
        del self.rows[1:-1]


class RunFiles:
    """A run's files of JSON lines, of which what was read before is not read again."""

    def __init__(self, folder: Path, whole: Collection[str] = ROWS) -> None:
        """Keep the first and last row of the files of `ROWS` that are not `whole`; raises what `read_on` raises."""
        self.samples = SampleFile(folder / "samples.jsonl")
        self._rows = {
            name: (RowFile if name in whole else EndRows)(folder / f"{name}.jsonl", check) for name, check in LINES.items()
        }

    def read_on(self) -> None:
        """Read what was written since; raises as `GrowingFile.read_on`."""
        for file in (self.samples, *self._rows.values()):
            file.read_on()

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """By name of file all rows so far; of what comes later these lists know nothing."""
        return {name: [*file.rows] for name, file in self._rows.items()}

    def damage(self) -> list[str]:
        """A sentence for each file with lines that were left out."""
        return [file.damage for file in (*self._rows.values(), self.samples) if file.damage is not None]


def read_run(folder: str | Path, files: RunFiles | None = None, whole: Collection[str] = ROWS) -> RunRecord:
    """Read the run in `folder`, as `RunFiles` says; of its `files`, if they were read before, what was written since.

    Raises:
        DataError: there is no run in it, or one of its files cannot be opened.
    """
    path = Path(folder)
    if not (path / "metrics.jsonl").is_file():
        raise DataError(
            f"{path} holds no run: there is no metrics.jsonl in it{nearest_folder(path)}{_runs_inside(path)}; give the folder "
            "<run.folder>/<run.name>"
        )
    try:
        summary, placement, machine, end = (
            read_file(path / f"{name}.json") for name in ("summary", "placement", "machine", "end")
        )
        config, config_damage = _config(path / "config.yaml")
        if files is None:
            files = RunFiles(path, whole)
        else:
            files.read_on()
        return RunRecord(
            folder=path,
            name=written_out(path.resolve().name),
            config=config,
            **files.rows(),
            samples=files.samples,
            files=files,
            summary=summary[0],
            profiles=tuple(str(file.relative_to(path)) for file in sorted((path / "profile").glob("step_*/*.*"))),
            nodes=len(placement[0].get("nodes", ())) or 1,
            machine=_machine(machine[0], summary[0]),
            end=end[0],
            damage=[
                *([config_damage] if config_damage else []),
                *(damage for _, damage in (summary, placement, machine, end) if damage),
                *files.damage(),
            ],
        )
    except OSError as error:
        raise DataError(f"{path} cannot be read as a run: {error}") from error


def _machine(machine: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    recorded = {name: summary.get(name) for name in ("machine", "versions")} | dict(machine)
    return recorded | {name: dict(recorded[name] or {}) for name in ("machine", "versions")}


def _config(file: Path) -> tuple[dict[str, Any], str | None]:
    """The config of a run as it stands in its file, and a sentence if that is damaged."""
    try:
        return (read_yaml(file) if file.is_file() else {}), None
    except (ConfigError, OSError, ValueError, RecursionError) as error:
        return {}, f"{file} is damaged or no config, and left out ({error})"


def _runs_inside(folder: Path) -> str:
    """Words that name some runs in a folder that holds runs and is none."""
    names = sorted(file.parent.name for file in folder.glob("*/metrics.jsonl"))
    return f", but it has the runs {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else ""


SERVED = "served"
"""Key of a sample of a server's client: its `tenant`, and the `model` that was asked."""


def figure_of(row: Mapping[str, Any], metric: str) -> float | None:
    """The value of `metric` in a row of metrics, where it is a number."""
    value = row.get(metric)
    return value if isinstance(value, (int, float)) else None


def reward_of(sample: Mapping[str, Any]) -> float | None:
    """The reward that a sample was trained with; of an older run, which did not write it, the sum of its parts.

    None: a server's client has it, and the server does not.
    """
    training = sample.get("training") or {}
    if SERVED in sample and "reward" not in training:
        return None
    return float(training.get("reward", sum(sample.get("rewards", {}).values())))


def repetitions(runs: Sequence[RunRecord]) -> list[list[int]]:
    """Runs by place, those together whose configs differ in name, folder and seed alone."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.fields().items() if name not in IDENTITY}
        key = repr(sorted(fields.items(), key=lambda field: field[0])) if fields else f"run {index}"
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The config fields in which `runs` differ, and each run's value (None: it has no such field)."""
    all_fields = [run.fields() for run in runs]
    names = dict.fromkeys(name for fields in all_fields for name in fields)
    rows = {name: [fields.get(name) for fields in all_fields] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def metric_names(runs: Sequence[RunRecord]) -> list[str]:
    """Every metric of some run, in order of first appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.metric_names))


def last_figure(run: RunRecord, metric: str, steps: int = 10) -> float | None:
    """Mean of the last `steps` values, or of an evaluation (`eval/…`) the last value; None if there is none.

    Step 0, which is before training, counts for nothing but an evaluation that was not repeated.
    """
    curve = run.curve(metric)
    if metric.startswith("eval/"):
        return curve[max(curve)] if curve else None
    values = [value for step, value in sorted(curve.items()) if step][-steps:]
    return sum(values) / len(values) if values else None
