"""docs/metrics.md: every name has a unit and a meaning; tests/themes/e2e/conftest.py holds it against what runs log."""

from __future__ import annotations

from tests.observe.documented import documented, undocumented


def test_names_are_grouped_once_and_have_units() -> None:
    units = documented()
    assert units["reward/mean"] == "1"
    assert units["critic/error_squared"] == "reward²"
    assert units[r"time/[\w.-]+_s"] == "s"
    assert len(units) > 60
    assert all(units.values())


def test_a_name_that_is_not_on_the_page_is_found() -> None:
    names = [
        "step",
        "reward/mean",
        "time/generate_s",
        "time_fraction/other",
        "memory/policy_peak_gib",
        "reward/meen",
        "time/generate",
    ]
    assert undocumented(names) == ["reward/meen", "time/generate"]
