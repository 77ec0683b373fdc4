"""Loops of users' own: `megarl.open` computes what a run of the same config does, and says what is wrong as it does."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megarl
from megarl.config import Config
from megarl.trainers.rl.train import train
from tests.themes.e2e.records import curve

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

STEPS = 2
EXAMPLES = Path(__file__).parents[3] / "examples" / "python"
MODEL = EXAMPLES.parents[1] / "models" / "tiny-arithmetic"


def own(config: Config) -> Iterator[dict[str, float]]:
    """The metrics of the steps of a loop written by hand: gradients and their steps apart at first, then both by one call."""
    with megarl.open(config) as session:
        for step in range(STEPS):
            session.sync_weights()
            groups = session.sample(session.prompts(config.rollout.prompts_per_step), config.rollout.samples_per_prompt)
            batch = session.batch(groups)
            rewards = session.reward(batch.samples)
            metrics = {"reward/mean": sum(rewards) / len(rewards), **session.advantages(batch, rewards)}
            roles = ("critic", "policy") if config.uses_critic else ("policy",)
            if step:
                found = session.update(batch, roles=[*reversed(roles)])
                assert {*found} == {*roles}
                assert session.step == step + 1
            else:
                found = {role: session.forward_backward(batch, role=role) | session.optimizer_step(role) for role in roles}
            for role, of_role in found.items():
                metrics |= {name if "/" in name else f"{role}/{name}": value for name, value in of_role.items()}
            yield metrics


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm.advantage": "gae", "policy.layout": {"dp": 2}},
        pytest.param({"algorithm.advantage": "grpo", "policy.layout": {"tp": 2}}, marks=pytest.mark.exhaustive),
        pytest.param({"algorithm.advantage": "reinforce", "policy.layout": {"pp": 2}}, marks=pytest.mark.exhaustive),
    ],
    ids=["ppo-dp2", "grpo-tp2", "reinforce-pp2"],
)
def test_a_loop_by_hand_gives_the_numbers_of_a_run(more: dict[str, Any], tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(**{"run.steps": STEPS, "run.eval_before": False, "run.export": False, **more})
    train(config)
    rows = [row for row in curve(Path(config.run_folder)) if row["step"]]
    for row, metrics in zip(rows, own(config), strict=True):
        compared = ["reward/mean", "policy/loss", "policy/entropy", "policy/grad_norm", "policy/lr", "kl/reference"]
        compared += ["critic/loss", "critic/grad_norm"] if config.uses_critic else []
        for name in compared:
            assert metrics[name] == pytest.approx(row[name], rel=1e-5, abs=1e-7), name  # advantages cancel to 0


def squared(log_probs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that no catalogue has."""
    return (log_probs - columns["target"]) ** 2, {"seen": torch.ones_like(log_probs).sum()}


