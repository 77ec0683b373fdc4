"""The samples of the report in a real browser: groups, filters, colours of tokens, and a hundred thousand of them."""

from __future__ import annotations

import json
import time
import zlib
from base64 import b64decode
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from megarl.observe.page_samples import pack_samples, packed_text, shown_places
from megarl.observe.report import build_page
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import as_served, write_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")

COUNT = "document.querySelector('#sample-count').textContent"


def texts(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)")


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Iterator[Chromium]:
    """A run of 12 steps with a group of four answers each; step 5 asks the question of step 1 again, and all is right."""
    run = write_run(tmp_path / "r")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        if sample["step"] == 5:
            sample |= {"prompt_text": "question 1", "rewards": {"exact_number": 1.0}}
            sample["training"] |= {"reward": 1.0, "advantages": [0.0, 0.0, 0.0]}
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (tmp_path / "report.html").write_text(build_page([read_run(run)]))
    browser.open(tmp_path / "report.html")
    yield browser
    assert browser.complaints == []


def test_a_group_is_its_prompt_once_and_its_answers_newest_first(opened: Chromium) -> None:
    heads = texts(opened, "#samples-list .where")
    assert heads[0] == "step 12 · row-12@0 · 4 answers · mean reward 0.375 · expected 12"
    assert [head.split(" · ")[0] for head in heads] == [f"step {step}" for step in range(12, 2, -1)]
    assert texts(opened, "#samples-list .group:first-child .prompt") == ["question 12"]
    facts = texts(opened, "#samples-list .group:first-child .facts")
    assert facts[3] == "reward 0.75advantage +0.253 tokens · ended by stop"  # the mean over the two tokens that were sampled
    widths = "[...document.querySelectorAll('.group:first-child .facts .bar span')].map((bar) => bar.style.width)"
    assert opened.run(widths) == ["0%", "25%", "50%", "75%"]


def test_sample_filters_filter(opened: Chromium) -> None:
    assert opened.run(COUNT) == "10 of 12 groups shown; 48 of 48 samples found"
    opened.fill("#sample-from", "3")
    opened.fill("#sample-to", "4")
    assert opened.run(COUNT) == "2 of 2 groups shown; 8 of 48 samples found"
    opened.fill("#sample-least", "0.5")
    assert opened.run(COUNT) == "2 of 2 groups shown; 4 of 48 samples found"
    opened.fill("#sample-text", "IS 4")
    assert opened.run(COUNT) == "1 of 1 groups shown; 1 of 48 samples found"
    for field in ("from", "to", "least", "text"):
        opened.fill(f"#sample-{field}", "")
    opened.fill("#sample-order", "best")
    assert texts(opened, "#samples-list .where")[0].startswith("step 5 ")
    opened.run("document.querySelector('#sample-more').click()")
    assert opened.run(COUNT).startswith("12 of 12 groups shown")


def test_one_prompt_can_be_followed_over_the_steps(opened: Chromium) -> None:
    opened.fill("#sample-to", "5")
    opened.run("document.querySelector('#samples-list .over').click()")
    heads = [head.split(" · ") for head in texts(opened, "#samples-list .where")]
    assert [(head[0], head[3]) for head in heads] == [("step 1", "mean reward 0.375"), ("step 5", "mean reward 1")]
    opened.run("document.querySelector('#sample-all').click()")
    assert opened.run(COUNT) == "5 of 5 groups shown; 20 of 48 samples found"


def test_tokens_are_coloured_by_what_the_step_made_of_them(opened: Chromium) -> None:
    def colours() -> list[str]:
        tokens = "[...document.querySelectorAll('#samples-list .response')[0].children]"
        return opened.run(f"{tokens}.map((token) => getComputedStyle(token).backgroundColor)")

    clear = "rgba(0, 0, 0, 0)"
    assert colours() == ["rgba(37, 121, 219, 0.68)", "rgba(214, 69, 36, 0.38)", clear]  # the last one was not sampled
    title = opened.run("document.querySelectorAll('#samples-list .response')[0].children[1].title")
    assert title == "token 1, engine -1, trainer -1.25, advantage -0.5"
    opened.fill("#sample-coloring", "difference")
    assert colours() == ["rgba(190, 60, 170, 0)", "rgba(190, 60, 170, 0.7)", clear]
    opened.fill("#sample-coloring", "advantage")
    opened.fill("#sample-from", "5")
    opened.fill("#sample-to", "5")
    assert colours() == [clear, clear, clear]  # an advantage of zero is neither
    assert "all alike: no advantage" in texts(opened, "#samples-list .where")[0]


