"""`experts.jsonl` has a line for each step whose updates used experts, by role, and a resumed run none of them twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.observe import read_metrics
from megarl.observe.expert_load import LayerRouting
from megarl.runs.expert_record import ExpertRecord

ROUTED = {0: LayerRouting(1, 4.0, (3.0, 1.0), (2.0, 2.0), 2.0)}


def test_steps_are_written_by_role_and_resumed_behind_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "experts.jsonl"
    record = ExpertRecord(file, None)
    record.write(1)
    assert not file.exists()  # no experts, no file
    metrics: dict[str, Any] = {"loss": 1.0, "experts": ROUTED}
    record.take("policy", metrics)
    assert metrics == {"loss": 1.0}
    record.take("policy", {"experts": {0: LayerRouting(1, 4.0, (1.0, 3.0), (2.0, 2.0), 0.0)}})
    record.take("critic", {"loss": 1.0})
    record.write(2)
    record.take("policy", {"experts": ROUTED})
    record.write(3)
    record.close()
    even = {"layers": [0], "loads": [[1.0, 1.0]], "entropy": [0.25]}
    skewed = {"layers": [0], "loads": [[1.5, 0.5]], "entropy": [0.5]}
    assert read_metrics(file) == [{"step": 2, "policy": even}, {"step": 3, "policy": skewed}]

    resumed = ExpertRecord(file, 2)
    resumed.take("critic", {"experts": ROUTED})
    resumed.write(3)
    resumed.close()
    assert read_metrics(file) == [{"step": 2, "policy": even}, {"step": 3, "critic": skewed}]
    silent = ExpertRecord(None, None)  # a rank under torchrun that does not lead
    silent.take("policy", {"experts": ROUTED})
    silent.write(1)
    silent.close()
