"""A run's folder is data from outside: of a damaged or foreign file the rest is shown, and what is left out is named once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cli import main
from megarl.errors import CheckpointError
from megarl.observe import growing_file, read_metrics, read_summary
from megarl.observe.growing_file import RowFile
from megarl.observe.page_samples import PACKED_BYTES, packed_samples
from megarl.observe.record_lines import metrics_line
from megarl.observe.record_types import LINES, sample_line
from megarl.observe.report import build_page
from megarl.observe.run_record import read_run
from megarl.observe.run_state import RunState
from megarl.observe.sample_file import SampleFile
from megarl.observe.sample_media import PagePictures
from megarl.planning.calibration import read_run as read_times
from tests.config.smallest import WITHOUT_LIBRARIES
from tests.observe.recorded import write_run

SAMPLE: dict[str, Any] = {"step": 2, "sample_id": "a", "group_id": "b", "prompt_text": "p", "response_text": "r"}
FOREIGN_SAMPLES = {
    "no_step": {name: value for name, value in SAMPLE.items() if name != "step"},
    "a_list": [SAMPLE],
    "a_number": 7,
    "a_step_that_is_text": SAMPLE | {"step": "2"},
    "a_step_with_a_fraction": SAMPLE | {"step": 2.5},
    "a_negative_step": SAMPLE | {"step": -1},
    "a_huge_step": SAMPLE | {"step": 10**300},
    "a_reward_of_text": SAMPLE | {"rewards": {"r": "high"}},
    "a_trained_reward_of_text": SAMPLE | {"training": {"reward": "high"}},
    "log_probs_of_text": SAMPLE | {"rollout_log_probs": ["-1"]},
    "trained_log_probs_of_text": SAMPLE | {"training": {"log_probs": ["-1"]}},
    "advantages_of_lists": SAMPLE | {"training": {"advantages": [[1]]}},
    "a_prompt_that_is_no_text": SAMPLE | {"prompt_text": 3},
    "turns_that_are_text": SAMPLE | {"turns": "said"},
    "a_turn_without_text": SAMPLE | {"turns": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
    "a_picture_elsewhere": SAMPLE
    | {"media": [{"kind": "image", "digests": ["../../x"], "grid": [1, 2, 2], "place": 0, "tokens": 1}]},
    "a_client_without_a_name": SAMPLE | {"served": {"model": "m"}},
}
FOREIGN_LINES = {
    "half_a_line": b'{"step": 2, "sample_id": "a',
    "nothing": b"",
    "no_json": b"step 2",
    "zeros": bytes(40),
    "no_utf8": b'{"step": 2, "sample_id": "\xff\xfe", "group_id": "b"}',
    "half_a_character": b'{"step": 2, "sample_id": "\\ud800", "group_id": "b"}',
    "brackets": b"[" * 100_000,
    "deep": b'{"step": 2, "sample_id": "a", "group_id": "b", "row": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    "a_number_of_5000_digits": b'{"step": ' + b"9" * 5000 + b', "sample_id": "a", "group_id": "b"}',
}
ALLOWED = {
    "not_finite": b'{"step": 2, "sample_id": "a", "group_id": "b", "rewards": {"r": NaN}, "rollout_log_probs": [-Infinity]}',
    "a_key_twice": b'{"step": 1, "step": 2, "sample_id": "a", "group_id": "b"}',
    "a_zero_character": b'{"step": 2, "sample_id": "\\u0000", "group_id": "b"}',
    "a_huge_reward": b'{"step": 2, "sample_id": "a", "group_id": "b", "rewards": {"r": 1e999}}',
}


def run_of(folder: Path) -> Path:
    return write_run(folder / "r", steps=3)


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Output and stderr of the three commands that read runs, of which none may fail."""
    other = folder.parent / "other"
    if not other.exists():
        write_run(other, lr=1.0, steps=3)
    trace = str(folder.parent / "trace.json")
    for command in (["report", str(folder), "--trace", trace], ["compare", str(folder), str(other)]):
        assert main(command) == 0
    capsys.readouterr()
    assert main(["samples", str(folder), "--best", "--count", "99"]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def put_in(file: Path, line: bytes, at: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:at], line + b"\n", *lines[at:]]))


@pytest.mark.parametrize("name", [*FOREIGN_SAMPLES, *FOREIGN_LINES])
def test_a_foreign_sample_is_named_once_and_the_others_are_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    line = FOREIGN_LINES[name] if name in FOREIGN_LINES else json.dumps(FOREIGN_SAMPLES[name]).encode()
    put_in(run / "samples.jsonl", line, 5)
    out, errors = shown(run, capsys)
    assert "12 of 12 samples" in out
    assert errors.startswith(f"megarl: {run}/samples.jsonl: line 6 is damaged or not of this file, and left out (")
    assert errors.count("\n") == 1
    assert len(errors) < 400


