"""Types of what stands in a run's folder: lines of its `.jsonl` files, and its small JSON files; reading checks them.

A folder may be damaged, of another version or of somebody else. Only what readers use has a type; further keys may be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megarl.observe.growing_file import LONGEST_LINE
from megarl.observe.record_lines import LARGEST, LineCheck, metrics_line, stepped_line

_CHECKED = ConfigDict(strict=True, extra="allow")
StepNumber = Annotated[int, Field(ge=0, le=LARGEST)]
WholeNumber = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
EpochSeconds = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since the epoch, up to the year 5138."""
Digest = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,128}$")]
"""Name of a kept picture: it leads into no other folder."""
ProcessName = Annotated[str, Field(pattern=r"^\S{1,200}( [0-9]{1,9})?$")]
"""`driver`, or a group and a rank such as `policy 0`."""


class _MediaRecord(TypedDict):
    """A picture, video or sound of a sample: `dataclasses.asdict` of `Media`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    kind: Literal["image", "video", "audio"]
    digests: Annotated[list[Digest], Field(min_length=1)]
    grid: Annotated[list[WholeNumber], Field(min_length=3, max_length=3)]
    place: StepNumber
    tokens: StepNumber
    seconds_per_grid: NotRequired[float | None]


class _ContentPart(TypedDict, total=False):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    type: str
    text: str


class _Turn(TypedDict, total=False):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    role: str
    content: str | list[_ContentPart] | None


class _Served(TypedDict):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    tenant: str
    model: str


class _Training(TypedDict, total=False):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    reward: float
    pieces: list[str] | None
    log_probs: list[float]
    reference_log_probs: list[float]
    advantages: list[float]


class _Said(TypedDict, total=False):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    prompt_text: str
    response_text: str
    prompt_ids: list[int]
    response_ids: list[int]
    sampled_mask: list[Any]
    rollout_log_probs: list[float]
    rewards: dict[str, float]
    row: dict[str, Any]
    finish_reason: str | None
    media: list[_MediaRecord | str] | None
    turns: list[_Turn] | None
    training: _Training | None
    served: _Served


class SampleRecord(_Said):
    """A line of `samples.jsonl`."""

    step: StepNumber
    sample_id: str
    group_id: str


class TraceRecord(TypedDict):
    """A line of `trace.jsonl`: by process name, begin and end of what it did."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    step: StepNumber
    spans: dict[ProcessName, list[tuple[str, EpochSeconds, EpochSeconds]]]


class FaultRecord(TypedDict, total=False):
    """A line of `faults.jsonl`: `Fault` of `supervise/restarts.py`."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    who: str
    what: str
    wait_s: float | None
    recovered_s: float | None


class RewardErrorRecord(TypedDict):
    """A line of `reward_errors.jsonl`."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    step: StepNumber
    reward: str
    errors: WholeNumber
    on_error: str
    error: str
    traceback: NotRequired[str]


class _Histogram(TypedDict):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    low: float
    high: float
    counts: list[WholeNumber]


class _Routing(TypedDict):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    layers: list[WholeNumber]
    loads: list[list[float]]
    entropy: NotRequired[list[float]]


class SummaryRecord(TypedDict, total=False):
    """`summary.json`, as far as it is read."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    seconds_per_step: float | None
    eval: dict[str, dict[str, float | None] | None] | None
    phases: dict[str, dict[str, float]]
    gates: dict[str, float | None]
    gate_bounds: dict[str, float]
    machine: MachineFacts | None
    versions: dict[str, str | None] | None


class MachineFacts(TypedDict, total=False):
    """`machine` of `machine.json`, and of an older run's `summary.json`."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    system: str
    processor: str | None
    cores: WholeNumber
    memory_bytes: Annotated[int, Field(ge=0, le=2**63)]


class MachineRecord(TypedDict, total=False):
    """`machine.json`."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    machine: MachineFacts | None
    versions: dict[str, str | None] | None
    commit: str | None
    gpus: WholeNumber | None
    gpu: str | None


class EndRecord(TypedDict, total=False):
    """`end.json`."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    state: str
    why: str | None


class _EngineRecord(TypedDict):
    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    number: StepNumber
    node: str | None
    node_id: str | None


class EnginesRecord(TypedDict):
    """`engines.json`, of a run whose engines come and go: names of nodes by id, and the engines."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    nodes: dict[str, str]
    engines: list[_EngineRecord]


class PlacementRecord(TypedDict):
    """`placement.json`, of which the number of nodes is read."""

    __pydantic_config__ = _CHECKED  # type: ignore[misc]
    nodes: list[Any]


def _line_of(kind: Any) -> LineCheck:
    adapter = TypeAdapter(kind)

    def check(line: bytes) -> dict[str, Any]:
        try:
            row: dict[str, Any] = adapter.validate_json(line)
        except ValidationError as error:
            raise ValueError(_first_of(error)) from None
        return row

    return check


def _by_name(kind: Any) -> LineCheck:
    """Lines with a `step`, and under all other names a `kind`."""
    adapter = TypeAdapter(dict[str, kind])

    def check(line: bytes) -> dict[str, Any]:
        row = stepped_line(line)
        try:
            return {"step": row.pop("step"), **adapter.validate_python(row)}
        except ValidationError as error:
            raise ValueError(_first_of(error)) from None

    return check


def _first_of(error: ValidationError) -> str:
    """Say what is wrong first, as `training.reward: Input should be a valid number`."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or part.isidentifier())
    return f"{place[:60]}: {first['msg']}" if place else first["msg"]


sample_line: LineCheck = _line_of(SampleRecord)
LINES: dict[str, LineCheck] = {
    "metrics": metrics_line,
    "distributions": _by_name(_Histogram),
    "experts": _by_name(_Routing),
    "trace": _line_of(TraceRecord),
    "faults": _line_of(FaultRecord),
    "reward_errors": _line_of(RewardErrorRecord),
    "slow_ranks": metrics_line,
}
"""By name of a file of rows what checks its lines."""
FILES: dict[str, LineCheck] = {
    "summary": _line_of(SummaryRecord),
    "machine": _line_of(MachineRecord),
    "end": _line_of(EndRecord),
    "placement": _line_of(PlacementRecord),
    "engines": _line_of(EnginesRecord),
}
"""By name of a JSON file of one object what checks it."""


def read_file(path: Path) -> tuple[dict[str, Any], str | None]:
    """The object in a JSON file of a run, such as `end.json`, and a sentence if the file is damaged.

    The object of a damaged file is empty, and that of no file.
    """
    try:
        return (checked_file(path) if path.is_file() else {}), None
    except (OSError, ValueError) as error:
        return {}, f"{path} is damaged or not of a run, and left out ({error})"


def checked_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run; raises OSError, and ValueError where it is damaged or of something else."""
    if path.stat().st_size > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE >> 20} MiB")
    return FILES[path.stem](path.read_bytes())
