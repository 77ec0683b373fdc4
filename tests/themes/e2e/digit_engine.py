"""A rollout engine of the user's own, as `rollout.engine` names it: it guesses a digit, whatever its weights are.

Everything that megarl asks of an engine is here; nothing of megarl but `megarl.rollout` is needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.rollout import Engine, EngineCapabilities, EnginePlace, EngineRequest, Generation


def guess(key: str, number: int) -> int:
    """The digit that is sampled as response `number` to the prompt called `key`."""
    return hashlib.sha256(f"{key}/{number}".encode()).digest()[0] % 10


class DigitEngine(Engine):
    """Answers with one digit and the end of the text; writes down what it was asked and sent."""

    capabilities = EngineCapabilities(concurrent=True, reads_arguments=True)

    @classmethod
    def options(cls, config: Any, place: EnginePlace) -> dict[str, Any]:
        return {"diary": config.rollout.engine_args["diary"], "number": place.number}

    def __init__(self, model_path: str, *, initial_version: int | None, diary: str, number: int) -> None:
        self._vocabulary = json.loads((Path(model_path) / "tokenizer.json").read_text())["model"]["vocab"]
        self._end = json.loads((Path(model_path) / "config.json").read_text())["eos_token_id"]
        self._file, self._version = Path(diary) / f"engine-{number}.jsonl", initial_version
        self._received: dict[str, list[int]] = {}

    @property
    def weight_version(self) -> int | None:
        return self._version

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        assert self._version is not None
        assert request.keys is not None
        return [[self._answer(guess(key, number), self._version) for number in range(request.n)] for key in request.keys]

    def _answer(self, digit: int, version: int) -> Generation:
        ids = [self._vocabulary[str(digit)], self._end]
        return Generation(ids, [math.log(0.1), 0.0], [version] * 2, "stop")

    async def health(self) -> None: ...

    async def stop(self) -> None: ...

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._version, self._received = None, {}

    async def apply_update(self, bucket: Sequence[tuple[str, Any]]) -> None:
        self._received |= {name: list(weight.shape) for name, weight in bucket}

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._version = version
        with self._file.open("a") as file:
            file.write(json.dumps({"version": version, "weights": self._received}) + "\n")

    async def abandon_update(self) -> None:
        self._version = None