@pytest.mark.parametrize("name", ALLOWED)
def test_a_line_of_json_that_is_a_sample_is_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)
    put_in(run / "samples.jsonl", ALLOWED[name], 5)
    out, errors = shown(run, capsys)
    assert "13 of 13 samples" in out
    assert errors == ""


FOREIGN_ROWS = {
    "metrics": ({"reward/mean": 1}, {"step": 1, "a": [1]}, {"step": 1, "a": 10**400}, {"step": True}, [], 3, None),
    "trace": (
        {"step": 1},
        {"step": 1, "spans": []},
        {"step": 1, "spans": {"driver": [["a", "b", "c"]]}},
        {"step": 1, "spans": {"driver": [["a", 1.0]]}},
        {"step": 1, "spans": {"policy x": []}},
        {"step": 1, "spans": {"driver": [["a", float("nan"), 1e300]]}},
    ),
    "distributions": ({"step": 1, "reward": 5}, {"step": 1, "reward": {"low": 0, "high": 1, "counts": "many"}}, {"reward": {}}),
    "experts": ({"step": 1, "policy": {"loads": [1.0]}}, {"step": 1, "policy": 3}, {"policy": {}}),
    "faults": ({"wait_s": "long"}, [], "x"),
    "slow_ranks": ({"role": "policy"}, {"step": 1, "behind": [1]}),
    "reward_errors": ({"step": 1}, {"step": 1, "reward": "r", "errors": "many", "on_error": "zero", "error": "x"}),
}


