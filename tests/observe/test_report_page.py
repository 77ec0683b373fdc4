"""The report in a real browser: it draws what the runs hold, its filters filter, and nothing in a run can act in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.observe.report import build_page, page_data
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import HARM, show_between_turns, show_pictures, write_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one run and a run of another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "a"), write_run(folder / "a-seed1", seed=1), write_run(folder / "b", lr=3e-5)]
    file = folder / "report.html"
    file.write_text(build_page([read_run(run) for run in runs]))
    return file


def texts(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)")


def test_every_section_is_there_without_a_complaint(opened: Chromium, tmp_path: Path) -> None:
    sections = ["Overview", "Curves", "Samples", "Timeline", "Distributions", "Comparison", "Config", "Environment", "Faults"]
    assert texts(opened, "h2") == texts(opened, "nav a") == sections
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    opened.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_no_text_of_a_run_becomes_markup(opened: Chromium, page: Path) -> None:
    assert opened.run("document.title") == "megarl: a, a-seed1, b"
    assert opened.run("document.images.length") == 0
    assert opened.run("[...document.scripts].filter((one) => one.type !== 'application/json').length") == 2
    assert HARM not in page.read_text()
    opened.fill("#sample-text", HARM.lower())
    assert opened.run("document.querySelectorAll('#samples-list .response')[0].textContent").endswith(HARM)
    assert HARM in texts(opened, "#faults td")


def test_a_chart_has_a_line_per_run_a_mean_and_a_band(opened: Chromium) -> None:
    chart = "document.querySelector('[data-headline=\"reward/mean\"]')"
    labels = f"{chart}.plot.series.map((line) => line.label).filter((label) => label && label !== 'Value')"
    assert opened.run(labels) == ["a", "a-seed1", "mean", "b"]
    assert opened.run(f"{chart}.plot.bands.length") == 1
    low, high = (opened.run(f"{chart}.plot.data[{chart}.plot.bands[0].series[{place}]].at(-1)") for place in (1, 0))
    assert (low, high) == (pytest.approx(0.6), pytest.approx(0.7))
    opened.run(f"{chart}.plot.setCursor({{left: {chart}.plot.over.clientWidth - 1, top: 5}})")
    opened.run("new Promise(requestAnimationFrame)")
    readout = opened.run(f"{chart}.querySelector('.readout').textContent")
    assert readout == "step 12: a 0.6, a-seed1 0.7, mean 0.65, b 0.6"


def test_curves_are_smoothed_as_an_unbiased_moving_average(opened: Chromium) -> None:
    """Against the closed form: the weight of the value k steps ago is 0.9 ** k, over the sum of these weights."""
    opened.fill("#curve-smooth", "0.9")
    chart = "document.querySelector('[data-headline=\"reward/mean\"]')"
    row = opened.run(f"{chart}.plot.data[{chart}.plot.series.findIndex((line) => line.label === 'b smoothed')]")
    values = [step / 20 for step in range(1, 13)]
    weights = [[0.9 ** (at - k) for k in range(at + 1)] for at in range(12)]
    expected = [sum(w * v for w, v in zip(ws, values, strict=False)) / sum(ws) for ws in weights]
    assert [value for value in row if value is not None] == pytest.approx(expected)
    opened.fill("#curve-smooth", "0")
    opened.run("document.querySelector('#curve-log').click()")
    assert opened.run(f"{chart}.plot.scales.y.distr") == 3
    opened.run("document.querySelector('#curve-log').click()")
    opened.run(f"{chart}.querySelector('button').click()")
    assert opened.run("document.querySelector('dialog').open && document.querySelector('dialog canvas').clientWidth") > 1000
    opened.run("document.querySelector('dialog button').click()")


def test_the_metric_filter_keeps_what_matches(opened: Chromium) -> None:
    opened.fill("#metric-text", "loss")
    shown = (
        "[...document.querySelectorAll('[data-metric]')].filter((chart) => !chart.hidden).map((chart) => chart.dataset.metric)"
    )
    assert opened.run(shown) == ["policy/loss"]
    assert texts(opened, "#constant summary") == ["constant: 1 metric"]
    assert texts(opened, "#constant td") == ["eval/accuracy", "0.25", "0.25", "0.25"]


def test_the_timeline_shows_the_steps_asked_for(opened: Chromium) -> None:
    def spans() -> int:
        return opened.run("document.querySelectorAll('#timeline rect').length")

    assert spans() == 3 * 4
    opened.fill("#trace-from", "1")
    assert spans() == 12 * 4
    assert texts(opened, "#timeline svg > text")[-3:] == ["driver", "policy 0", "policy 1"]
    widths = "[...document.querySelectorAll('#timeline rect')].map((bar) => Number(bar.getAttribute('width')))"
    driver = opened.run(widths)[:2]
    assert driver[0] / driver[1] == pytest.approx(6 / 3, rel=1e-6)


def test_profiled_steps_are_linked_from_where_the_page_is(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a run")
    trace = run / "profile" / "step_000003" / "policy-0.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"")
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "report.html"
    page.write_text(build_page([read_run(run)], page.parent))
    browser.open(page)
    assert texts(browser, ".profiles a") == ["profile/step_000003/policy-0.trace.json.gz"]
    assert browser.run("document.querySelector('.profiles a').href") == trace.as_uri()
    assert browser.complaints == []


NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty", "javascript:alert(1)", HARM)


def test_names_of_metrics_rewards_runs_and_files_are_names_and_nothing_else(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "javascript:document.title='taken over'" / "<b>'\"", steps=3)
    odd = dict.fromkeys(NAMES, 0.5) | {f"{name}/x": 0.25 for name in NAMES}
    for file in ("metrics.jsonl", "samples.jsonl", "trace.jsonl"):
        rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
        for row in rows:
            if file == "metrics.jsonl":
                row |= odd
            elif file == "samples.jsonl":
                row |= {"rewards": odd, "finish_reason": "__proto__", "group_id": "__proto__"}
            else:
                row["spans"] |= {name: [["generate", 0.0, 1.0]] for name in NAMES}
        (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps({"eval": {"before": odd}, "machine": odd, "versions": odd}))
    trace = run / "profile" / "javascript:alert(1)" / "a.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"")
    page = run.parent / "report.html"
    page.write_text(build_page([read_run(run), read_run(run)], page.parent))
    browser.open(page)
    assert browser.run("document.links.length > 0 && [...document.links].every((one) => one.protocol === 'file:')")
    assert browser.run("document.images.length") == 0
    assert browser.run("document.title") == "megarl: <b>'\", <b>'\""
    assert browser.run("Object.keys(Object.prototype).length") == 0
    assert browser.complaints == []


def shapes(browser: Chromium, place: int) -> list[list[str]]:
    """Class, x, y, width and height of the boxes over the pictures of a sample's card."""
    card = f"document.querySelectorAll('#samples-list .sample')[{place}]"
    names = "['class', 'x', 'y', 'width', 'height']"
    return browser.run(f"[...{card}.querySelectorAll('rect')].map((box) => {names}.map((name) => box.getAttribute(name)))")


