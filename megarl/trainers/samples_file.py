"""`samples.jsonl`: what the policy said, one JSON object per sample with its step; also what `engine: replay` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.atomic import write_text_atomically
from megarl.data.sample import Sample


class SamplesFile:
    """Appends the first `per_step` samples of each step. A resumed run first drops the lines of later steps."""

    def __init__(self, path: Path, per_step: int, resume_after_step: int | None) -> None:
        self.path, self.per_step = path, per_step
        kept = ""
        if resume_after_step is not None and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = "".join(line for line in lines if json.loads(line)["step"] <= resume_after_step)
        write_text_atomically(path, kept)

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Append the samples of `step`."""
        with self.path.open("a") as file:
            for sample in samples[: self.per_step]:
                file.write(json.dumps({"step": step, **sample.to_dict()}) + "\n")
