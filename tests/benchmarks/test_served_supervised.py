"""The parts of benchmarks/served_supervised.py: rows and their order, the judge of models, and the file that it writes."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megarl.config import load_any
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings, kind_of_rows
from tests.benchmarks.conftest import BENCHMARKS

SETUP = {"machine", "versions", "code", "command", "recipes", "partners", "model", "setup", "start"}
NAMES = ("sl_loop", "preference.dpo")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_no_training_row_asks_what_is_kept_for_the_end(part: Callable[[str], Any]) -> None:
    judge = part("served_supervised_judge")
    asked = [{judge.asked(one) for one in judge.questions(kept=kept)} for kept in (False, True)]
    assert len(asked[0] | asked[1]) == 6 * 5 * 36 == len(asked[0]) + len(asked[1])
    for rows in (judge.conversations, judge.preferences):
        for kept in (False, True):
            turns = [message for row in rows(50, 3, kept=kept) for message in row.get("messages", row.get("prompt"))]
            assert {turn["content"] for turn in turns if turn["role"] == "user"} <= asked[kept]
    assert {len(row["messages"]) for row in judge.conversations(50, 3)} == {2, 4}
    assert judge.conversations(20, 3) != judge.conversations(20, 4)
    assert all(row["chosen"] != row["rejected"] for row in judge.preferences(200, 3))


def test_rows_come_as_the_cookbook_s_data_sets_shuffle_them(part: Callable[[str], Any]) -> None:
    judge, recipes = part("served_supervised_judge"), part("served_recipes")
    rows: list[dict[str, Any]] = [{"row": number} for number in range(37)]
    assert judge.in_order(rows, 0) == [row | {"order": row["row"]} for row in rows]
    for shuffles in (1, 2):
        ordered = judge.in_order(rows, shuffles)
        assert [row["order"] for row in ordered] == [*range(37)]
        if recipes.why_not() is None:
            code = f"import datasets; print(datasets.Dataset.from_list({rows}){'.shuffle(seed=0)' * shuffles}['row'][:])"
            told = subprocess.run([recipes.COOKBOOK / "bin/python", "-c", code], capture_output=True, text=True, check=True)
            assert [row["row"] for row in ordered] == json.loads(told.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_the_judge_s_tokens_are_those_that_the_partner_trains_on(part: Callable[[str], Any], name: str) -> None:
    judge, bench = part("served_supervised_judge"), part("served_supervised")
    tokenizer = part("recipe_model").make_tokenizer()
    config: Any = load_any(BENCHMARKS.parent / bench.COMPARED[name].config)
    builder = SupervisedBuilder(tokenizer, kind_of_rows(config.objective.name), SupervisedSettings.of(config.data))
    rows = bench.COMPARED[name].rows(30, 1)
    samples = builder.build(rows, prefix="train")
    if name == "sl_loop":
        judged = [judge.encoded(tokenizer, row["messages"], last_only=False) for row in rows]
    else:
        sides = [
            [*row["prompt"], {"role": "assistant", "content": row[side]}] for row in rows for side in ("chosen", "rejected")
        ]
        judged = [judge.encoded(tokenizer, messages, last_only=True) for messages in sides]
    for sample, (ids, counts) in zip(samples, judged, strict=True):
        assert [*sample.prompt_ids, *sample.response_ids] == ids
        assert [False] * len(sample.prompt_ids) + [bool(one) for one in sample.sampled_mask] == counts


class Fixed:
    """A model of five tokens, whose next token hangs on the last alone: by its `scores` `[5, 5]`."""

    def __init__(self, seed: int) -> None:
        self.scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores[tokens])

    def log_prob(self, last: int, token: int) -> float:
        row = self.scores[last].tolist()
        return row[token] - math.log(sum(map(math.exp, row)))


class Tokens:
    """Token ids of a text: its digits modulo 5; a mark of the chat is token 0."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(one) % 5 for one in text.replace("<|im_end|>", "0").replace("<|im_start|>", "0") if one.isdigit()]


