"""A profile of a rank, operation by operation: torch's profiler, for as long as a `Profile` is on. torch is there already."""

from __future__ import annotations

import gzip
import json
import os
import tempfile

from torch.profiler import ProfilerActivity, profile

from megarl.observe.trace import with_memory_curve
from megarl.platform.base import Platform


class Profile:
    """Records from its making until `write`, whose thread must be the one that it was made in and the work is done in.

    `<file>.trace.json.gz` is Chrome's trace format. Memory is `<file>.memory.pickle` where the platform has a history of its
    allocator (https://docs.pytorch.org/memory_viz shows it), else a curve in the trace.
    """

    def __init__(self, file: str, platform: Platform) -> None:
        self._file, self._platform = file, platform
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if platform.name == "cuda" else [])
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        platform.start_memory_history()
        self._profiler.start()

    def write(self) -> None:
        """Stop, and write the files."""
        self._platform.synchronize()
        self._profiler.stop()
        os.makedirs(os.path.dirname(self._file), exist_ok=True)
        trace = f"{self._file}.trace.json.gz"
        if self._platform.write_memory_history(f"{self._file}.memory.pickle"):
            self._profiler.export_chrome_trace(trace)
            return
        with tempfile.NamedTemporaryFile(suffix=".json") as plain:
            self._profiler.export_chrome_trace(plain.name)
            with open(plain.name, "rb") as file:  # written anew under this name
                recorded = json.load(file)
        # one string, because `json.dump` encodes in Python; at gzip's 9 it takes thrice as long and is a tenth smaller
        with gzip.open(trace, "wb", compresslevel=6) as file:
            file.write(json.dumps(with_memory_curve(recorded)).encode())
