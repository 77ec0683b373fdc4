"""Whether machines see a folder of the driver, on a real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from megarl.workers import node_folders


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_machines_that_do_not_see_a_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.nodes()[0]["NodeManagerAddress"]
    assert node_folders.machines_without(tmp_path / "run", {here, "10.255.255.1"}) == []
    monkeypatch.setattr(node_folders, "_sees", lambda path: Path(path + "-elsewhere").exists())
    assert node_folders.machines_without(tmp_path / "run", {here}) == [here]
    assert [*(tmp_path / "run").iterdir()] == []