def test_the_judge_s_losses_are_those_of_formulas(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judge = part("served_supervised_judge")
    start, trained = Fixed(1), Fixed(2)
    monkeypatch.setattr(judge, "loaded", lambda folder, adapter: (start if adapter is None else trained, Tokens()))
    turn = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "34"}]
    rows = [{"messages": turn}, {"messages": [*turn, {"role": "user", "content": "4"}, {"role": "assistant", "content": "1"}]}]
    path = [(0, 3), (3, 4), (4, 0)]  # 0 12 0, 0 34 0, 0 4 0, 0 1 0: the last tokens and those that are learnt
    paths = (path, [*path, (0, 1), (1, 0)])
    losses = [-sum(trained.log_prob(*pair) for pair in pairs) / len(pairs) for pairs in paths]
    best = [all(int(trained.scores[last].argmax()) == token for last, token in pairs) for pairs in paths]
    found = judge.judged_answers(Path(), Path("x"), rows)
    assert found["loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert found["accuracy"] == sum(best) / 2

    def gain(pairs: list[tuple[int, int]]) -> float:
        return sum(trained.log_prob(*pair) - start.log_prob(*pair) for pair in pairs)

    pair = {"prompt": turn[:1], "chosen": "34", "rejected": "1"}
    margin = gain(path) - gain([(0, 1), (1, 0)])
    found = judge.judged_pairs(Path(), Path("x"), [pair])
    assert found["loss"] == pytest.approx(math.log1p(math.exp(-0.1 * margin)), abs=1e-6)
    assert found["accuracy"] == float(margin > 0)
    assert judge.judged_pairs(Path(), None, [pair]) == {"loss": pytest.approx(math.log(2)), "accuracy": 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_the_configs_have_the_recipes_numbers(part: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    bench, recipes, judge = part("served_supervised"), part("served_recipes"), part("served_supervised_judge")
    method = bench.COMPARED[name]
    partner: Any = load_any(BENCHMARKS.parent / method.config)
    told = dict(argument.split("=") for argument in method.arguments.split())
    assert float(told["learning_rate"]) == partner.policy.optimizer.lr
    assert int(told["batch_size"]) == partner.data.rows_per_step == bench.ROWS
    assert int(told.get("lora_rank", 32)) == partner.policy.lora.rank
    mean_over = bench.ROWS if name == "sl_loop" else 1
    assert partner.policy.optimizer.eps * mean_over == pytest.approx(1e-8)
    assert (partner.policy.optimizer.schedule, partner.policy.optimizer.clip_grad) == ("linear", 0.0)
    assert partner.objective.beta == judge.BETA
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(recipes.config_of(Path("model"), tmp_path)))
    served: Any = part("megarl.options.serve.command").load(file)
    for field in ("rank", "alpha", "targets"):
        assert getattr(served.policy.lora, field) == getattr(partner.policy.lora, field)


def test_served_supervised(measured: Callable[..., Any], part: Callable[[str], Any], tmp_path: Path) -> None:
    """With stand-ins for server, recipes, partners and models."""
    bench, judge = part("served_supervised"), part("served_supervised_judge")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")

    def served(url: str, work: Path, name: str, number: int, steps: int) -> dict[str, Any]:
        assert url == "http://here"
        bench.write_inputs(work / f"seed-{number}", work / "model", number, steps)
        return {"seed": 7, "loss": [0.5] * steps, "adapter": str(work / name)}

    def trained(work: Path, name: str, number: int, steps: int, seed: int) -> dict[str, Any]:
        assert seed == 7
        return {"seed": seed, "loss": [0.5] * (steps - 1) + [0.5 + number / 8], "adapter": str(work / name)}

    @contextlib.contextmanager
    def up(config: dict[str, Any], work: Path) -> Iterator[str]:
        yield "http://here"

    parts = {
        "serving": up,
        "serve_recipe": served,
        "train_partner": trained,
        "cookbook_versions": dict,
        "why_not": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "loaded", lambda folder, adapter: (Fixed(1 if adapter is None else 2), Tokens()))
        found = measured(
            "served_supervised", "--work", str(tmp_path), "--steps", "2", "--seeds", "2", "--kept", "3", **parts,
            numbers=("final:sl_loop:mean:loss:served", "start:sl_loop:loss", "start:preference.dpo:loss"),
        )  # fmt: skip
    assert {*SETUP, "runs", "final"} == found.keys()
    assert [(run["recipe"], run["number"], run["side"]) for run in found["runs"]] == [
        (name, number, side) for name in NAMES for number in range(2) for side in ("served", "trained")
    ]
    for name in NAMES:
        assert found["final"][name]["step_loss"] == 1 / 8
        assert found["final"][name]["held_out"] == {"loss": 0.0, "accuracy": 0.0}
    assert len(bench.table(found)) == 2 + 2 * 2
    assert bench.curve(found)[-1].endswith("| 0.5312 |")
    for data_set, steps in ((judge.NO_ROBOTS, 2), (judge.PAIRS, 2)):
        assert len((tmp_path / "seed-1" / data_set / "train.jsonl").read_text().splitlines()) == steps * bench.ROWS
    first = json.loads((tmp_path / "seed-1" / judge.PAIRS / "train.jsonl").read_text().splitlines()[0])
    assert first["chosen"].startswith("\n\nHuman: ")
    assert (tmp_path / "seed-1" / bench.BASE / "config.json").is_file()


def test_the_figures_of_the_page_are_within_their_bounds() -> None:
    """Both sides learn the same: each step's loss to 1e-5 over three seeds, held-out accuracy within 3 points."""
    found = json.loads((BENCHMARKS / "results/served_supervised.json").read_text())
    assert {*found["final"]} == {*NAMES}
    for one in found["final"].values():
        assert one["seeds"] == 3
        assert one["step_loss"] < 1e-5
        assert one["held_out"]["loss"] < 1e-5
        assert one["held_out"]["accuracy"] < 0.03
