"""Training on given responses: each objective's losses over three updates are those of Hugging Face and a dense formula."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl import cli
from megarl.config import SupervisedConfig, parse_supervised_config
from megarl.observe import read_metrics
from megarl.trainers.supervised.train import train
from tests.themes.e2e.processes import outside_ray

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, LR, EPS, BETA = 3, 1e-2, 1e-3, 0.3
BCO_BETA = 2.0
"""At which δ acts on the loss by more than the tolerance."""
EOS = 1
PAIRS = [
    {
        "prompt": f"{a}+{b}=",
        "chosen": str(a + b),
        "rejected": f"{a}{b} no",
        "response": str(a + b),
        "label": a > b,
        "margin": a / 4,
    }
    for a, b in ((1, 2), (5, 3), (4, 4), (9, 8))
]
STEP_ROWS = [
    {"prompt": "2*3+1=", "steps": ["2*3=6", "6+1=7"], "label": [1, 1]},
    {"prompt": "5-5=", "steps": ["1"], "label": [0.25]},
]


@pytest.fixture
def supervised_config(tiny_model: Path, tmp_path: Path) -> Callable[..., SupervisedConfig]:
    """`supervised_config(objective, rows, **{"policy.layout": ...})`: three full-batch updates on the tiny model."""

    def make(objective: dict[str, Any], rows: list[dict[str, Any]], **overrides: Any) -> SupervisedConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree: dict[str, Any] = {
            "run": {"folder": str(tmp_path / "runs"), "steps": STEPS},
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "policy": {"max_tokens_per_micro_batch": 128, "threads_per_rank": 1, "optimizer": {"lr": LR, "eps": EPS}},
            "objective": objective,
            "data": {
                "train": {"source": "jsonl", "path": str(file)}, "rows_per_step": len(rows), "max_tokens": 32,
                "chat_template": "never",
            },
        }  # fmt: skip
        for name, value in overrides.items():
            place = tree
            *path, last = name.split(".")
            for key in path:
                place = place.setdefault(key, {})
            place[last] = value
        return parse_supervised_config(tree)

    return make


class Reference:
    """The tiny model in Hugging Face with AdamW, and what the formulas need of it."""

    def __init__(self, path: Path, *, scores: bool = False) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.frozen = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        # The end token is the padding token too, whose embedding Hugging Face would give no gradient.
        self.model.model.embed_tokens.padding_idx = None
        self.head = torch.zeros(1, self.model.config.hidden_size, requires_grad=scores)
        self.parameters = [
            *(self.model.model.parameters() if scores else self.model.parameters()),
            *([self.head] if scores else []),
        ]
        self.rewards: list[Tensor] = []
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def log_probs(self, prompt: str, answer: str, model: Any = None) -> Tensor:
        """Log-probs of the answer's tokens and its end, float64."""
        asked, said = self.ids(prompt), [*self.ids(answer), EOS]
        logits = (model or self.model)(torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None])[:, 0]

    def scores(self, prompt: str, answer: str) -> Tensor:
        """The scalar head at every token of prompt, answer and end, float64."""
        ids = torch.tensor([[*self.ids(prompt), *self.ids(answer), EOS]])
        return (self.model.model(ids).last_hidden_state[0] @ self.head[0]).double()

    def losses(self, loss: Callable[[Reference], Tensor], share: float = 0.0) -> list[float]:
        """`loss` before each of three updates; the frozen model moves by `share` towards the trained one after each."""
        values = []
        for _ in range(STEPS):
            value = loss(self)
            self.optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            values.append(float(value.detach()))
            for frozen, trained in zip(self.frozen.parameters(), self.model.parameters(), strict=True):
                frozen.data = share * trained.data + (1 - share) * frozen.data
        return values


def sft(r: Reference) -> Tensor:
    return -torch.cat([r.log_probs(row["prompt"], row["response"]) for row in PAIRS]).mean()


def ratios(r: Reference, row: dict[str, Any], side: str) -> tuple[Tensor, Tensor]:
    own = r.log_probs(row["prompt"], row[side])
    return own, own.sum() - r.log_probs(row["prompt"], row[side], r.frozen).sum()


def dpo(r: Reference) -> Tensor:
    return torch.stack([-logsigmoid(BETA * (ratios(r, x, "chosen")[1] - ratios(r, x, "rejected")[1])) for x in PAIRS]).mean()


