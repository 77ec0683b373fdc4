"""The six large charts of the report in a real browser: what each draws of a run's metrics, and what the options do to them."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.report import build_page
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import write_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")

STEPS = 8
PHASES = {"generate": 3.0, "update": 2.0, "sync": 0.5}


def row(step: int) -> dict[str, float]:
    """Metrics of a step, each with a value that is its own."""
    metrics = {"step": step, "reward/mean": step / 10, "kl/reference": 10.0**-step, "policy/entropy": 2 - step / 8}
    metrics |= {"response/tokens_mean": 100.0 + step, "response/truncated": step / 16, "policy/grad_norm": 1 / step}
    metrics |= {f"time/{phase}_s": seconds * step for phase, seconds in PHASES.items()}
    metrics |= {"time/step_s": sum(PHASES.values()) * step, "speed/tokens_per_s": 1000.0}
    return metrics | ({"eval/reward": step / 20} if step % 4 == 0 else {})


ROWS = [row(step) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder / "a", steps=STEPS)
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    file = folder / "report.html"
    file.write_text(build_page([read_run(run)]))
    return file


def plot(name: str) -> str:
    return f"document.querySelector('[data-headline=\"{name}\"]').plot"


def drawn(browser: Chromium, name: str) -> dict[str, list[Any]]:
    """What a chart draws: its places, and the values of each line by its label."""
    script = f"{plot(name)}.series.map((line, at) => [at ? line.label : 'places', [...{plot(name)}.data[at]]])"
    return dict(browser.run(script))


def column(name: str) -> list[float | None]:
    return [one.get(name) for one in ROWS]


def test_there_are_six_in_the_order_in_which_a_run_is_judged(opened: Chromium) -> None:
    titles = "[...document.querySelectorAll('[data-headline] h3')].map((node) => node.firstChild.textContent.trim())"
    shown = ["reward", "KL to the reference", "entropy", "response length", "gradient norm", "seconds by phase"]
    assert opened.run(titles) == shown


def test_the_reward_has_evaluations_as_points(opened: Chromium) -> None:
    assert drawn(opened, "reward/mean") == {
        "places": column("step"), "a": column("reward/mean"), "a held-out": column("eval/reward")
    }  # fmt: skip
    assert opened.run(f"{plot('reward/mean')}.series[2].points.show()") is True


def test_lengths_have_the_share_that_was_cut_on_an_axis_of_its_own(opened: Chromium) -> None:
    lines = drawn(opened, "response/tokens_mean")
    assert (lines["a"], lines["a cut"]) == (column("response/tokens_mean"), column("response/truncated"))
    scales = opened.run(f"{plot('response/tokens_mean')}.series.slice(1).map((line) => line.scale)")
    assert scales == ["y", "share"]


@pytest.mark.parametrize("name", ["kl/reference", "policy/entropy", "policy/grad_norm"])
def test_one_line_is_one_metric(opened: Chromium, name: str) -> None:
    assert drawn(opened, name) == {"places": column("step"), "a": column(name)}


def test_phases_stand_one_above_the_other(opened: Chromium) -> None:
    lines = drawn(opened, "time")
    tops = dict(zip(PHASES, accumulate(PHASES.values()), strict=True))
    for phase, top in tops.items():
        assert lines[phase] == pytest.approx([top * step for step in range(1, STEPS + 1)])
    assert list(lines) == ["places", *reversed(PHASES)]  # the highest is drawn first, so that it hides no other
    fills = opened.run(f"{plot('time')}.series.slice(1).map((line) => line.fill())")
    assert len({*fills}) == len(PHASES)


def test_the_axis_shows_steps_tokens_or_hours(opened: Chromium) -> None:
    seconds = [*accumulate(one["time/step_s"] for one in ROWS)]
    opened.fill("#curve-x", "tokens")
    assert drawn(opened, "reward/mean")["places"] == pytest.approx([1000 * one for one in seconds])
    opened.fill("#curve-x", "hours")
    assert drawn(opened, "kl/reference")["places"] == pytest.approx([one / 3600 for one in seconds], abs=1e-6)
    assert drawn(opened, "kl/reference")["a"] == column("kl/reference")
    opened.fill("#curve-x", "step")
    assert drawn(opened, "time")["places"] == column("step")


def test_a_logarithmic_scale_is_one(opened: Chromium) -> None:
    """A KL that falls tenfold each step is a straight line."""
    heights = f"{plot('kl/reference')}.data[1].map((value) => {plot('kl/reference')}.valToPos(value, 'y'))"

    def apart() -> list[float]:
        at = opened.run(heights)
        return [below - above for above, below in pairwise(at)]

    assert max(apart()) > 10 * min(apart())
    opened.run("document.getElementById('curve-log').click()")
    assert apart() == pytest.approx([apart()[0]] * (STEPS - 1), rel=0.02)
    assert drawn(opened, "kl/reference")["a"] == column("kl/reference")
    opened.run("document.getElementById('curve-log').click()")


def test_a_chart_opens_in_full_size_and_closes(opened: Chromium) -> None:
    small = opened.run(f"{plot('policy/entropy')}.width")
    opened.run("document.querySelector('[data-headline=\"policy/entropy\"] button').click()")
    assert opened.run("document.querySelector('dialog#full h3').textContent") == "entropy"
    assert opened.run("document.querySelector('dialog#full canvas').clientWidth") > 1.5 * small
    opened.run("document.querySelector('dialog#full').close()")
    assert opened.run("new Promise((done) => setTimeout(() => done(document.querySelector('dialog')), 50))") is None
