"""A rollout engine from outside the package: named by its file in the config, it samples a whole run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.config import Config
from megarl.errors import EngineError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from tests.themes.e2e.digit_engine import guess

ENGINE = f"{Path(__file__).parent / 'digit_engine.py'}:DigitEngine"


@pytest.mark.slow
def test_a_grpo_run_is_sampled_by_an_engine_that_megarl_has_never_heard_of(
    local_ray: None, tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    own = {"rollout.engine": ENGINE, "rollout.engines": 2, "rollout.engine_args": {"diary": str(tmp_path)}}
    config = tiny_config(**own, **{"run.steps": 3, "rewards": [{"name": "exact_number"}], "data.eval": None})
    train(config)
    folder = Path(config.run_folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 4 * 4
    for sample in samples:
        group, _, number = sample["sample_id"].rpartition("/")
        digit = guess(group, int(number))
        assert sample["response_text"] == str(digit)
        assert sample["rewards"] == {"exact_number": float(int(sample["row"]["answer"]) == digit)}
        assert sample["weight_versions"] == [sample["step"] - 1] * 2
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    expected = {name: list(weight.shape) for name, weight in load_file(tiny_model / "model.safetensors").items()}
    for number in range(2):
        updates = [json.loads(line) for line in (tmp_path / f"engine-{number}.jsonl").read_text().splitlines()]
        assert [update["version"] for update in updates] == [1, 2]
        assert all(update["weights"] == expected for update in updates)


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_the_run_in_a_sentence(
    local_ray: None, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    text = Path(ENGINE.rpartition(":")[0]).read_text()
    (tmp_path / "broken.py").write_text(text.replace('"eos_token_id"', '"no_such_field"'))
    own = {"rollout.engine": f"{tmp_path}/broken.py:DigitEngine", "rollout.engine_args": {"diary": str(tmp_path)}}
    with pytest.raises(EngineError, match=r"broken.py:DigitEngine did not start: KeyError: 'no_such_field' \(.*broken.py line"):
        train(tiny_config(**own))