def dpo_with_rpo(r: Reference) -> Tensor:
    return dpo(r) - 0.5 * torch.stack([ratios(r, row, "chosen")[0].mean() for row in PAIRS]).mean()


def log_ratios(r: Reference) -> list[tuple[Tensor, Tensor]]:
    return [(ratios(r, row, "chosen")[1], ratios(r, row, "rejected")[1]) for row in PAIRS]


def normalised_dpo(r: Reference) -> Tensor:
    sides = [[ratios(r, row, side) for side in ("chosen", "rejected")] for row in PAIRS]
    per_token = [[ratio / len(tokens) for tokens, ratio in pair] for pair in sides]
    return torch.stack([-logsigmoid(BETA * (chosen - rejected)) for chosen, rejected in per_token]).mean()


def apo_zero(r: Reference) -> Tensor:
    return torch.stack([1 - (BETA * h_w).sigmoid() + (BETA * h_l).sigmoid() for h_w, h_l in log_ratios(r)]).mean()


def apo_down(r: Reference) -> Tensor:
    return torch.stack([(BETA * h_w).sigmoid() + 1 - (BETA * (h_w - h_l)).sigmoid() for h_w, h_l in log_ratios(r)]).mean()


def shift(r: Reference, rewards: Tensor) -> float:
    """The mean of all rewards of earlier calls, one for each update; these are counted for the next."""
    earlier = torch.cat(r.rewards) if r.rewards else torch.zeros(1)
    r.rewards.append(rewards.detach().flatten())
    return float(earlier.mean())


def bco_pair(r: Reference, beta: float = BCO_BETA) -> Tensor:
    rewards = beta * torch.stack([torch.stack(pair) for pair in log_ratios(r)])
    delta = shift(r, rewards)
    return -(logsigmoid(rewards[:, 0] - delta) + logsigmoid(delta - rewards[:, 1])).mean()


def mpo(r: Reference) -> Tensor:
    sft = torch.stack([ratios(r, row, "chosen")[0].mean() for row in PAIRS]).mean()
    return 0.8 * dpo(r) + 0.2 * bco_pair(r, BETA) - sft


def bco(r: Reference) -> Tensor:
    rewards = BCO_BETA * torch.stack([ratios(r, row, "response")[1] for row in PAIRS])
    signs = torch.tensor([1.0 if row["label"] else -1.0 for row in PAIRS])
    return -logsigmoid(signs * (rewards - shift(r, rewards))).mean()


def ipo(r: Reference) -> Tensor:
    return torch.stack([(ratios(r, x, "chosen")[1] - ratios(r, x, "rejected")[1] - 1 / (2 * BETA)) ** 2 for x in PAIRS]).mean()


def means(r: Reference, side: str) -> list[Tensor]:
    return [r.log_probs(row["prompt"], row[side]).mean() for row in PAIRS]


def simpo(r: Reference) -> Tensor:
    pairs = zip(means(r, "chosen"), means(r, "rejected"), strict=True)
    return torch.stack([-logsigmoid(BETA * (chosen - rejected) - 0.5) for chosen, rejected in pairs]).mean()


def orpo(r: Reference) -> Tensor:
    def odds(mean: Tensor) -> Tensor:
        return mean - torch.log1p(-mean.exp())

    pairs = zip(means(r, "chosen"), means(r, "rejected"), strict=True)
    losses = [-chosen - BETA * logsigmoid(odds(chosen) - odds(rejected)) for chosen, rejected in pairs]
    return torch.stack(losses).mean()


def dft(r: Reference) -> Tensor:
    log_probs = torch.cat([r.log_probs(row["prompt"], row["response"]) for row in PAIRS])
    return -(log_probs.detach().exp() * log_probs).mean()


def kto(r: Reference) -> Tensor:
    mismatched = [(PAIRS[i]["prompt"], PAIRS[(i + 1) % len(PAIRS)]["response"]) for i in range(len(PAIRS))]
    with torch.no_grad():
        kls = [r.log_probs(*pair).sum() - r.log_probs(*pair, r.frozen).sum() for pair in mismatched]
    z = torch.stack(kls).mean().clamp(min=0)
    signs = [1 if row["label"] else -1 for row in PAIRS]
    terms = [sign * BETA * (ratios(r, row, "response")[1] - z) for sign, row in zip(signs, PAIRS, strict=True)]
    return torch.stack([1 - term.sigmoid() for term in terms]).mean()


