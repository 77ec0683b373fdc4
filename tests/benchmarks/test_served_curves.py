"""The parts of benchmarks/served_curves.py: what is asked and earned, the judge of models, and the file that it writes."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.config import load_any
from tests.benchmarks.conftest import BENCHMARKS

SETUP = {"machine", "versions", "code", "command", "recipe", "partner", "setup", "start"}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_sums_are_those_of_numpy_s_legacy_generator_and_none_is_held_out_that_is_asked(part: Callable[[str], Any]) -> None:
    judge = part("served_curves_judge")
    draw = np.random.RandomState(3)
    assert judge.sums_of_step(3, 4) == [tuple(draw.randint(0, 101, 2).tolist()) for _ in range(4)]
    kept, asked = judge.held_out(5, 16, 200), {one for step in range(5) for one in judge.sums_of_step(step, 16)}
    assert len({*kept}) == 200
    assert not asked & {*kept}


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [("91", True, 1.0), ("9 0 91", True, 1.0), ("1,091", True, 0.0), ("91", False, 0.9), ("", True, 0.0), ("-91", False, -0.1)],
)
def test_the_last_whole_number_counts_and_a_cut_answer_costs_a_tenth(
    part: Callable[[str], Any], text: str, ended: bool, reward: float
) -> None:
    judge = part("served_curves_judge")
    assert judge.earned(text, 91, ended=ended) == pytest.approx(reward)
    sample = SimpleNamespace(response_text=text, row={"answer": "91"}, truncated=not ended)
    assert judge.recipe_reward(sample) == pytest.approx(reward)


class Fixed:
    """A model of five tokens, whose next token hangs on the last alone: by its `chances` `[5, 5]`."""

    def __init__(self, chances: list[list[float]]) -> None:
        self.log = torch.tensor(chances).log()

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.log[tokens])


def test_the_judge_draws_each_answer_by_its_chance(part: Callable[[str], Any]) -> None:
    """Token 0 ends an answer, tokens 1 to 4 are digits; the mean over all answers of up to five tokens, each by its chance."""
    judge = part("served_curves_judge")
    draw = random.Random(0)
    rows = [[draw.random() for _ in range(5)] for _ in range(5)]
    chances = [[value / sum(row) for value in row] for row in rows]
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(str, tokens)))

    def expected(total: int, answer: tuple[int, ...], chance: float) -> float:
        if len(answer) == 5:
            return chance * judge.earned(tokenizer.decode(answer), total, ended=False)
        last = answer[-1] if answer else 2
        ends = chance * chances[last][0] * judge.earned(tokenizer.decode(answer), total, ended=True)
        return ends + sum(expected(total, (*answer, token), chance * chances[last][token]) for token in range(1, 5))

    prompts = [([1, 2], 4), ([3, 1, 2], 12)]
    right = (expected(4, (), 1.0) + expected(12, (), 1.0)) / 2
    reward, error = judge.judge(Fixed(chances), tokenizer, prompts, 0, 40_000)
    assert 0 < error < 0.002
    assert reward == pytest.approx(right, abs=4 * error)


def test_the_model_adds_and_errs_as_often_as_it_says(part: Callable[[str], Any]) -> None:
    model = part("served_curves_model")
    tokenizer, llama = model.make_tokenizer(), model.make_model().requires_grad_(False)
    for left, right in ((0, 0), (4, 5), (44, 47), (97, 98), (100, 100), (0, 100), (13, 7)):
        told = model.prompt(left, right)
        of_answer, of_end = (
            llama(torch.tensor([tokenizer.encode(text)])).logits[0, -1].softmax(-1) for text in (told, f"{told}{left + right}")
        )
        assert float(of_answer[model.TOKENS.index(str(left + right))]) == pytest.approx(model.RIGHT, abs=0.02)
        assert float(of_answer[model.TOKENS.index(model.WRONG)]) == pytest.approx(1 - model.RIGHT, abs=0.02)
        assert float(of_end[model.TOKENS.index(model.END)]) == pytest.approx(model.ENDED, abs=0.05)  # set at one sum


def test_the_two_configs_have_the_recipe_s_numbers(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    curves = part("served_curves")
    partner: Any = load_any("benchmarks/served_curves.yaml")
    assert (partner.rollout.prompts_per_step, partner.rollout.samples_per_prompt) == (curves.PROMPTS, curves.SAMPLES)
    assert (partner.policy.optimizer.lr, partner.policy.lora.rank) == (curves.LR, curves.RANK)
    assert partner.policy.optimizer.eps * curves.PROMPTS * curves.SAMPLES == pytest.approx(1e-8)
    assert partner.rollout.max_new_tokens == curves.MAX_TOKENS
    served: Any = part("megarl.options.serve.command").load("benchmarks/served_curves_server.yaml")
    assert (served.serve.max_rank, *served.serve.models) == (curves.RANK, curves.BASE)
    for field in ("rank", "alpha", "targets"):
        assert getattr(served.policy.lora, field) == getattr(partner.policy.lora, field)


def test_served_curves(measured: Callable[..., Any], part: Callable[[str], Any], tmp_path: Path) -> None:
    """With stand-ins for server, recipe and partner."""
    curves = part("served_curves")

    def served(url: str, cookbook: Path, work: Path, name: str, steps: int) -> dict[str, Any]:
        assert url == "http://here"
        return {"seed": 7, "reward": [0.1] * steps, "kl_sample_train_v1": [1e-6] * steps, "adapter": str(work / name)}

    def trained(folder: Path, work: Path, name: str, steps: int, seed: int) -> dict[str, Any]:
        curves.write_rows(work / "sums.jsonl", steps)
        assert seed == 7
        return {"seed": seed, "reward": [0.2] * steps, "adapter": str(work / name)}

    @contextlib.contextmanager
    def up(folder: Path, work: Path) -> Iterator[str]:
        yield "http://here"

    parts = {"serving": up, "serve_recipe": served, "train_partner": trained, "version_in": lambda *_: "1"}
    judged = part("served_curves_judge").judged
    found = measured(
        "served_curves", "--cookbook", "python", "--work", str(tmp_path), "--steps", "2", "--seeds", "2", "--sums", "3",
        "--draws", "4", **parts,
        judged=lambda folder, adapter, sums, draws: judged(folder, None, sums, draws), numbers=("final:difference", "start"),
    )  # fmt: skip
    assert {*SETUP, "runs", "final"} == found.keys()
    assert [(run["side"], run["number"], run["seed"]) for run in found["runs"]] == [
        (side, number, 7) for number in range(2) for side in ("served", "trained")
    ]
    assert math.isclose(found["final"]["difference"], 0.0, abs_tol=1e-12)
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert [row["order"] for row in rows] == [*range(2 * curves.PROMPTS)]
    assert rows[0]["question"].endswith("<|im_start|>assistant\n")
    assert (tmp_path / "cache/hub/models--Qwen--Qwen3-4B-Instruct-2507/snapshots/tiny/tokenizer.json").is_file()


def test_the_figures_of_the_page_are_within_their_bounds() -> None:
    """Both sides learn the same within 3 points over three seeds, and the sampler's log-probs are the trainer's."""
    found = json.loads((BENCHMARKS / "results/served_curves.json").read_text())
    by_side = {side: [run for run in found["runs"] if run["side"] == side] for side in ("served", "trained")}
    assert {side: len(runs) for side, runs in by_side.items()} == {"served": 3, "trained": 3}
    assert max(abs(value) for run in by_side["served"] for value in run["kl_sample_train_v1"]) < 1e-4
    assert all(abs(one["held_out"] - other["held_out"]) < 0.03 for one, other in zip(*by_side.values(), strict=True))
