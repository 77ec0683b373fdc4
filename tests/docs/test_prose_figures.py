"""Figures in sentences come from benchmarks/results/, or stand here: what each is, and so when it can be wrong.

A new figure in prose is either a phrase of tools/docs/phrases.py, made of a committed file, or is told with the day on which it
was measured, or with a link to the evidence that has it; bounds of the program and what others say need neither.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs import prose_figures
from tests.docs.pages import DOCS, ROOT

BOUND = "a bound, default or size that the program has, or that a user is told to set"
GIVEN = "the work, the machine or the rate of somebody else's product, file or run"
WORKED_OUT = "arithmetic that the page shows, an estimate that says so, or what `megarl plan` says of a config that is named"
ONCE = "measured by hand, where no file holds it: its section has the date"
CITED = "measured: its section links to the page of evidence that has the numbers"

BY_HAND: dict[str, dict[str, str]] = {
    "../README.md": {GIVEN: "12 GiB; 16 GiB", CITED: "16 %; 24 %"},
    "add_a_reward.md": {BOUND: "600 s; 60 s"},
    "agents.md": {ONCE: "25 %; 94 %; 4 ms; 17 ms; 2 ms"},
    "audio.md": {BOUND: "25 ms"},
    "conversion.md": {BOUND: "128 MiB; 5 GiB; 1 MiB"},
    "data.md": {BOUND: "1 GB"},
    "distillation.md": {CITED: "55 %; 90 %", WORKED_OUT: "4 GB"},
    "episodes.md": {ONCE: "30 %; 95 %; 5.6 s; 25 %; 71 %"},
    "evidence/benchmarks.md": {GIVEN: "24 GiB"},
    "evidence/cluster.md": {ONCE: "149 s"},
    "evidence/costs.md": {
        ONCE: "0.5 s; 3.3 s; 4,096 and 8.2 s; 5.5 s; 756 GiB; 250 MiB; 1,250 GiB; 6.3 s; 314 MiB; 1.7 times",
        BOUND: "12.8 s; 5 s; 32 MiB; 5 %",
        WORKED_OUT: "17.2 GB; 8.6 GB",
    },
    "evidence/faults.md": {
        BOUND: "1 to 4 s; 20 s; 400 s; 1,200 s; 10 to 20 s; 31 and 61 s; 16 MiB; 3 %",
        GIVEN: "96 minutes; 300 s; 30 s; 1.6 GB",
        ONCE: "20.4 s; 151 s; 99 s",
    },
    "evidence/gpu.md": {GIVEN: "126 GiB; 79.6 GiB", ONCE: "0.74 nats; 0.5 GiB; 67.0 GiB; 68.0 GiB"},
    "evidence/learning.md": {
        GIVEN: "24 GiB",
        ONCE: "16.4 %; 56.2 %; 49.2 %; 51.6 %; 58.6 %; 24.2 %; 54.7 %; 0.56 nats; 53 s; 3 minutes; 24 s; 15 to 16 s; 58 %;"
        " 35 %; 6 %; 81.8 %; 65 %; 90 %; 0 %; 90.2 %; 88.8 %; 55 %; 95 %; 100 %; 9.8 MB; 538 MB",
    },
    "evidence/parity.md": {ONCE: "0.049 nats; 2.5 nats", WORKED_OUT: "1.1 nats; 0.17 %; 12 times; 7 times"},
    "evidence/plans.md": {
        BOUND: "10 %; 98 %; 6 ms; 20 µs; 150 µs; 0.3 ms; 3.75 ms; 0.3 s; 0.1 ms; 4 GB/s; 6 %",
        WORKED_OUT: "86 GB; 88 GB; 46 s; 1.7 times",
        GIVEN: "20.1 s; 244 s; 152 s",
    },
    "evidence/rollouts.md": {BOUND: "12 ms; 3 s; 1e-5 nats", WORKED_OUT: "334 s; 460 s", ONCE: "0.2 to 0.4 s"},
    "evidence/weight_updates.md": {ONCE: "240 MiB; 1.23 and 1.31 times", BOUND: "15 %; 1.5 times; 1.25 times"},
    "fp8.md": {ONCE: "1.2 nats"},
    "gpu.md": {BOUND: "16 times; 90 s"},
    "gpu_paths.md": {
        BOUND: "768 MiB; 64 MiB; 1 GiB; 128 MiB; 1.9 GB",
        WORKED_OUT: "10 %; 0.2 s; 13 s; 0.3 to 0.5 GB; 8.8 GB",
    },
    "hpc.md": {GIVEN: "30 s"},
    "limits.md": {WORKED_OUT: "0.12 %"},
    "lora.md": {WORKED_OUT: "1.8 %; 18 GB; 0.7 GB; 2.2 GB; 0.8 GB; 141 GB"},
    "methods.md": {BOUND: "1e-4 nats; 10 nats; 10 %"},
    "metrics.md": {BOUND: "10 nats"},
    "operations.md": {
        BOUND: "30 minutes; 1 s; 300 s; 60 s; 15 s; 5 %; 2 s; 1800 s; 600 s; 2 to 10 s; 10 s; 180 s; 20 s",
        ONCE: "14.16 MB; 71.5 %; 2.8 %; 4.5 %; 4.2 %; 5.3 %",
    },
    "performance.md": {
        BOUND: "768 MiB; 64 MiB", GIVEN: "64 MB; 989 TFLOP/s; 3.35 TB/s", CITED: "3.3 s; 250 MiB; 6.3 s; 314 MiB",
    },
    "planning.md": {
        GIVEN: "80 GB", BOUND: "1 GB; 1.9 GB; 5 %; 10 GiB; 1 GiB; 3 times; 15 %; 2 %",
        WORKED_OUT: "2.1 MB; 0.1 MB", ONCE: "4.6 s",
    },
    "quickstart.md": {CITED: "16 %; 49 to 59 %; 24 %; 55 %"},
    "resharding.md": {BOUND: "128 MiB; 1 GiB; 64 KiB; 1 MiB; 16 MiB; 64 MiB"},
    "rewards.md": {BOUND: "16 MiB; 256 MiB"},
    "rollouts.md": {BOUND: "100 times; 1 GiB; 5 s"},
    "run_that_does_not_learn.md": {BOUND: "3 to 10 times"},
    "sandboxes.md": {BOUND: "30 s; 64 times"},
    "security.md": {
        BOUND: "16 MiB; 1 GiB; 20 s; 64 MiB; 10 s; 10 KiB; 15 s; 32 KiB; 256 MiB", GIVEN: "70 MB; 60 s",
    },
    "serve.md": {BOUND: "16 MiB; 2 GiB; 10 s; 4 GiB"},
    "sparse_attention.md": {WORKED_OUT: "31 kB; 1 KiB; 62 kB; 4 KiB; 250 kB; 16 KiB; 1.0 MB"},
    "speculative.md": {ONCE: "2.78 to 0.58 nats"},
    "training.md": {CITED: "65 %; 90 %"},
    "vision.md": {ONCE: "2 seconds; 66 to 82 %", BOUND: "16 MB; 200 times; 80 %"},
    "watching.md": {
        BOUND: "30 seconds; 8.5 MB; 10 minutes; 5 minutes; 2 minutes; 0.05 nats; 5 %; 1 s", GIVEN: "450 MB",
        ONCE: "8.3 MB; 9 s; 113 MB; 0.15 to 0.23 s; 1.4 to 1.7 s",
    },
}  # fmt: skip
"""By page below docs/ and kind, the figures of its sentences that no file of benchmarks/results/ gives."""


def sections(page: str) -> list[str]:
    """The page's sections without what is made of files."""
    sys.path.append(str(ROOT / "tools/docs"))
    try:
        import phrases
    finally:
        sys.path.pop()
    return prose_figures.prose(prose_figures.text_of(page), phrases.PHRASES.get(page, list)())