def reward_model(r: Reference) -> Tensor:
    gaps = [r.scores(row["prompt"], row["chosen"])[-1] - r.scores(row["prompt"], row["rejected"])[-1] for row in PAIRS]
    return -logsigmoid(torch.stack(gaps) - torch.tensor([row["margin"] for row in PAIRS])).mean()


def process_reward_model(r: Reference) -> Tensor:
    losses = []
    for row in STEP_ROWS:
        text = "\n".join(row["steps"])
        scores = r.scores(row["prompt"], text)
        start = len(r.ids(row["prompt"]))
        ends = [start + len(r.ids("\n".join(row["steps"][: n + 1]))) for n in range(len(row["steps"]))]
        for end, label in zip(ends, row["label"], strict=True):
            losses.append(-(label * logsigmoid(scores[end]) + (1 - label) * logsigmoid(-scores[end])))
    return torch.stack(losses).mean()


MIXTURE = {"name": "mixture", "beta": BETA, "mixture": {"dpo": 0.8, "bco_pair": 0.2, "sft": 1.0}}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Callable[[Reference], Tensor], dict[str, int]]] = {
    "sft": ({"name": "sft"}, PAIRS, sft, {"dp": 2}),
    "dpo": ({"name": "dpo", "beta": BETA}, PAIRS, dpo, {"dp": 2}),
    "dpo, averaged": ({"name": "dpo", "beta": BETA}, PAIRS, dpo, {"tp": 2}),
    "dpo+rpo": ({"name": "dpo", "beta": BETA, "rpo_alpha": 0.5}, PAIRS, dpo_with_rpo, {"tp": 2}),
    "ipo": ({"name": "ipo", "beta": BETA}, PAIRS, ipo, {"pp": 2}),
    "dpo, normalised": ({"name": "dpo", "beta": BETA, "length_normalised": True}, PAIRS, normalised_dpo, {"dp": 2}),
    "apo_zero": ({"name": "apo_zero", "beta": BETA}, PAIRS, apo_zero, {"tp": 2}),
    "apo_down": ({"name": "apo_down", "beta": BETA}, PAIRS, apo_down, {"pp": 2}),
    "bco_pair": ({"name": "bco_pair", "beta": BCO_BETA}, PAIRS, bco_pair, {"tp": 2}),
    "mpo": (MIXTURE, PAIRS, mpo, {"dp": 2}),
    "bco": ({"name": "bco", "beta": BCO_BETA}, PAIRS, bco, {"dp": 2}),
    "simpo": ({"name": "simpo", "beta": BETA, "target_margin": 0.5}, PAIRS, simpo, {"dp": 2}),
    "orpo": ({"name": "orpo", "beta": BETA}, PAIRS, orpo, {"dp": 2}),
    "dft": ({"name": "dft"}, PAIRS, dft, {"tp": 2}),
    "kto": ({"name": "kto", "beta": BETA}, PAIRS, kto, {"dp": 2}),
    "reward_model": ({"name": "reward_model"}, PAIRS, reward_model, {"pp": 2}),
    "process_reward_model": ({"name": "process_reward_model"}, STEP_ROWS, process_reward_model, {"tp": 2}),
}


OVERRIDES: dict[str, dict[str, Any]] = {
    "reward_model": {"data.margin_key": "margin"},
    "dpo, averaged": {"reference.reset_every": 1, "reference.reset_share": 0.6},
}
# tests/algorithms/test_preference.py has their formulas, and "dpo" the way to them
VARIANTS = ("sft", "dpo+rpo", "ipo", "simpo", "orpo", "dft", "dpo, normalised", "apo_zero", "apo_down", "bco_pair", "bco")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.exhaustive if c in VARIANTS else ()) for c in CASES])
def test_losses_are_those_of_hugging_face_and_the_formula(
    case: str, supervised_config: Callable[..., SupervisedConfig], tiny_model: Path
) -> None:
    objective, rows, loss, layout = CASES[case]
    overrides = OVERRIDES.get(case, {})
    config = supervised_config(objective, rows, **{"policy.layout": layout}, **overrides)
    train(config)
    metrics = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "train/loss" in row]
    reference = Reference(tiny_model, scores=config.has_value_head)
    expected = reference.losses(loss, overrides.get("reference.reset_share", 0.0))
    assert expected[0] != pytest.approx(expected[2], rel=1e-3)  # something was learned, so there is something to compare
    assert [row["train/loss"] for row in metrics] == pytest.approx(expected, rel=2e-4, abs=2e-5)
    if reference.rewards:
        means = [0.0, *(float(torch.cat(reference.rewards[:steps]).mean()) for steps in (1, 2))]
        assert [row["train/reward_shift"] for row in metrics] == pytest.approx(means, rel=2e-4, abs=2e-5)
        assert abs(means[2]) > 1e-3


