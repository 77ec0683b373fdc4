"""The report as people look at it: full rows of facts, marks beside colours, keys beside the pointer, a first paint at once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.observe.report import build_page
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.colour_blindness import ciede2000, contrast, lab, least_difference, linear
from tests.observe.recorded import show_pictures, write_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")

DESK, PHONE = 1280, 390
CARDS = {"light": "#ffffff", "dark": "#161b21"}
"""What charts stand on."""
TOLD_APART = 10.0
"""CIEDE2000 between two colours that lie side by side: 1 is the least that is seen, 2 to 10 is seen at a glance."""


def texts(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)")


def show(browser: Chromium, runs: list[Path], width: int = DESK) -> None:
    page = runs[0].parent / "report.html"
    page.write_text(build_page([read_run(run) for run in runs]))
    browser.open(page, width)


@pytest.fixture
def look(browser: Chromium) -> Iterator[Chromium]:
    yield browser
    assert browser.complaints == []
    browser.prefers("light")


def add_metrics(run: Path, metrics: dict[str, Any]) -> None:
    rows = [json.loads(line) | metrics for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def begun(folder: Path) -> Path:
    """A run that has done one step and written nothing else."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


@pytest.mark.parametrize("make", [write_run, begun])
@pytest.mark.parametrize(("width", "columns"), [(DESK, 5), (PHONE, 2)])
def test_the_overview_is_ten_facts_in_full_rows(look: Chromium, tmp_path: Path, make: Any, width: int, columns: int) -> None:
    show(look, [make(tmp_path / "r")], width)
    assert len(texts(look, "#overview dt")) == 10
    tops = look.run("[...document.querySelectorAll('#overview dt')].map((one) => Math.round(one.getBoundingClientRect().top))")
    assert list(Counter(tops).values()) == [columns] * (10 // columns)
    assert [name for name in texts(look, "#overview dt") if any(word in name for word in ("time", "second", "started"))] == [
        "time"
    ]


@pytest.mark.parametrize(("count", "in_rows"), [(2, [2]), (3, [3]), (4, [2, 2])])
def test_no_run_stands_alone_in_a_row(look: Chromium, tmp_path: Path, count: int, in_rows: list[int]) -> None:
    show(look, [write_run(tmp_path / str(number), steps=2) for number in range(count)])
    tops = look.run(
        "[...document.querySelectorAll('#overview .run')].map((one) => Math.round(one.getBoundingClientRect().top))"
    )
    assert list(Counter(tops).values()) == in_rows


def test_time_is_told_once_and_what_is_looked_up_stands_in_the_environment(look: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    show(look, [run])
    facts = dict(zip(texts(look, "#overview dt"), texts(look, "#overview dd"), strict=True))
    assert facts["time"] == "2 min1.5 s a step"  # 12 steps, 10 s from one to the next, the last one 9 s
    assert {name: value for name, value in facts.items() if value == "–"}.keys() == {
        "tokens", "model", "algorithm", "training ranks, engines"
    }  # fmt: skip
    rows = look.run(
        "[...document.querySelectorAll('#environment tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert rows[1:4] == [["folder", str(run)], ["started", "1970-01-01 00:16 UTC"], ["seed", "0"]]


def test_checks_are_short_words_with_a_mark(look: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    names = ("kl_to_reference_at_first_step", "log_prob_max_difference_as_loaded", "log_prob_max_difference_after_sync")
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"gates": {**dict(zip(names, (1e-9, 0.02, None), strict=True)), "of_ones_own": 0.25}}
    (run / "summary.json").write_text(json.dumps(summary | {"gate_bounds": {names[0]: 1e-4, names[1]: 1e-3, names[2]: 1e-3}}))
    show(look, [run])
    assert texts(look, "#overview .check") == [
        "✓ KL at the start", "✗ log-probs as loaded (0.02, at most 0.001)", "– log-probs after sync", "of ones own 0.25"
    ]  # fmt: skip
    assert look.run("document.querySelector('.check').title") == "1.00e-9, at most 1.00e-4"


def test_damage_and_the_reason_of_an_end_are_no_facts_but_lines_above_them(look: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    (run / "end.json").write_text('{"state": "failed", "why": "the disk is full"}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    show(look, [run])
    assert len(texts(look, "#overview dt")) == 10
    damaged, why = texts(look, "#overview .notice")
    assert damaged.startswith("damaged files ")
    assert "metrics.jsonl" in damaged
    assert why == "why it failed the disk is full"


def test_labels_of_axes_are_whole(look: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    add_metrics(run, {"kl/reference": 5.25e-14})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["kl/reference"] = 1.375e-13
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(look, [run], PHONE)
    axis = "document.querySelector('[data-headline=\"kl/reference\"]').plot.axes[1]"
    labels = look.run(f"{axis}._values")
    assert any("e-1" in label for label in labels)
    measured = "(() => { const context = document.createElement('canvas').getContext('2d');"
    measured += " context.font = '11px system-ui, sans-serif';"
    measured += f" return Math.max(...{axis}._values.map((text) => context.measureText(text).width)) }})()"
    widest = look.run(measured)
    assert widest + look.run(f"{axis}.gap") <= look.run(f"{axis}._size")


def test_a_group_that_is_all_alike_has_no_advantage_only_where_none_has_one(look: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=2)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        sample["training"]["reward"] = 0.0
        sample["response_ids"] = [1]
        if sample["step"] == 1:
            sample["training"]["advantages"] = [0.0, 0.0, 0.0]
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    show(look, [run])
    heads = [head.split(" · ") for head in texts(look, "#samples-list .where")]
    assert [head[4] for head in heads] == ["all alike", "all alike: no advantage"]
    assert texts(look, "#samples-list .more")[0] == "1 token · ended by stop"


SHARMA = (
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425), ((50, -1, 2), (50, 0, 0), 2.3669),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((50, 2.49, -0.001), (50, -2.49, 0.0009), 7.1792), ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
)  # fmt: skip
"""Pairs of the test data of Sharma, Wu and Dalal (2005), and their differences."""


def test_the_measure_of_colours_is_the_published_one() -> None:
    found = [ciede2000(np.array(one), np.array(other)) for one, other, _ in SHARMA]
    assert found == pytest.approx([expected for *_, expected in SHARMA], abs=1e-4)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    red, green, blue = "#d62728", "#2ca02c", "#1f77b4"
    assert least_difference(red, green) < 0.5 * min(least_difference(red, blue), least_difference(green, blue))


@pytest.mark.parametrize("scheme", CARDS)
def test_lines_and_phases_are_told_apart_by_the_colour_blind_too(look: Chromium, tmp_path: Path, scheme: str) -> None:
    look.prefers(scheme)
    show(look, [write_run(tmp_path / "r")])
    lines = [look.run(f"css('--c{number}')") for number in range(8)]
    assert min(least_difference(a, b) for a, b in combinations(lines, 2)) > TOLD_APART
    assert min(contrast(line, CARDS[scheme]) for line in lines) >= 3  # WCAG 2.1, 1.4.11
    in_steps = ("generate", "reward", "log_probs", "reference", "advantages", "update", "sync", "evaluate", "other")
    phases = [look.run(f"phaseColor('{name}')") for name in in_steps]
    assert min(least_difference(a, b) for a, b in combinations(phases, 2)) > TOLD_APART
    good, bad = [
        "#" + "".join(f"{int(part):02x}" for part in look.run(f"css('--{name}')").split(",")) for name in ("good", "bad")
    ]
    assert least_difference(good, bad) > TOLD_APART


def test_bars_of_the_timeline_that_have_room_say_what_they_are(look: Chromium, tmp_path: Path) -> None:
    show(look, [write_run(tmp_path / "r")])
    bars = "[...document.querySelectorAll('#timeline .on-bar')]"
    assert set(look.run(f"{bars}.map((one) => one.textContent)")) == {"generate", "update"}
    inks = look.run(f"{bars}.map((one) => [getComputedStyle(one).fill, one.previousSibling.getAttribute('fill')])")
    assert len(inks) > 6
    for ink, under in inks:
        red, green, blue = (int(part) for part in ink.removeprefix("rgb(").removesuffix(")").split(","))
        assert contrast(f"#{red:02x}{green:02x}{blue:02x}", under) >= 4.5


CONTROLS = """[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility() && one.getClientRects().length)"""
FOCUSED = """(() => {
  const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
  const under = document.querySelector('header').getBoundingClientRect().bottom, inHeader = Boolean(one.closest('header'));
  const scrolls = one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight;
  return [CONTROLS.indexOf(one), scrolls, style.outlineStyle, parseFloat(style.outlineWidth),
    inHeader || box.bottom > under + 1 && box.top < innerHeight];
})()""".replace("CONTROLS", CONTROLS)


@pytest.mark.parametrize(("scheme", "width"), [("light", DESK), ("dark", PHONE)])
def test_every_control_is_reached_by_the_keyboard_and_seen(look: Chromium, tmp_path: Path, scheme: str, width: int) -> None:
    look.prefers(scheme)
    run = write_run(tmp_path / "r", steps=3)
    show_pictures(run)
    show(look, [run, write_run(tmp_path / "s", steps=3, lr=1e-3)], width)
    look.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    look.run("new Promise((done) => setTimeout(done, 100))")
    count = look.run(f"{CONTROLS}.length")
    assert count > 40
    accent = look.run("css('--accent')")
    reached: list[int] = []
    while len(reached) < count:
        look.press("Tab")
        place, scrolls, style, thick, in_sight = look.run(FOCUSED)
        assert (style, thick, in_sight) == ("solid", 2, True), look.run("document.activeElement.outerHTML.slice(0, 200)")
        assert place >= 0 or scrolls  # boxes that scroll are reached too
        reached += [place] if place >= 0 else []
    assert reached == list(range(count))  # in the order in which they stand
    assert contrast(accent, CARDS[scheme]) >= 3


def test_what_the_pointer_shows_keys_show_too(look: Chromium, tmp_path: Path) -> None:
    show(look, [write_run(tmp_path / "r")])
    card = "document.querySelector('[data-headline=\"reward/mean\"]')"
    look.run(f"{card}.querySelector('.plot').focus()")
    readings = []
    for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowRight", "End"):
        look.press(key)
        look.run("new Promise(requestAnimationFrame)")
        readings.append(look.run(f"{card}.querySelector('.readout').textContent"))
    assert readings == ["step 12: r 0.6", "step 11: r 0.55", "step 0: ", "step 1: r 0.05", "step 12: r 0.6"]
    look.press("+")
    look.run("new Promise(requestAnimationFrame)")
    assert look.run(f"{card}.plot.scales.x.max - {card}.plot.scales.x.min") < 11
    look.run(f"{card}.querySelector('button').focus()")
    look.press("Enter")
    assert look.run(
        "document.querySelector('dialog').open && document.querySelector('dialog').contains(document.activeElement)"
    )
    look.press("Escape")
    look.run("new Promise((done) => setTimeout(done, 50))")
    assert look.run(f"document.querySelector('dialog') === null && document.activeElement === {card}.querySelector('button')")


def test_the_numbers_of_a_token_are_told_without_a_pointer_on_it(look: Chromium, tmp_path: Path) -> None:
    show(look, [write_run(tmp_path / "r")], PHONE)
    sample = "document.querySelector('#samples-list .sample')"
    told = f"{sample}.querySelector('.token-facts').textContent"
    assert look.run(told) == ""
    look.run(f"{sample}.querySelector('.response').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        look.press(key)
    assert look.run(told) == "token 1, engine -1, trainer -1.25, advantage -0.5"
    look.press("Home")
    assert look.run(told).startswith("token 0, ")
    look.run(f"{sample}.querySelectorAll('.token')[2].click()")
    assert look.run(told).startswith("token 2, not sampled by the policy")
    assert look.run(f"{sample}.querySelectorAll('.chosen').length") == 1


def test_a_page_of_20000_samples_is_small_and_painted_within_a_second(
    look: Chromium, tmp_path: Path, record_property: Any
) -> None:
    run = write_run(tmp_path / "r", steps=312)
    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(2, 9))) for _ in range(4000)]
    with (run / "samples.jsonl").open("w") as file:
        for place in range(20_000):
            text = " ".join(chosen.choices(words, k=80))
            sample = {"step": 1 + place // 64, "sample_id": str(place), "group_id": str(place // 8), "prompt_text": text[:99],
                      "response_text": text, "rewards": {"r": 0.5}, "training": {"reward": place % 8 / 8}}  # fmt: skip
            file.write(json.dumps(sample) + "\n")
    show(look, [run])
    size = (tmp_path / "report.html").stat().st_size
    assert 5_000_000 < size < 10_000_000
    assert (
        "(samples.jsonl has 20000)" in texts(look, "#sample-count")[0]
        or "20000 samples found" in texts(look, "#sample-count")[0]
    )
    paints = []
    for _ in range(3):
        look.open_address("about:blank")
        look.open(tmp_path / "report.html", DESK)
        look.run("new Promise(requestAnimationFrame)")
        paints.append(look.run("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    record_property("first_paint_ms", paints)
    record_property("page_bytes", size)
    assert min(paints) < 1000
    interactive = look.run("performance.getEntriesByType('navigation')[0].domInteractive")
    assert np.median(paints) < interactive  # the rest of the page is read after it
