"""megarl report --watch: the page follows the run in a real browser, and only this machine's own names are answered."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.observe import live
from megarl.observe.live import new_rows, open_server
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import HARM, write_run


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run of five steps, and the port at which it is watched."""
    run = write_run(tmp_path / "r", steps=5)
    server = open_server([run], 0)
    yield run, server.port
    server.close()


def ask(port: int, path: str, host: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_its_own_names_are_answered(served: tuple[Path, int]) -> None:
    _, port = served
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8000"):  # a port may be forwarded
        assert ask(port, "/", host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        status, text = ask(port, "/rows?at=0.0", host)
        assert (status, "reward" in text) == (403, False)
    own = f"127.0.0.1:{port}"
    assert [ask(port, path, own)[0] for path in ("/../r/config.yaml", "/rows?at=x", "/rows?at=-1.0", "/rows?at=0.0")] == [
        *(404, 400, 400),
        200,
    ]


def test_new_rows_are_those_beyond_what_the_page_has(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", steps=5))
    (fresh,) = new_rows([run], [(4, 16)])["runs"]
    assert [row["step"] for row in fresh["rows"]] == [4, 5]  # the first of the six rows is step 0
    assert fresh["samples"]["columns"]["step"] == [5] * 4
    assert fresh["samples_written"] == 4
    assert new_rows([run], [(7, 20)]) == {"reload": True}  # the run was put back to an earlier step


def test_of_many_new_rows_the_page_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(write_run(tmp_path / "r", steps=5))
    monkeypatch.setattr(live, "NEW_ROWS", 3)
    assert len(new_rows([run], [(3, 20)])["runs"][0]["rows"]) == 3
    assert new_rows([run], [(2, 20)]) == {"reload": True}


def test_samples_too_many_for_an_answer_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(write_run(tmp_path / "r", steps=5))
    monkeypatch.setattr(live, "NEW_SAMPLES", 19)
    assert len(new_rows([run], [(0, 1)])["runs"][0]["samples"]["rows"]) == 19
    (tmp_path / "r/samples.jsonl").unlink()  # who reads it fails
    assert new_rows([run], [(0, 0)]) == {"reload": True}


@pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")
def test_the_page_follows_the_run(browser: Chromium, served: tuple[Path, int]) -> None:
    run, port = served
    browser.open_address(f"http://127.0.0.1:{port}/")
    reward = "document.querySelector('[data-headline=\"reward/mean\"]').plot.data"
    assert browser.run(f"{reward}[0].at(-1)") == 5
    with (run / "samples.jsonl").open("a") as file:
        sample = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
        file.write(json.dumps(sample | {"step": 6, "group_id": "row-6@0", "prompt_text": HARM}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        odd = dict.fromkeys(("__proto__", "constructor", "toString", "__proto__/x"), 1.0)
        file.write(json.dumps({"step": 6, "reward/mean": 0.9, **odd}) + "\n")
    ends_at = time.monotonic() + 20
    while browser.run(f"{reward}[0].at(-1)") != 6:
        assert time.monotonic() < ends_at, browser.run("document.querySelector('#live').textContent")
        time.sleep(0.1)
    assert browser.run(f"{reward}.at(-1).at(-1) ?? {reward}[1].at(-1)") == 0.9
    heads = "[...document.querySelectorAll('#samples-list .where')].map((one) => one.textContent)"
    assert browser.run(heads)[0].startswith("step 6 · row-6@0 · 1 answer ")
    assert browser.run("document.querySelector('#samples-list .prompt').textContent") == HARM
    assert browser.run("document.title") == "megarl: r"
    assert browser.complaints == []


def test_the_command_says_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=2)
    command = [sys.executable, "-m", "megarl", "report", str(run), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    found = re.match(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)", process.stdout.readline())
    assert found
    assert ask(int(found[1]), "/", f"127.0.0.1:{found[1]}")[0] == 200
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (0, "ended\n", "")


def test_a_run_that_has_just_started_is_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=2)
    (run / "metrics.jsonl").rename(tmp_path / "later.jsonl")
    command = [sys.executable, "-m", "megarl", "report", str(run), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline().startswith(f"waiting for the first figures of {run}")
        (tmp_path / "later.jsonl").rename(run / "metrics.jsonl")
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert found
        assert ask(int(found[1]), "/", f"127.0.0.1:{found[1]}")[0] == 200
    finally:
        process.kill()
        process.communicate()
    gone = subprocess.run([*command[:-2], str(tmp_path / "gone"), "--watch"], capture_output=True, text=True)
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "gone holds no run" in gone.stderr