def test_an_exported_reward_model_scores_in_hugging_face_as_it_did_here(
    supervised_config: Callable[..., SupervisedConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = supervised_config({"name": "reward_model"}, PAIRS, **{"policy.layout": {"pp": 2}, "run.export": True})
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    summary = train(config)
    said = capsys.readouterr().out
    assert f"{len(PAIRS)} of {len(PAIRS)} training rows have the prompt of a row of data.eval" in said
    assert f"{len(PAIRS)} training rows, {len(PAIRS)} held-out rows" in said.splitlines()
    folder = Path(config.run_folder) / "model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score(row: dict[str, Any], side: str) -> float:
        ids = [*tokenizer(row["prompt"] + row[side], add_special_tokens=False)["input_ids"], EOS]
        model.config.pad_token_id = None
        return float(model(torch.tensor([ids])).logits[0, 0])

    margins = [score(row, "chosen") - score(row, "rejected") for row in PAIRS]
    after = summary["eval"]["after"]
    assert after["loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / len(margins), abs=1e-5)
    assert after["accuracy"] == sum(m > 0 for m in margins) / len(margins)


def test_an_exported_model_writes_conversations_as_the_run_did(
    supervised_config: Callable[..., SupervisedConfig], tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% if loud is defined and loud %}{{ '!' }}{% endif %}{% endfor %}"
    )
    choice = {"data.chat_template": str(template), "data.template_args": {"loud": True}}
    config = supervised_config({"name": "sft"}, PAIRS[:1], **choice, **{"run.steps": 1, "run.export": True})
    summary = train(config)
    assert summary["template"] == {"chat_template": str(template), "template_args": {"loud": True}}
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(config.run_folder) / "model")
    said = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "1+2=!3!"
    assert tokenizer.apply_chat_template(said, tokenize=False, loud=False) == "1+2=3"


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param({"name": "sft"}, id="sft", marks=pytest.mark.exhaustive),  # the other one has more to remember
        pytest.param(MIXTURE, id="mixture, averaged reference"),
    ],
)
def test_two_and_one_resumed_equal_three(objective: dict[str, Any], supervised_config: Callable[..., SupervisedConfig]) -> None:
    settings: dict[str, Any] = {"data.rows_per_step": 2, "policy.layout": {"dp": 2}}
    if objective is MIXTURE:  # in bfloat16 the reference is more than its weights
        settings |= {"reference": {"reset_every": 1, "reset_share": 0.1}, "model.dtype": "bfloat16"}
    train(supervised_config(objective, PAIRS, **settings, **{"run.name": "whole"}))
    parts = {**settings, "run.name": "parts", "run.resume": "auto"}
    train(supervised_config(objective, PAIRS, **parts, **{"run.steps": 2}))
    config = supervised_config(objective, PAIRS, **parts)
    train(config)
    losses = {
        name: [row["train/loss"] for row in read_metrics(Path(config.run.folder) / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    }
    assert losses["whole"] == losses["parts"]
    assert len(losses["whole"]) == 3


FORGETS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}={% else %}"
    "{{ m.content if loop.last else m.content[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Leaves of an earlier answer its last character, as templates do that drop reasoning."""
CHATS = [
    {"messages": [{"role": role, "content": content} for role, content in chat]}
    for chat in (
        [("user", "1+2"), ("assistant", "1+2=3"), ("user", "5+3"), ("assistant", "5+3=8")],
        [("user", "4+4"), ("assistant", "8")],
    )
]


def of_each_turn(r: Reference) -> Tensor:
    end = r.tokenizer.eos_token
    turns = [("1+2=", "1+2=3"), (f"1+2=3{end}5+3=", "5+3=8"), ("4+4=", "8")]
    return -torch.cat([r.log_probs(prompt, answer) for prompt, answer in turns]).mean()


def test_turns_of_a_conversation_are_trained_on_behind_their_own_prompts(
    supervised_config: Callable[..., SupervisedConfig],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = tmp_path / "forgets.jinja"
    template.write_text(FORGETS)
    fields = {"policy.layout": {"dp": 2}, "data.chat_template": str(template), "data.turns": "each"}
    config = supervised_config({"name": "sft"}, CHATS, **fields)
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    summary = train(config)
    said = capsys.readouterr().out.splitlines()
    assert "3 samples, one for each assistant turn" in said
    metrics = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "train/loss" in row]
    expected = Reference(tiny_model).losses(of_each_turn)
    assert expected[0] != pytest.approx(expected[2], rel=1e-3)
    assert [row["train/loss"] for row in metrics] == pytest.approx(expected, rel=2e-4, abs=2e-5)
    assert summary["eval"]["before"]["loss"] == pytest.approx(expected[0], rel=2e-4)


def test_torchrun_gives_the_losses_that_ray_gives(supervised_config: Callable[..., SupervisedConfig], tmp_path: Path) -> None:
    layout = {"policy.layout": {"dp": 2}}
    config = supervised_config({"name": "dpo", "beta": BETA}, PAIRS, **layout)
    train(config)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megarl"]
    command += ["preference", str(file), "run.name=torchrun", "run.export=true"]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_ray(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    curves = [
        [row["train/loss"] for row in read_metrics(Path(config.run.folder) / name / "metrics.jsonl")]
        for name in (config.run.name, "torchrun")
    ]
    assert curves[0] == curves[1]
    assert (Path(config.run.folder) / "torchrun" / "model" / "model.safetensors").exists()
    assert (Path(config.run.folder) / "torchrun" / "summary.json").exists()


@pytest.mark.exhaustive
def test_two_drivers_that_lost_their_folder_go_on_from_the_mirror_that_one_of_them_keeps(
    supervised_config: Callable[..., SupervisedConfig], tmp_path: Path
) -> None:
    """The other one must not look for a checkpoint before the leader has fetched it."""
    config = supervised_config({"name": "dpo", "beta": BETA}, PAIRS, **{"policy.layout": {"dp": 2}, "run.name": "whole"})
    train(config)
    file, lost, second = tmp_path / "run.yaml", Path(config.run.folder) / "lost", tmp_path / "second"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megarl"]
    command += ["preference", str(file), "run.name=lost", f"run.mirror={second}", "run.resume=auto"]

    def go_on(steps: int) -> subprocess.CompletedProcess[str]:
        whole = [*command, f"run.steps={steps}"]
        return subprocess.run(whole, capture_output=True, text=True, env=outside_ray(), timeout=120, check=False)

    for steps in (2, 3):
        done = go_on(steps)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"mirror: {second}/lost has the checkpoint of step {steps}" in done.stdout
        shutil.rmtree(lost)
    done = go_on(3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is finished; its summary is in" in done.stdout
    curves = [
        [row["train/loss"] for row in read_metrics(Path(config.run.folder) / name / "metrics.jsonl")]
        for name in ("whole", "lost")
    ]
    assert curves[0] == curves[1]
    shutil.rmtree(second)
    second.write_text("a file")
    shutil.rmtree(lost)
    done = go_on(3)
    assert done.returncode != 0
    assert done.stderr.count(f"megarl: run.mirror is '{second}', but it cannot be used: '{second}/lost': Not a directory") == 2


@pytest.mark.parametrize(
    ("command", "overrides", "sentence"),
    [
        ("sft", ["objective.name=dpo"], "trains by dpo, but `megarl sft` trains by sft or dft; `megarl train` runs any config"),
        ("preference", ["objective.name=dpo", "objective.beat=1"], "did you mean 'objective.beta'?"),
        ("preference", ["objective.name=dpo", "policy.max_tokens_per_micro_batch=40"], "it must be at least 64"),
        ("preference", ["objective.name=dpo", "data.chosen_key=better"], "'better'"),
        ("sft", ["policy.layout.dp=3"], "policy.layout.dp is 3"),
        ("sft", ["data.max_tokens=5"], "data.max_tokens is 5"),
    ],
)
def test_mistakes_are_one_sentence(
    command: str,
    overrides: list[str],
    sentence: str,
    supervised_config: Callable[..., SupervisedConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(supervised_config({"name": "sft"}, PAIRS).model_dump(mode="json")))
    assert cli.main([command, str(file), *overrides]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