@pytest.mark.parametrize("name", FOREIGN_ROWS)
def test_foreign_rows_of_every_file_are_counted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)
    file = run / f"{name}.jsonl"
    before = len(getattr(read_run(run), name))
    rows = FOREIGN_ROWS[name]
    with file.open("a") as more:
        more.write("".join(json.dumps(row) + "\n" for row in rows))
    record = read_run(run)
    assert len(getattr(record, name)) == before
    count = f"{len(rows)} lines are damaged or not of this file, and left out (first line {before + 1}, "
    assert [damage.startswith(f"{file}: {count}") for damage in record.damage] == [True]
    _, errors = shown(run, capsys)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary", {"seconds_per_step": "long"}), ("summary", {"gates": {"kl": "high"}}), ("summary", {"eval": {"before": 3}}),
        ("machine", {"machine": {"memory_bytes": "much"}}), ("machine", {"commit": 3}), ("end", {"state": 3}), ("end", []),
        ("placement", {"nodes": 3}), ("placement", {}),
    ],
)  # fmt: skip
def test_a_foreign_file_of_one_object_is_left_out(
    name: str, content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    (run / f"{name}.json").write_text(json.dumps(content))
    assert f"megarl: {run}/{name}.json is damaged or not of a run, and left out (" in shown(run, capsys)[1]


DAMAGED_OBJECTS = {
    "empty": b"",
    "half": b'{"steps": 3, "pha',
    "zeros": bytes(40),
    "brackets": b"[" * 100_000,
    "braces": b'{"a":' * 100_000,
    "a_list": b"[]",
    "no_utf8": b'{"steps": 3, "phases": {"\xff": 1}}',
    "of_something_else": b'{"name": "package", "version": "1"}',
    "steps_of_text": b'{"steps": "3", "phases": {}}',
    "phases_of_text": b'{"steps": 3, "phases": "long"}',
}


@pytest.mark.parametrize("name", DAMAGED_OBJECTS)
def test_a_finished_run_whose_summary_is_damaged_or_foreign_says_so_and_what_to_do(name: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(DAMAGED_OBJECTS[name])
    with pytest.raises(CheckpointError) as caught:
        read_summary(path)
    said = str(caught.value)
    assert said.startswith(f"{path} is damaged or no summary of a run (")
    assert said.endswith("; remove it, and the finished run writes it anew")
    assert len(said) < len(str(path)) + 400
    path.write_text(json.dumps({"steps": 3, "phases": {}, "eval": {"before": None}}))
    assert read_summary(path) == {"steps": 3, "phases": {}, "eval": {"before": None}}


@pytest.mark.parametrize(
    "text",
    [
        "policy: []", "policy: {layout: 3}", "data: text", "rewards: 3", "rewards: [3, {name: boxes, args: 4}]",
        "model: &a [*a]", "run: {name: 2020-01-01, 2020-01-02: x}", "x: [{2020-01-02: 1}]", "- 1", "\0", "a: b: c",
        "data: {media_folder: 3, answer_key: [1]}",
    ],
)  # fmt: skip
def test_a_config_of_any_yaml_is_shown_or_left_out(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)
    (run / "config.yaml").write_text(text)
    assert "12 of 12 samples" in shown(run, capsys)[0]


def test_a_line_of_a_hundred_megabytes_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    whole = json.dumps(SAMPLE) + "\n"
    with file.open("w") as out:
        out.write(whole + '{"step": 1, "row": {"a": "')
        for _ in range(100):
            out.write("x" * 10**6)
        out.write('"}}\n' + whole)
    samples = SampleFile(file)
    assert [sample["sample_id"] for sample in samples] == ["a", "a"]
    assert str(samples.damage).endswith("line 2 is damaged or not of this file, and left out (it is longer than 64 MiB)")


def test_a_long_line_that_is_being_written_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_file, "LONGEST_LINE", 100)
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "name": "' + "x" * 300)
    rows = RowFile(file)
    assert (rows.rows, rows.damage) == ([{"step": 1}], None)
    with file.open("a") as more:
        more.write('"}\n{"step": 3}\n')
    rows.read_on()
    assert rows.rows == [{"step": 1}, {"step": 3}]
    assert "line 2 is" in str(rows.damage)


def test_checked_values_are_those_of_the_json_module() -> None:
    """Bit for bit, whatever the size of a float."""
    draw = random.Random(0)
    values = [draw.uniform(-1, 1) * 10 ** draw.randint(-320, 300) for _ in range(20_000)]
    line = json.dumps(SAMPLE | {"training": {"log_probs": values}, "row": {"a": values[:9], "b": "ü\u2028", "c": 2**70}})
    assert sample_line(line.encode()) == json.loads(line)
    row = {"step": 3, "a": 1.5, "b": 7, "c": "nan", "d": None, "e": True, "f": "text"}
    read = metrics_line(json.dumps(row).encode())
    assert {name: value for name, value in read.items() if name != "c"} == {n: v for n, v in row.items() if n != "c"}
    assert read["c"] != read["c"]
    assert {*LINES} == {"metrics", "distributions", "experts", "trace", "faults", "reward_errors", "slow_ranks"}


def test_reading_with_checks_takes_no_longer_than_json_alone(tmp_path: Path, record_property: Any) -> None:
    draw = random.Random(0)
    tokens = {
        "rollout_log_probs": [-draw.random() for _ in range(150)],
        "response_ids": [draw.randrange(10**5) for _ in range(150)],
    }
    line = json.dumps(
        SAMPLE | tokens | {"training": {"log_probs": [-draw.random() for _ in range(150)], "pieces": ["word "] * 150}}
    )
    lines = [line.encode()] * 500

    def seconds(read: Any) -> float:
        best = float("inf")
        for _ in range(5):
            begin = time.process_time()
            for one in lines:
                read(one)
            best = min(best, time.process_time() - begin)
        return best

    checked, plain = seconds(sample_line), seconds(json.loads)
    record_property("seconds", {"checked": checked, "json": plain})
    assert checked < plain


def test_damage_in_metrics_stops_neither_a_plan_nor_who_watches(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    times = {"time/step_s": 2.0, "rollout/samples": 4, "response/tokens_mean": 3.0, "speed/tokens_per_s": 9.0}
    rows = [json.dumps({"step": step, **times}) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("\n".join([rows[0], "[]", rows[1][:20], rows[2], '{"step": 4, "time/st']))
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 3]
    (run / "config.yaml").write_text(WITHOUT_LIBRARIES)
    assert read_times(run).steps == 2


def test_restarts_are_counted_in_a_damaged_file_of_faults(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lines = [
        '{"wait_s": 1.0}',
        "[" * 100_000,
        '{"wait_s": null}',
        '{"wait_s": "long"}',
        "\0",
        '{"wait_s": 2.0}',
        '{"wait_s": 3',
    ]
    (run / "faults.jsonl").write_text("\n".join(lines))
    settings: Any = SimpleNamespace(run_folder=run, run=SimpleNamespace(steps=3, name="a"), trainer="rl")
    assert RunState(settings).restarts == 2


def test_samples_that_compress_badly_leave_the_page_at_its_size(tmp_path: Path) -> None:
    run, draw = run_of(tmp_path), random.Random(0)
    with (run / "samples.jsonl").open("w") as out:
        for place in range(4000):
            text = draw.randbytes(3000).hex()
            sample = SAMPLE | {"step": 1 + place // 400, "group_id": f"{place // 8}", "response_text": text}
            out.write(json.dumps(sample) + "\n")
    record = read_run(run)
    columns, prompts, chunks = packed_samples(record, PagePictures())
    assert 0.7 * PACKED_BYTES < len(prompts) + sum(map(len, chunks)) <= PACKED_BYTES
    assert len(columns["step"]) % 8 == 0, "whole groups"
    assert {*columns["step"]} == {*range(1, 11)}, "evenly spread"
    assert len(build_page([record])) < 10_000_000