def test_pictures_are_shown_with_the_boxes_of_the_answer(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    digests = show_pictures(run)
    text = build_page([read_run(run)])
    assert [text.count(f'"{digest}":{{"url":"data:image/jpeg;base64,') for digest in digests] == [1, 1]
    (tmp_path / "report.html").write_text(text)
    browser.open(tmp_path / "report.html")
    browser.fill("#sample-order", "oldest")
    cards = "[...document.querySelectorAll('#samples-list .sample')]"
    labels = f"{cards}.slice(0, 3).map((card) => card.querySelector('svg.picture').getAttribute('aria-label'))"
    assert browser.run(labels) == [f"picture {digests[place]}" for place in (0, 1, 0)]
    box = "document.querySelector('svg.picture').getBoundingClientRect()"
    assert browser.run(f"[{box}.width, {box}.height]") == pytest.approx([320, 160], abs=3)
    drawn = "(async () => { const one = new Image(); one.src = document.querySelector('image').getAttribute('href');"
    assert browser.run(f"{drawn} await one.decode(); return [one.width, one.height] }})()") == [320, 160]
    gold, answered = ["box gold", "100", "50", "100", "100"], ["box answered", "90", "45", "90", "55"]
    assert shapes(browser, 1)[:2] == [gold, answered]
    assert shapes(browser, 0) == []
    browser.fill("#sample-boxes", "thousandths")
    assert shapes(browser, 1)[1] == ["box answered", "80.64", "20.16", "80.64", "24.64"]
    browser.fill("#sample-boxes", "none")
    assert shapes(browser, 1) == []
    browser.fill("#sample-from", "12")
    assert texts(browser, "#samples-list .sample:last-child .pictures .note") == ["video, 8 of 20 frames:"]
    assert browser.run("document.querySelectorAll('#samples-list .sample:last-child svg.picture').length") == 8
    assert browser.run("document.title") == "megarl: r"
    assert browser.run("[...document.scripts].filter((one) => one.type !== 'application/json').length") == 2
    assert browser.complaints == []


def test_pictures_between_turns_stand_among_the_tokens(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    first, second = show_pictures(run)
    show_between_turns(run, second)
    (tmp_path / "report.html").write_text(build_page([read_run(run)]))
    browser.open(tmp_path / "report.html")
    browser.fill("#sample-order", "oldest")
    card = "document.querySelector('#samples-list .sample')"
    labels = "[...{}.querySelectorAll('svg.picture')].map((one) => one.getAttribute('aria-label'))"
    assert browser.run(labels.format(f"{card}.querySelector('.response')")) == [f"picture {second}"]
    assert browser.run(labels.format(card)) == [f"picture {first}", f"picture {second}"]
    pieces = f"[...{card}.querySelector('.response').children].map((one) => one.textContent || one.tagName)"
    assert browser.run(pieces) == ["look", "DIV", "!", "two"]
    assert browser.complaints == []


def test_pictures_that_are_not_there_are_said(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    missing, damaged = show_pictures(run)
    (run / "media" / f"{missing}.png").unlink()
    (run / "media" / f"{damaged}.png").write_bytes(b"\x89PNG")
    (tmp_path / "report.html").write_text(build_page([read_run(run)]))
    browser.open(tmp_path / "report.html")
    browser.fill("#sample-order", "oldest")
    notes = texts(browser, "#samples-list .picture.note")
    assert notes[0] == f"{missing[:12]}: the file is missing"
    assert notes[1].startswith(f"{damaged[:12]}: cannot be read: ")
    assert browser.complaints == []


def test_a_run_that_has_only_begun_can_be_shown(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "nan"}\n{"step": 2, "rew')
    (tmp_path / "report.html").write_text(build_page([read_run(tmp_path / "r")]))
    browser.open(tmp_path / "report.html")
    assert "No samples were written." in browser.run("document.body.textContent")
    assert browser.complaints == []


def test_experts_are_a_map_of_layers_and_experts(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    maps = [
        {"step": 1, "policy": {"layers": [1, 3], "loads": [[1.0, 1.0, 1.0], [0.0, 3.0, 0.0]], "entropy": [1.0986, 0.5]}},
        {"step": 2, "policy": {"layers": [1, 3], "loads": [[0.5, 1.5, 1.0], [1.0, 1.0, 1.0]], "entropy": [1.0, 1.0]}},
    ]
    (run / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in maps))
    (tmp_path / "report.html").write_text(build_page([read_run(run)]))
    browser.open(tmp_path / "report.html")
    fills = "[...document.querySelectorAll('#experts-map rect')].map((cell) => cell.getAttribute('fill'))"
    less, even, more = "rgba(var(--good), 0.500)", "rgba(var(--bad), 0.000)", "rgba(var(--bad), 0.500)"
    assert browser.run(fills) == [less, more, even, even, even, even]
    browser.fill("#experts-step", "1")
    idle, busiest = "rgba(var(--good), 1.000)", "rgba(var(--bad), 1.000)"
    assert browser.run(fills) == [even, even, even, idle, busiest, idle]
    assert texts(browser, "#experts-map rect title")[4] == "layer 3, expert 1: 3 of the mean load"
    assert [text for text in texts(browser, "#experts-map svg > text") if "nats" in text] == [
        "max 1, 1.099 nats",
        "max 3, 0.5 nats",
    ]
    assert browser.complaints == []


def test_a_page_has_room_for_some_steps_of_many_experts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    loads = [[1.0] * 500 for _ in range(100)]
    rows = [{"step": step, "policy": {"layers": [*range(100)], "loads": loads, "entropy": [1.0] * 100}} for step in range(9)]
    (run / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step"] for row in page_data([read_run(run)])["runs"][0]["experts"]] == [0, 2, 5, 8]
