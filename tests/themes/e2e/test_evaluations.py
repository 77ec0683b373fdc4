"""Named evaluation sets: during a run, by `megarl eval` of a model and a checkpoint, and beside a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.errors import ConfigError, DataError, RewardError
from megarl.observe import read_metrics
from megarl.trainers.evaluate import evaluate, watch
from megarl.trainers.inputs import read_inputs
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
DIGIT = "def digit(samples):\n    return [float(sample.response_text[:1].isdigit()) for sample in samples]\n"


@pytest.fixture
def evaluated_config(tiny_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A run whose set `digits` has four answers of three tokens, judged by their first character; `sums` is greedy."""
    reward, rows = tmp_path / "digit.py", tmp_path / "rows.jsonl"
    reward.write_text(DIGIT)
    kinds = ["even", "odd"]
    rows.write_text("".join(json.dumps({"text": f"{n}+{n}=", "answer": 2 * n, "kind": kinds[n % 2]}) + "\n" for n in range(6)))

    def make(**overrides: Any) -> Config:
        digits = {
            "name": "digits",
            "rows": {"source": "jsonl", "path": str(rows)},
            "samples_per_prompt": 4,
            "temperature": 1.3,
            "max_new_tokens": 3,
            "prompt_key": "text",
            "source_key": "kind",
            "rewards": [{"name": f"{reward}:digit"}],
        }
        sums = {"name": "sums", "rows": {"source": "reasoning_gym", "name": "chain_sum", "limit": 5}}
        return tiny_config(**{"evaluations": [digits, sums], "data.eval": None} | overrides)

    return make


def test_sets_are_measured_as_each_says_and_checkpoints_by_a_watcher(
    evaluated_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"run.save_every": 1, "run.keep_checkpoints": 0, "run.eval_every": 1, "run.keep_best": "digits/avg@4"}
    config = evaluated_config(**saved)
    folder = Path(config.run_folder)
    summary = train(config)
    assert "64 training rows, evaluations: digits 6, sums 5" in capsys.readouterr().out.splitlines()
    rows = {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}
    names = {"avg@4", "pass@2", "pass@4", "maj@4"}
    names = {f"{kind}{name}{error}" for kind in ("", "even/", "odd/") for name in names for error in ("", "_se")}
    names = {f"digits/{name}" for name in names | {"reward", "tokens_mean", "truncated", "prompts"}}
    names |= {f"sums/{name}" for name in ("avg@1", "avg@1_se", "reward", "tokens_mean", "truncated", "prompts")}
    for step in (0, 1, 2):
        assert {name.removeprefix("eval/") for name in rows[step] if name.startswith("eval/")} == names | {"seconds"}
    last = rows[2]
    assert (last["eval/digits/prompts"], last["eval/sums/prompts"]) == (6.0, 5.0)
    assert last["eval/digits/tokens_mean"] <= 3  # its own length
    assert last["eval/digits/avg@4"] == pytest.approx(last["eval/digits/reward"])  # its own reward
    assert last["eval/digits/pass@4"] >= last["eval/digits/avg@4"] > 0
    by_kind = (last["eval/digits/even/avg@4"] + last["eval/digits/odd/avg@4"]) / 2
    assert by_kind == pytest.approx(last["eval/digits/avg@4"])
    assert summary["eval"]["after"]["digits/avg@4"] == last["eval/digits/avg@4"]

    said: list[str] = []
    watch(config, said.append)
    lines = list(map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines()))
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:  # greedy answers depend on weights alone
        assert {name: line[f"sums/{name}"] for name in ("avg@1", "reward", "tokens_mean")} == {
            name: rows[line["step"]][f"eval/sums/{name}"] for name in ("avg@1", "reward", "tokens_mean")
        }
        assert set(line) == names | {"seconds", "step"}
    assert len(said) == 3
    assert said[-1].startswith("step 2: digits: avg@4 ")
    watch(config, said.append)
    assert len(said) == 3  # nothing is left to do

    told: list[str] = []
    figures = evaluate(config, str(folder), told.append, str(folder / "answers.jsonl"))  # the run: its newest checkpoint
    answers = list(map(json.loads, (folder / "answers.jsonl").read_text().splitlines()))
    assert [answer["set"] for answer in answers] == 6 * 4 * ["digits"] + 5 * ["sums"]
    digits = [sum(answer["rewards"].values()) for answer in answers if answer["set"] == "digits"]
    assert sum(digits) / len(digits) == pytest.approx(figures["digits/reward"])
    assert "measuring digits (6 rows, 4 answers each, temperature " in told[1]
    assert told[-1] == f"29 judged responses written to {folder}/answers.jsonl"
    with pytest.raises(ConfigError, match=r"--out is '.*answers.jsonl', which exists already"):
        evaluate(config, None, out=str(folder / "answers.jsonl"))
    assert figures["sums/tokens_mean"] == lines[1]["sums/tokens_mean"]
    assert figures.keys() == names | {"seconds"}


def test_the_rewards_of_a_set_are_tried_before_a_run_but_not_before_a_restart(
    evaluated_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = evaluated_config()
    read_inputs(config).close()
    (tmp_path / "digit.py").write_text("def digit(samples):\n    return [sample.answer for sample in samples]\n")
    with pytest.raises(RewardError, match=r"no attribute 'answer'.*; asked before the run about .* to row eval-"):
        read_inputs(config)
    monkeypatch.setattr("megarl.trainers.inputs.is_restart", lambda: True)
    read_inputs(config).close()


def test_rows_of_a_set_are_not_trained_on(evaluated_config: Callable[..., Config], tmp_path: Path) -> None:
    rows = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    config = evaluated_config(**{"data.train": rows | {"columns": {"question": "text"}}})
    with pytest.raises(DataError, match=r"data.train has no row that data.eval and evaluations do not hold out \(6 rows"):
        read_inputs(config)


def test_nothing_to_evaluate_on_is_one_sentence(evaluated_config: Callable[..., Config]) -> None:
    config = evaluated_config(evaluations=[])
    for run in (lambda: evaluate(config, None), lambda: watch(config, print)):
        with pytest.raises(ConfigError, match=r"^data.eval is null and evaluations is empty, but eval needs rows"):
            run()
