"""A run whose files a crash or a full disk has cut goes on as if they were whole, and says what it removed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.observe.run_record import read_run
from megarl.trainers.rl.train import train
from tests.themes.e2e.records import curve

pytestmark = pytest.mark.usefixtures("local_ray")
CUT = ("metrics", "samples", "distributions", "trace")


def test_every_file_that_a_run_appends_to_may_end_in_half_a_line(
    tiny_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(**{"run.name": "whole", "run.steps": 2, "run.save_every": 1, "run.keep_checkpoints": 0})
    train(config)
    whole = Path(config.run_folder)
    assert {*CUT} == {file.stem for file in whole.glob("*.jsonl")}, "another file is appended to: cut it here, too"
    torn = whole.with_name("torn")
    shutil.copytree(whole, torn)
    shutil.rmtree(torn / "checkpoints" / "step_000002")
    (torn / "summary.json").unlink()
    draw = random.Random(0)
    for name in CUT:
        file = torn / f"{name}.jsonl"
        content = file.read_bytes()
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        file.write_bytes(content[: draw.randrange(last + 1, len(content))])
    capsys.readouterr()
    train(config.model_copy(update={"run": config.run.model_copy(update={"name": "torn", "resume": "auto"})}))
    said = capsys.readouterr().out
    told = [line for line in said.splitlines() if "removed, because an earlier attempt was cut off" in line]
    assert [all(f"{name}.jsonl (" in line for name in CUT) for line in told] == [True]
    assert curve(torn) == curve(whole)
    record, expected = read_run(torn), read_run(whole)
    assert record.damage == expected.damage == []
    assert [json.dumps(sample) for sample in record.samples] == [json.dumps(sample) for sample in expected.samples]
    assert [row["step"] for row in record.trace] == [row["step"] for row in expected.trace]
