"""The report in a real browser that prefers dark pages, and on a phone: text can be read, and nothing hangs over the edge."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.observe.report import build_page
from megarl.observe.run_record import read_run
from tests.observe.chromium import BINARY, Chromium
from tests.observe.recorded import show_pictures, write_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium (apt-get install chromium)")
PHONE = 390
READABLE = 4.5
"""Contrast of text with what is behind it, by WCAG 2.1 level AA."""

# Every piece of text that is shown, but names on the timeline's bars (test_report_look.py):
# its contrast with the background that it has, through all that is see-through.
CONTRASTS = """(() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const over = (top, alpha, below) => below.map((value, place) => alpha * top[place] + (1 - alpha) * value);
  const light = (color) => {
    const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    if (node === null) return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    const [r, g, b, alpha = 1] = numbers(getComputedStyle(node).backgroundColor);
    return over([r, g, b], alpha, behind(node.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || node.closest("script, style, option, title, .on-bar") || !node.getClientRects().length) continue;
    let seen = 1;
    for (let one = node; one; one = one.parentElement) seen *= Number(getComputedStyle(one).opacity);
    const below = behind(node), [r, g, b, alpha = 1] = numbers(node.closest("svg") ? style.fill : style.color);
    const [high, low] = [light(over([r, g, b], alpha * seen, below)), light(below)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), text.data.trim().slice(0, 40), node.className.baseVal ?? node.className]);
  }
  return found;
})()"""
# Elements that reach beyond the right edge and are in no box that scrolls.
OVERHANGING = """[...document.body.querySelectorAll("*")].filter((node) => {
  const box = node.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 0.5) return false;
  for (let one = node; one; one = one.parentElement) {
    const scrolls = ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX);
    if (scrolls && one.getBoundingClientRect().right <= innerWidth + 0.5) return false;
  }
  return true;
}).map((node) => node.outerHTML.slice(0, 120))"""
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
LINE = {"light": (0x0B, 0x62, 0xC4), "dark": (0x6C, 0xB0, 0xFF)}
"""The colour of the first run's line."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, one with a long name, pictures and experts."""
    folder = tmp_path_factory.mktemp("runs")
    long = "a-run-with-a-long-name-" * 4
    runs = [write_run(folder / "a"), write_run(folder / "b", lr=3e-5), write_run(folder / long, seed=1)]
    show_pictures(runs[0])
    experts = '{"step": 1, "policy": {"layers": [1, 3], "loads": [[1, 1, 1], [0, 3, 0]], "entropy": [1.1, 0.5]}}\\n'
    (runs[0] / "experts.jsonl").write_text(experts)
    file = folder / "report.html"
    file.write_text(build_page([read_run(run) for run in runs]))
    return file


@pytest.fixture
def opened(browser: Chromium, page: Path, request: pytest.FixtureRequest) -> Iterator[Chromium]:
    """The page with everything unfolded, as the test's parameters say."""
    scheme, width = getattr(request, "param", ("light", 1400))
    browser.prefers(scheme)
    browser.open(page, width)
    browser.run(OPEN_ALL)
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    yield browser
    assert browser.complaints == []
    browser.prefers("light")


def luminance(color: str) -> float:
    """The relative luminance of `rgb(…)`, 0 black to 1 white."""
    values = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def colors(browser: Chromium, selector: str) -> tuple[float, float]:
    """Luminance of an element's text and background."""
    style = f"getComputedStyle(document.querySelector({selector!r}))"
    text, back = browser.run(f"[{style}.color, {style}.backgroundColor]")
    return luminance(text), luminance(back)


@pytest.mark.parametrize("opened", [("light", 1400), ("dark", 1400), ("dark", PHONE)], indirect=True)
def test_all_text_stands_out_from_what_is_behind_it(opened: Chromium) -> None:
    found: list[list[Any]] = opened.run(CONTRASTS)
    assert len(found) > 300
    assert sorted(one for one in found if one[0] < READABLE) == []


def drawn(browser: Chromium) -> set[str]:
    """The schemes in whose colour the line of the first chart is drawn; read without a picture, which would draw it anew."""
    url = browser.run("document.querySelector('[data-headline=\"reward/mean\"] canvas').toDataURL()")
    points = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")).reshape(-1, 3)
    return {scheme for scheme, color in LINE.items() if (np.abs(points - np.array(color)).max(axis=1) < 8).sum() > 20}


def test_a_page_is_dark_where_the_system_is_also_when_it_changes(opened: Chromium) -> None:
    for selector in ("body", ".run", ".chart", "input"):
        text, back = colors(opened, selector)
        assert (text < 0.2, back > 0.9) == (True, True), selector
    assert drawn(opened) == {"light"}
    opened.prefers("dark")
    opened.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for selector in ("body", ".run", ".chart", "input"):
        text, back = colors(opened, selector)
        assert (text > 0.3, back < 0.02) == (True, True), selector
    assert drawn(opened) == {"dark"}


@pytest.mark.parametrize("opened", [("light", PHONE)], indirect=True)
def test_on_a_phone_nothing_hangs_over_the_edge(opened: Chromium) -> None:
    assert opened.run("document.documentElement.scrollWidth") == PHONE
    assert opened.run(OVERHANGING) == []
    swatches = opened.run("[...document.querySelectorAll('.swatch')].map((one) => one.getBoundingClientRect().width)")
    assert set(swatches) == {11}  # also beside a name that needs the room
    wide = "[...document.querySelectorAll('table')].filter((one) => one.getBoundingClientRect().width > innerWidth)"
    assert opened.run(f"{wide}.length") > 0  # else this tests nothing
    assert opened.run(f"{wide}.every((one) => one.closest('.scrolls').scrollWidth > one.closest('.scrolls').clientWidth)")
    opened.run("document.querySelector('#config .scrolls, #comparison .scrolls').scrollLeft = 40")
    assert opened.run("document.querySelector('#config .scrolls, #comparison .scrolls').scrollLeft") == 40
    assert opened.run("scrollX") == 0


@pytest.mark.parametrize("opened", [("light", PHONE)], indirect=True)
def test_on_a_phone_the_text_of_drawings_can_be_read(opened: Chromium) -> None:
    heights = opened.run("[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height)")
    assert len(heights) > 50
    assert min(heights) >= 7
