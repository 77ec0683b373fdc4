"""`trace.jsonl`: what the driver, every rank and every engine did at each step, gathered from them when the step is over."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.observe import MetricsFile, Phases
from megarl.observe.rank_record import RankRecord, UpdateFlops
from megarl.observe.trace import PhaseSpans, Span, by_process
from megarl.runs.observers import RunObserver
from megarl.runs.training_side import POLICY, TrainingSide

GIB = 2**30


class Timeline:
    """Gathers spans and peak memory. Under torchrun every rank has one, and only the leading one writes."""

    def __init__(
        self, path: Path | None, phases: Phases, resume_after_step: int | None, observers: Sequence[RunObserver] = ()
    ) -> None:
        """`path`: None where another process writes. `observers` are given the same spans."""
        self._file = MetricsFile(path, resume_after_step=resume_after_step) if path is not None else None
        self._observers = observers
        self.others: dict[str, Callable[[], list[list[Span]]]] = {}
        """By group what gives the spans of processes that are no training ranks."""
        self._driver = PhaseSpans()
        phases.listen(self._driver.changed)

    def record(self, step: int, roles: TrainingSide) -> dict[str, float]:
        """Write what was done since the last call.

        Returns `memory/<group>_peak_gib`, the highest of a group's ranks, how fast the policy was trained, and what observers
        that asked the ranks say.
        """
        records, operations = roles.take_records(), roles.take_update_flops()
        if self._file is not None:
            spans = {name: [record.spans for record in ranks] for name, ranks in records.items()}
            spans |= {name: take() for name, take in self.others.items()}
            row = by_process(self._driver.take(), spans)
            self._file.log(step, {"spans": row})
            for observer in self._observers:
                observer.traced(step, row)
        peaks = {f"memory/{name}_peak_gib": max(record.peak_bytes for record in ranks) / GIB for name, ranks in records.items()}
        told = [observer.recorded(step, roles) for observer in self._observers]
        return peaks | throughput(operations, records[POLICY], roles.peak_flops) | dict(ChainMap(*map(dict, told)))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def throughput(operations: UpdateFlops, ranks: Sequence[RankRecord], peak_flops: float | None) -> dict[str, float]:
    """`policy/tflops_per_gpu`, and `policy/mfu` where the peak of a GPU is known; nothing for a step without an update.

    `ranks` are the policy's: the one that was longest in updates says how long they took. Of steps whose prompts show pictures
    also the vision tower's share of the operations, and the seconds of its forward passes on the rank that was longest in them.
    `policy/computed_tokens` are those of the decoder's updates, `policy/shared_tokens` the share that prefixes saved of more.
    """
    seconds = max(sum(end - begin for name, begin, end in record.spans if name == "update") for record in ranks)
    if not operations.total or not seconds:
        return {}
    per_gpu = operations.total / len(ranks) / seconds
    metrics = {"policy/tflops_per_gpu": per_gpu / 1e12} | ({"policy/mfu": per_gpu / peak_flops} if peak_flops else {})
    if operations.tokens:
        metrics["policy/computed_tokens"] = operations.tokens
        metrics["policy/shared_tokens"] = 1 - operations.tokens / operations.apart
    if operations.tower:
        metrics["policy/tower_flops_share"] = operations.tower / operations.total
        metrics["policy/tower_forward_s"] = max(record.tower_s for record in ranks)
    return metrics
