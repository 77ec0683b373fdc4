"""`trace.jsonl`: what the driver, every rank and every engine did at each step, gathered from them when the step is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.observe import MetricsFile, Phases
from megarl.observe.trace import PhaseSpans, Span, by_process
from megarl.trainers.run.roles import POLICY, Roles

GIB = 2**30


class Timeline:
    """Gathers spans and peak memory. Under torchrun every rank has one, and only the leading one writes."""

    def __init__(self, path: Path | None, phases: Phases, resume_after_step: int | None) -> None:
        """`path`: None where another process writes."""
        self._file = MetricsFile(path, resume_after_step=resume_after_step) if path is not None else None
        self.others: dict[str, Callable[[], list[list[Span]]]] = {}
        """By group what gives the spans of processes that are no training ranks."""
        self._driver = PhaseSpans()
        phases.listen(self._driver.changed)

    def record(self, step: int, roles: Roles) -> dict[str, float]:
        """Write what was done since the last call.

        Returns `memory/<group>_peak_gib`, the highest of a group's ranks, and how fast the policy was trained.
        """
        records, operations = roles.take_records(), roles.take_update_flops()
        if self._file is not None:
            spans = {name: [spans for spans, _ in ranks] for name, ranks in records.items()}
            spans |= {name: take() for name, take in self.others.items()}
            self._file.log(step, {"spans": by_process(self._driver.take(), spans)})
        peaks = {f"memory/{name}_peak_gib": max(peak for _, peak in ranks) / GIB for name, ranks in records.items()}
        return peaks | throughput(operations, [spans for spans, _ in records[POLICY]], roles.peak_flops)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def throughput(operations: int, ranks: Sequence[Sequence[Span]], peak_flops: float | None) -> dict[str, float]:
    """`policy/tflops_per_gpu`, and `policy/mfu` where the peak of a GPU is known; nothing for a step without an update.

    `ranks` are the policy's spans by rank: the rank that was longest in updates says how long they took.
    """
    seconds = max(sum(end - begin for name, begin, end in spans if name == "update") for spans in ranks)
    if not operations or not seconds:
        return {}
    per_gpu = operations / len(ranks) / seconds
    return {"policy/tflops_per_gpu": per_gpu / 1e12} | ({"policy/mfu": per_gpu / peak_flops} if peak_flops else {})