def listed(page: str, *kinds: str) -> list[str]:
    """The page's figures of these kinds."""
    return [figure for kind in kinds for figure in BY_HAND.get(page, {}).get(kind, "").split("; ") if figure]


@pytest.mark.parametrize("page", prose_figures.pages())
def test_a_figure_in_prose_is_made_of_a_file_or_known(page: str) -> None:
    found = {figure for section in sections(page) for figure in prose_figures.figures(section)}
    known = listed(page, BOUND, GIVEN, WORKED_OUT, ONCE, CITED)
    assert found - {*known} == set(), "make it a phrase (tools/docs/phrases.py), or date it and add it to BY_HAND"
    assert {*known} - found == set(), "the page does not have it any more"
    assert len(known) == len({*known})


@pytest.mark.parametrize("page", [page for page in BY_HAND if listed(page, ONCE)])
def test_what_was_measured_by_hand_has_its_day(page: str) -> None:
    texts = re.split(r"^#{2,} ", prose_figures.text_of(page), flags=re.MULTILINE)
    intro = texts[0]
    for figure in listed(page, ONCE):
        holding = [text for text in texts if figure in " ".join(text.split())]
        assert any(prose_figures.DATE.search(text + intro) for text in holding), f"{page}: {figure} has no date"


@pytest.mark.parametrize("page", [page for page in BY_HAND if listed(page, CITED)])
def test_a_figure_with_a_link_to_evidence_is_the_evidence_s(page: str) -> None:
    """Rounded as the page rounds it."""
    for figure in listed(page, CITED):
        [section] = [text for text in sections(page) if figure in prose_figures.figures(text)]
        linked = re.findall(r"\]\((?:docs/)?(evidence/\w+\.md)", section)
        numbers = [n for name in linked for n in re.findall(r"\d+(?:\.\d+)?", (DOCS / name).read_text())]
        for number in re.findall(r"\d+(?:\.\d+)?", figure):
            digits = len(number.partition(".")[2])
            assert number in [f"{float(n):.{digits}f}" for n in numbers], f"{page}: {figure} is not in {linked}"


def test_figures_are_found_and_code_tables_and_phrases_are_not() -> None:
    text = (
        "# Title\nIt takes 2.4 ms, 1,024 MiB or 16 to\n24 s; 1 − 2s of 80GB are none.\n\n"
        "<!-- a: begin -->\n| 3 s |\n<!-- a: end -->\n"
        "## More\n`sleep 5 s` and 7.5 % of\nall, on 2026-11-30.\n```\n9 s\n```\nIn 8 s by the file.\n"
    )
    first, second = prose_figures.prose(text, ["In 8 s by the file"])
    assert prose_figures.figures(first) == ["2.4 ms", "1,024 MiB", "16 to 24 s"]
    assert prose_figures.figures(second) == ["7.5 %"]
    assert [bool(prose_figures.DATE.search(part)) for part in (first, second)] == [False, True]