def test_samples_of_a_server_are_shown_by_tenant_and_found_by_it(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=4)
    as_served(run)
    (tmp_path / "report.html").write_text(build_page([read_run(run)]))
    browser.open(tmp_path / "report.html")
    head = texts(browser, "#samples-list .where")[0]
    assert head == "step 4 · tenant ann · model tinker://ann/sampler_weights/a · row-4@0 · 4 answers"
    assert texts(browser, "#samples-list .facts")[0] == "3 tokens · ended by stop"
    browser.fill("#sample-text", "BOB")
    assert browser.run(COUNT) == "2 of 2 groups shown; 8 of 16 samples found"
    browser.fill("#sample-least", "-1")
    assert browser.run(COUNT).endswith("0 of 16 samples found"), "no reward is in no range"
    assert browser.complaints == []


def test_samples_are_the_same_packed_and_whole_groups_are_kept() -> None:
    rows = [
        {"step": step, "id": f"{step}/{place}", "group": "g", "prompt": f"p{step % 3}", "response": "r", "reward": place,
         "advantage": None, "rewards": {}, "tokens": 1, "finish": "", "answer": None}
        for step in range(700) for place in range(2)
    ]  # fmt: skip
    columns, prompts, chunks = pack_samples(rows, list)
    assert [len(chunk) for chunk in chunks] == [1000, 400]
    assert [prompts[place] for place in columns["prompt"]] == [row["prompt"] for row in rows]
    assert columns["group"] == [place // 2 for place in range(1400)]
    assert [row for chunk in chunks for row in chunk][1] == ["0/1", "g", "r", {}, 1, "", None, 0]
    (_, _, packed) = pack_samples(rows, packed_text)
    assert [json.loads(zlib.decompress(b64decode(text))) for text in packed] == chunks
    kept = shown_places([place // 8 for place in range(240_000)], [0] * 240_000)
    assert len(kept) == 100_000
    assert {len(list(places)) for _, places in groupby(kept, lambda place: place // 8)} == {8}
    assert kept[-1] > 239_900, "evenly spread"


def write_many(folder: Path, count: int) -> Path:
    """A run with `count` samples in groups of eight, of about 300 characters each."""
    run = write_run(folder)
    text = "Let us add the two numbers step by step, carrying where we must. " * 4
    with (run / "samples.jsonl").open("w") as file:
        for place in range(count):
            group = place // 8
            sample = {
                "step": 1 + group // 64,
                "sample_id": f"{group}/{place % 8}",
                "group_id": f"row-{group}",
                "rewards": {"r": 0.5},
            }
            sample |= {"prompt_text": f"What is {group} + 1? " * 4, "response_text": f"{text}{place}", "finish_reason": "stop"}
            sample |= {
                "response_ids": [1] * 60,
                "sampled_mask": [1] * 60,
                "rollout_log_probs": [-0.5] * 60,
                "row": {"answer": "1"},
            }
            sample["training"] = {"reward": place % 8 / 8, "advantages": [0.5] * 60, "pieces": ["word "] * 60}
            file.write(json.dumps(sample) + "\n")
    return run


@pytest.mark.exhaustive
def test_a_hundred_thousand_samples_stay_quick(browser: Chromium, tmp_path: Path, record_property) -> None:
    (tmp_path / "report.html").write_text(build_page([read_run(write_many(tmp_path / "r", 100_000))]))
    took = {}

    def timed(name: str, action) -> None:
        begin = time.perf_counter()
        action()
        took[name] = round(time.perf_counter() - begin, 2)

    timed("open", lambda: browser.open(tmp_path / "report.html"))
    assert browser.run(COUNT) == "10 of 12500 groups shown; 100000 of 100000 samples found"
    timed("reward", lambda: browser.fill("#sample-least", "0.8"))
    assert browser.run(COUNT) == "10 of 12500 groups shown; 12500 of 100000 samples found"
    browser.fill("#sample-least", "")
    for name, text, found in (("first search", "we must. 77777", 1), ("second search", "is 4242 +", 8)):
        browser.run("window.found = new Promise((done) => new MutationObserver(done)"
                    ".observe(document.querySelector('#sample-count'), {childList: true})); 1")  # fmt: skip
        browser.fill("#sample-text", text)
        timed(name, lambda: browser.run("found.then(() => 1)"))
        assert browser.run(COUNT) == f"1 of 1 groups shown; {found} of 100000 samples found"
    record_property("seconds", took)
    assert took["open"] < 10
    assert took["reward"] < 2
    assert took["first search"] < 10
    assert took["second search"] < 2
    assert browser.complaints == []