def test_a_function_as_loss_rows_in_parts_and_a_checkpoint(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny_config(**{"policy.layout": {"dp": 2}})
    with megarl.open(config) as session:
        groups = session.sample(["1+1=", "2+2="], n=3, max_new_tokens=5, temperature=0.7)
        assert [len(group) for group in groups] == [3, 3]
        assert all(len(sample.response_ids) <= 5 for group in groups for sample in group)
        (whole,) = session.sample(["1+1="], greedy=True, max_new_tokens=5)[0]
        (ended,) = session.sample(["1+1="], greedy=True, max_new_tokens=5, stop=whole.response_text[:2])[0]
        assert ended.response_ids == whole.response_ids[: len(ended.response_ids)]
        assert ended.finish_reason == "stop"
        assert len(ended.response_ids) < len(whole.response_ids)
        batch = session.batch(groups)
        before = session.forward(batch)["log_probs"]
        assert before.shape == batch.mask.shape
        batch.columns["target"] = -torch.ones(batch.mask.shape)
        weights = batch.mask / batch.mask.sum()

        def loss() -> float:
            return float((((session.forward(batch)["log_probs"] + 1) ** 2) * weights).sum())

        first = loss()
        parts = [session.forward_backward(batch, squared, rows=rows, weights=weights) for rows in ([0, 3, 5], [1, 2, 4])]
        assert sum(part["policy/loss"] for part in parts) == pytest.approx(first, rel=1e-4)
        assert session.optimizer_step()["skipped"] == 0
        assert session.step == 1
        assert loss() < first
        assert session.version == 0
        assert session.sync_weights() == session.sync_weights() == 1

        after = session.forward(batch)["log_probs"]
        saved = session.save(tmp_path / "checkpoints")
        session.forward_backward(batch, "cross_entropy")
        session.optimizer_step()
        assert not torch.equal(session.forward(batch)["log_probs"], after)
        session.load(saved)
        assert torch.equal(session.forward(batch)["log_probs"], after)
        assert session.step == 1
        session.export(tmp_path / "model")
        assert (tmp_path / "model" / "model.safetensors").exists()
        refused(session, batch)


def refused(session: megarl.Session, batch: megarl.Batch) -> None:
    """Every mistake is one sentence."""
    calls: list[tuple[Callable[[], Any], str]] = [
        (session.optimizer_step, "optimizer_step of policy has no gradients to apply; call forward_backward before it"),
        (lambda: session.forward_backward(batch, "clipp", advantages=[1.0] * 6), r"loss is 'clipp' \(did you mean 'clip'\?\)"),
        (lambda: session.update(batch, roles=["critic"]), "role is 'critic'"),
        (lambda: session.forward_backward(batch, "clip", advantages=[1.0]), r"advantages has the shape \[1\]; it must be one"),
        (lambda: session.forward_backward(batch, "clip", weights="mean", advantages=[1.0] * 6), "weights is 'mean'"),
        (lambda: session.forward_backward(batch, lambda log_probs, _: log_probs.sum()), r"returned a tensor \[\]; it must"),
        (lambda: session.forward(batch, "critic"), "role is 'critic'; it must be one that the config has: policy"),
        (lambda: session.sample(["1+1="], n=0), "n is 0; it must be at least 1"),
        (lambda: session.sample([[{"role": "user", "content": "2+2="}]]), "but the tokenizer has no chat template; it must be"),
        (lambda: session.sample(["x" * 300]), "tokens, but data.max_prompt_tokens is"),
        (lambda: session.advantages(batch, [1.0]), "rewards has 1 numbers for 6 samples; it must have one for each"),
    ]
    for call, sentence in calls:
        with pytest.raises(megarl.MegarlError, match=sentence) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_config_is_said_before_anything_starts(tiny_model: Path) -> None:
    model = {"path": str(tiny_model), "dtype": "float32"}
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"config": 3}, "config is a int; it must be a YAML file, a mapping of sections, or a Config"),
        ({"modell": model}, r"modell is not a config field \(did you mean 'model'\?\)"),
        ({"model": model, "policy": {"layout": {"tp": 0}}}, "policy.layout.tp is 0; it must be"),
        ({"model": model, "rewards": ["exact"]}, "rewards has a str; it must hold functions"),
        ({"model": model, "objective": {"name": "sft"}}, "objective is a field of `megarl sft`"),
    ]
    for given, sentence in mistakes:
        with pytest.raises(megarl.MegarlError, match=sentence):
            megarl.open(**given)
    with pytest.raises(megarl.MegarlError, match="a run needs a source of reward"):
        megarl.train(model=model, data={"train": {"source": "reasoning_gym", "name": "chain_sum"}})


def test_train_takes_functions_as_rewards(tiny_config: Callable[..., Config]) -> None:
    lengths: list[int] = []

    def length(sample: megarl.Sample) -> float:
        lengths.append(len(sample.response_ids))
        return float(len(sample.response_ids))

    config = tiny_config(**{"run.steps": 1, "run.eval_before": False, "run.export": False})
    megarl.train(config.model_copy(update={"rewards": ()}), rewards=[length])
    (row,) = (row for row in curve(Path(config.run_folder)) if row["step"])
    assert row["reward/mean"] == pytest.approx(row["response/tokens_mean"])
    assert lengths


def test_a_session_leaves_the_temporary_folder_of_its_program_as_it_was(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "config.yaml").write_text(tiny_config().model_dump_json(exclude_unset=True))
    (tmp_path / "own.py").write_text(
        "import os, tempfile, megarl\n"
        "with megarl.open('config.yaml'):\n"
        "    print(len(os.listdir(tempfile.gettempdir())))\n"
    )  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(EXAMPLES.parents[1])}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 0
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, megarl; print(sorted({'torch', 'ray', 'pydantic'} & sys.modules.keys()), dir(megarl))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ['Batch', 'Config', 'MegarlError'")


def test_the_page_shows_the_example_that_is_run() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "python.md").read_text()
    assert f"```python\n{(EXAMPLES / 'grpo.py').read_text()}```\n" in page


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("grpo", 4),
        pytest.param("best_of_n", 4, marks=pytest.mark.exhaustive),
        pytest.param("race_to_ten", 16, marks=pytest.mark.exhaustive),
    ],
)
def test_the_examples_learn(name: str, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not MODEL.exists():
        pytest.skip("needs models/tiny-arithmetic (make tiny-model)")
    for folder in ("examples", "models"):
        (tmp_path / folder).symlink_to(EXAMPLES.parents[1] / folder)
    monkeypatch.chdir(tmp_path)
    shares = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps)
    assert max(shares[-2:]) > shares[0] + 0.1
