"""What a rank computes, operation by operation: torch's profiler, for as long as a `Profile` is on. torch is there already."""

from __future__ import annotations

import gzip
import json
import os

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
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        platform.start_memory_history()
        self._profiler.start()

    def write(self) -> None:
        """Stop, and write the files."""
        self._platform.synchronize()
        self._profiler.stop()
        os.makedirs(os.path.dirname(self._file), exist_ok=True)
        trace = f"{self._file}.trace.json.gz"
        self._profiler.export_chrome_trace(trace)
        if not self._platform.write_memory_history(f"{self._file}.memory.pickle"):
            with gzip.open(trace, "rt") as file:
                recorded = json.load(file)
            with gzip.open(trace, "wt") as file:
                json.dump(with_memory_curve(recorded), file)
