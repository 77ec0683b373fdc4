"""Metrics by data source are the figures of that source's samples alone."""

from __future__ import annotations

import pytest

from megarl.data.sample import Prompt, Sample
from megarl.errors import DataError
from megarl.experience.source_figures import MOST_SOURCES, DataSources
from tests.observe.documented import undocumented

VALUES = ["openai/gsm8k", "aime", "openai/gsm8k"]
PARTS = [[Prompt(f"train-{n}", "", [1], "", {"info": {"source": value}}) for n, value in enumerate(VALUES)]]


def sample(row: str, tokens: int, right: float | None) -> Sample:
    made = Sample(f"{row}/{tokens}", f"{row}@0", row, [1], [2] * tokens, [1] * tokens, [0.0] * tokens, [0] * tokens, "stop")
    made.rewards = {"reward_model": 0.3} if right is None else {"exact_number": right, "reward_model": 0.3}
    return made


SAMPLES = [sample("train-0", 1, 1), sample("train-1", 2, 0), sample("train-2", 3, 0), sample("train-0", 6, 1)]


def test_figures_are_those_of_the_samples_of_the_source() -> None:
    figures = DataSources.of(PARTS, "info.source").figures(SAMPLES, [1.5, -1.0, 0.25, 2.0])
    assert figures == {
        "source/openai_gsm8k/reward": (1.5 + 0.25 + 2.0) / 3,
        "source/openai_gsm8k/accuracy": 2 / 3,
        "source/openai_gsm8k/tokens_mean": 10 / 3,
        "source/openai_gsm8k/samples": 3,
        "source/aime/reward": -1.0,
        "source/aime/accuracy": 0,
        "source/aime/tokens_mean": 2,
        "source/aime/samples": 1,
    }
    assert undocumented(figures) == []


def test_without_a_function_that_judges_there_is_no_accuracy() -> None:
    figures = DataSources.of(PARTS, "info.source").figures([sample("train-1", 2, None)], [0.3])
    assert figures == {"source/aime/reward": 0.3, "source/aime/tokens_mean": 2, "source/aime/samples": 1}


def test_parts_of_a_mixture_are_sources_and_a_single_source_has_none() -> None:
    parts = [PARTS[0][:1], PARTS[0][1:]]
    figures = DataSources.of(parts, None).figures(SAMPLES, [1.0, 2.0, 3.0, 4.0])
    assert (figures["source/part_0/reward"], figures["source/part_1/reward"]) == (2.5, 2.5)
    assert (figures["source/part_0/samples"], figures["source/part_1/tokens_mean"]) == (2, 2.5)
    assert DataSources.of(PARTS, None).figures(SAMPLES, [0.0] * 4) == {}


def test_a_key_that_names_no_sources_is_refused() -> None:
    with pytest.raises(DataError, match=r"^row train-0 has no key 'inf' \(data\.source_key\) \(did you mean 'info'\?\)"):
        DataSources.of(PARTS, "inf.source")
    many = [Prompt(f"train-{n}", "", [1], "", {"id": n}) for n in range(MOST_SOURCES + 1)]
    with pytest.raises(
        DataError, match=r"^rows have more than 64 different values under 'id' \(data\.source_key\), such as '64'"
    ):
        DataSources.of([many], "id")
    assert len(set(DataSources.of([many[:-1]], "id").names.values())) == MOST_SOURCES
    alike = [Prompt("train-0", "", [1], "", {"s": "a/b"}), Prompt("train-1", "", [1], "", {"s": "a b"})]
    with pytest.raises(DataError, match=r"^rows have 'a/b' and 'a b' under 's' .* both are 'a_b' in metrics"):
        DataSources.of([alike], "s")
