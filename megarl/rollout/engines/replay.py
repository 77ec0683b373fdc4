"""An engine that gives back recorded responses, so that two runs can be compared bit for bit without sampling.

Reads the `samples.jsonl` that a run writes: one `Sample` as JSON per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.engine_kinds import REPLAY
from megarl.data.sample import Sample, read_record
from megarl.errors import EngineError, nearest
from megarl.rollout.engines.protocol import Engine, EnginePlace, EngineRequest, Generation, check_version
from megarl.weights.staging import NamedTensors


class ReplayEngine(Engine):
    """Answers the prompt with key `k` with the recorded samples whose `group_id` is `k`, in the order of the file.

    Weights are not needed: updates only set the version, and every answer carries the versions that were recorded.
    """

    capabilities = REPLAY

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        return {"replay_from": config.rollout.replay_from}

    @classmethod
    async def start(cls, model_path: str, *, initial_version: int | None = None, **options: Any) -> ReplayEngine:
        return cls(initial_version=initial_version, **options)

    def __init__(self, replay_from: str | Path, *, initial_version: int | None = None) -> None:
        self._file = Path(replay_from)
        self._groups: dict[str, list[Sample]] = {}
        try:
            lines = self._file.read_bytes().splitlines()
        except OSError as error:
            raise EngineError(f"rollout.replay_from is {self._file}, which cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                for beside in ("step", "training", "served"):  # what samples.jsonl says of the step, and of a server's client
                    record.pop(beside, None)
                sample = read_record(Sample, record)
            except (AttributeError, TypeError, ValueError, RecursionError) as error:
                raise EngineError(f"{self._file}:{number} is not a recorded sample: {error}") from error
            self._groups.setdefault(sample.group_id, []).append(sample)
        self._version = initial_version

    @property
    def weight_version(self) -> int | None:
        return self._version

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        check_version(self._version)
        if request.keys is None:
            raise EngineError("the replay engine finds recorded responses by key; generate needs keys")
        keyed_prompts = zip(request.keys, request.prompts, strict=True)
        return [[self._recorded(key, index, prompt) for index in range(request.n)] for key, prompt in keyed_prompts]

    def _recorded(self, key: str, index: int, prompt: Sequence[int]) -> Generation:
        samples = self._groups.get(key)
        if samples is None:
            raise EngineError(f"{self._file} holds no samples of group {key!r}{nearest(key, self._groups)}")
        if index >= len(samples):
            raise EngineError(f"{self._file} holds {len(samples)} samples of group {key!r}; sample {index} was asked for")
        sample = samples[index]
        if list(prompt) != sample.prompt_ids:
            raise EngineError(f"group {key!r} was recorded in {self._file} with another prompt than is asked now")
        return Generation(
            list(sample.response_ids),
            list(sample.rollout_log_probs),
            list(sample.weight_versions),
            sample.finish_reason,  # type: ignore[arg-type]
        )

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._version = None

    async def apply_update(self, bucket: NamedTensors) -> None:
        """The weights are not looked at."""

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._version = version

    async def abandon_update(self) -> None:
        """Leave no version, as after any failed update, until the next one."""

    async def sleep(self) -> None:
        self._version = None

    async def wake(self) -> None:
        """Leave no version, as after any wake, until the next update."""

    async def health(self) -> None:
        """Always able to answer."""

    async def stop(self) -> None:
        self._version = None
