"""`megarl generate`: responses as rows to train on, the right ones only, each prompt's own, never a held-out prompt's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.errors import ConfigError
from megarl.trainers.evaluate import evaluate
from megarl.trainers.generate import generate

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def config(tiny_config: Callable[..., Config], tmp_path: Path) -> Config:
    """Sixteen rows of training, eight held out; a response is right if it begins with a digit or a small letter."""
    (tmp_path / "judge.py").write_text(
        "def begins_low(sample):\n    return float(sample.response_text[:1].isdigit() or sample.response_text[:1].islower())\n"
    )
    return tiny_config(
        **{
            "rewards": [{"name": f"{tmp_path / 'judge.py'}:begins_low"}],
            "data.train.limit": 16,
            "rollout.samples_per_prompt": 6,
            "rollout.prompts_per_step": 4,
        }
    )


def is_right(text: str) -> bool:
    return text[:1].isdigit() or text[:1].islower()


def rows_of(config: Config, tmp_path: Path, form: Any) -> list[dict[str, Any]]:
    out = tmp_path / "out" / f"{form}.jsonl"
    count = generate(config, str(out), form, None)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == count
    return rows


def test_every_form_holds_what_it_says(config: Config, tmp_path: Path) -> None:
    everything = rows_of(config, tmp_path, "samples")
    prompts = {row["prompt"] for row in everything}
    assert len(everything) % 6 == 0
    assert all(row["reward"] == float(is_right(row["response"])) for row in everything)
    assert {0.0, 1.0} == {row["reward"] for row in everything}

    # The embedded engine draws by seed, key and number: the other forms are of the same responses.
    whole = [row for row in everything if row["finish_reason"] == "stop"]
    right = rows_of(config, tmp_path, "sft") if any(is_right(row["response"]) for row in whole) else []
    assert {(row["prompt"], row["response"]) for row in right} == {
        (row["prompt"], row["response"]) for row in whole if is_right(row["response"])
    }
    rated = {row["question"]: row for row in rows_of(config, tmp_path, "pass_rates")}
    assert rated.keys() == prompts
    for prompt, row in rated.items():
        judged = [is_right(one["response"]) for one in everything if one["prompt"] == prompt]
        assert row["pass_rate"] == sum(judged) / 6
        given = next(one["row"] for one in everything if one["prompt"] == prompt)
        assert {key: value for key, value in row.items() if key != "pass_rate"} == given
    rates = sorted({row["pass_rate"] for row in rated.values()})
    assert len(rates) > 1
    kept = SourceConfig(source="jsonl", path=str(tmp_path / "out" / "pass_rates.jsonl"), keep={"pass_rate": (rates[1], None)})
    assert [row["question"] for row in load_rows(kept)] == [key for key, row in rated.items() if row["pass_rate"] >= rates[1]]
    assert len({(row["prompt"], row["response"]) for row in right}) == len(right)
    assert {row["prompt"] for row in right} <= prompts


def test_pairs_are_of_one_prompt_and_the_right_way_round(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A random model seldom ends by itself: what was cut counts as whole here.
    monkeypatch.setattr("megarl.data.sample.Sample.truncated", property(lambda sample: False))
    said: dict[str, set[str]] = {}
    for row in rows_of(config, tmp_path, "samples"):
        said.setdefault(row["prompt"], set()).add(row["response"])
    pairs = rows_of(config, tmp_path, "pairs")
    for pair in pairs:
        assert is_right(pair["chosen"])
        assert not is_right(pair["rejected"])
        assert {pair["chosen"], pair["rejected"]} <= said[pair["prompt"]]
    expected = sum(min(sum(map(is_right, texts)), sum(not is_right(t) for t in texts if t)) for texts in said.values())
    assert len(pairs) == expected > 0


def test_a_file_that_exists_is_not_overwritten(config: Config, tmp_path: Path) -> None:
    (tmp_path / "kept.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"kept\.jsonl"):
        generate(config, str(tmp_path / "kept.jsonl"), "samples", None)
    assert (tmp_path / "kept.jsonl").read_text() == "mine"


def test_eval_counts_what_every_function_calls_right(config: Config) -> None:
    figures = evaluate(config, None)
    assert figures["prompts"] == 8
    assert figures["accuracy"] == pytest.approx(figures["reward"])


def test_eval_of_a_model_by_engines_that_have_another_is_refused(tiny_config: Callable[..., Config]) -> None:
    urls = {"rollout.servers": {"urls": ["http://127.0.0.1:9"]}}
    config = tiny_config(**{"rollout.engine": "sglang", "rollout.weight_transport": "folder", **urls})
    with pytest.raises(ConfigError, match=r"rollout.servers.urls needs a checkpoint .* or remove rollout.servers.urls"):
        evaluate(config, None)
