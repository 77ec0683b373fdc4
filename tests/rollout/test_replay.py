"""Replay gives back what was recorded, to the last bit, and says what it lacks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from megarl.data.sample import Sample
from megarl.errors import EngineError
from megarl.rollout import EngineRequest, SamplingParams
from megarl.rollout.engines.replay import ReplayEngine

PARAMS = SamplingParams(max_new_tokens=4)


def recorded(tmp_path: Path) -> Path:
    """Two groups of two samples, interleaved."""
    file = tmp_path / "samples.jsonl"
    samples = [
        Sample(
            sample_id=f"row-{row}/0/{i}",
            group_id=f"row-{row}/0",
            row_id=f"row-{row}",
            prompt_ids=[1, row],
            response_ids=[10 * row, i],
            sampled_mask=[1, 1],
            rollout_log_probs=[-0.1 - row / 3, -1e-7 * i],
            weight_versions=[4, 5],
            finish_reason="stop" if i else "length",
        )
        for i in (0, 1)
        for row in (7, 8)
    ]
    file.write_text("".join(json.dumps(sample.to_dict()) + "\n" for sample in samples))
    return file


def ask(file: Path, prompts: list[list[int]], keys: list[str] | None, n: int = 2) -> list:
    """What the replay engine answers, weights being version 0."""

    async def scenario() -> list:
        engine = await ReplayEngine.start("no-model-needed", replay_from=file)
        await engine.begin_update(0)
        await engine.end_update(0)
        return await engine.generate(EngineRequest(prompts, PARAMS, n=n, keys=keys))

    return asyncio.run(scenario())


def test_recorded_responses_come_back_bit_for_bit_and_by_key(tmp_path: Path) -> None:
    groups = ask(recorded(tmp_path), [[1, 8], [1, 7]], ["row-8/0", "row-7/0"])
    assert [[one.response_ids for one in group] for group in groups] == [[[80, 0], [80, 1]], [[70, 0], [70, 1]]]
    assert groups[0][1].log_probs == [-0.1 - 8 / 3, -1e-7]
    assert groups[1][0].weight_versions == [4, 5]
    assert [one.finish_reason for one in groups[0]] == ["length", "stop"]


@pytest.mark.parametrize(
    ("prompts", "keys", "n", "message"),
    [
        ([[1, 9]], ["row-9/0"], 2, r"no samples of group 'row-9/0' \(did you mean 'row-[78]/0'\?\)"),
        ([[1, 7]], ["row-7/0"], 3, "holds 2 samples of group 'row-7/0'; sample 2 was asked for"),
        ([[1, 2]], ["row-7/0"], 1, "recorded .* with another prompt"),
        ([[1, 7]], None, 1, "generate needs keys"),
    ],
)
def test_what_was_not_recorded_is_named(
    tmp_path: Path, prompts: list[list[int]], keys: list[str] | None, n: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        ask(recorded(tmp_path), prompts, keys, n)


def test_a_file_that_is_no_recording_is_named_with_its_line(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    file.write_text(file.read_text() + '{"sample_id": 1}\n')
    with pytest.raises(EngineError, match=r"samples\.jsonl:5 is not a recorded sample"):
        ask(file, [], [])
    with pytest.raises(EngineError, match=r"replay_from is .*nothing-here, which cannot be read"):
        ask(tmp_path / "nothing-here", [], [])
