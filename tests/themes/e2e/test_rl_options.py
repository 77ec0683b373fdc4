"""Options of the RL loop that need ranks and engines: each acts, and by what it says."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
HERE = Path(__file__).parent
NO_EVAL = {"data.eval": None, "run.log_samples": 1000}


def run(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of the steps and all samples of a run."""
    train(config)
    folder = Path(config.run_folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]], samples


@pytest.mark.parametrize(
    "layout",
    # the process reward model below stands with the policy
    [pytest.param(None, id="with the policy", marks=pytest.mark.exhaustive), pytest.param({"tp": 2}, id="tp2 of its own")],
)
def test_a_reward_model_scores_as_hugging_face_does(
    layout: dict[str, int] | None, tiny_config: Callable[..., Config], reward_model: Path
) -> None:
    settings = {"reward_model": {"path": str(reward_model), "weight": 0.5, "layout": layout}, "rewards": [], "run.steps": 1}
    metrics, samples = run(tiny_config(**settings, **NO_EVAL))
    model = transformers.LlamaForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    model.config.pad_token_id = None
    with torch.no_grad():
        expected = [float(model(torch.tensor([s["prompt_ids"] + s["response_ids"]])).logits[0, 0]) for s in samples]
    assert [s["rewards"]["reward_model"] for s in samples] == pytest.approx(expected, abs=1e-5)
    assert metrics[0]["reward/mean"] == pytest.approx(0.5 * sum(expected) / len(expected), abs=1e-5)


def test_a_process_reward_model_scores_every_step(tiny_config: Callable[..., Config], reward_model: Path) -> None:
    settings = {"reward_model": {"path": str(reward_model), "per_step": True}, "rewards": [], "run.steps": 1}
    algorithm = {"algorithm": {"name": "grpo", "advantage": "grpo_process"}}
    metrics, samples = run(tiny_config(**settings, **algorithm, **NO_EVAL))
    assert all(0 < s["rewards"]["reward_model"] < 1 for s in samples)
    assert metrics[0]["policy/grad_norm"] > 0


def test_reinforce_plus_plus_trains_on_advantages_that_are_normalised_over_the_step(tiny_config: Callable[..., Config]) -> None:
    metrics, samples = run(tiny_config(**NO_EVAL, **{"algorithm": {"name": "reinforce_plus_plus"}}))
    for row in metrics:
        advantages = [value for s in samples if s["step"] == row["step"] for value in s["training"]["advantages"]]
        assert statistics.fmean(advantages) == pytest.approx(0, abs=1e-5)
        assert statistics.pstdev(advantages) == pytest.approx(1, abs=0.02)
        assert row["policy/grad_norm"] > 0


def test_the_ratio_is_to_the_engine_without_a_pass_for_old_log_probs(tiny_config: Callable[..., Config]) -> None:
    penalty = {"policy_loss": "kl_penalty", "old_policy_kl": {"coef": 0.5, "target": 1e3}}
    algorithm = {"mini_batches": 2, "kl": {"coef": 0.0}, "rollout_correction": {"mode": "bypass"}, **penalty}
    metrics, samples = run(tiny_config(algorithm=algorithm, **NO_EVAL))
    assert [row["policy/kl_old_coef"] for row in metrics] == [0.5, 0.25]  # far below its target
    for row in metrics:
        assert row["policy/ratio"] == pytest.approx(1, abs=0.05)
        assert row["policy/clamped"] == 0
        assert "correction/weight_mean" not in row
    for sample in samples:
        assert sample["training"]["log_probs"] == pytest.approx(sample["rollout_log_probs"], abs=0.5)


def test_corrections_and_a_kl_in_the_reward_act_together_and_a_doubtful_choice_is_said(
    tiny_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    corrections = [{"mode": "tis_token", "normalise": True}, {"mode": "mask_sequence", "low": 0.5, "high": 2.0}]
    algorithm = {"advantage": "rloo", "kl": {"coef": 0.1, "apply_to": "reward"}, "rollout_correction": corrections}
    algorithm |= {
        "policy_loss": "gspo",
        "clip_high": 0.2,
        "advantage_normalisation": "batch_rms",
        "truncated_responses": "exclude",
    }
    metrics, samples = run(tiny_config(algorithm=algorithm, **NO_EVAL))
    assert "warning: algorithm.clip_high = 0.2 never clips the sequence ratio" in capsys.readouterr().out
    for row in metrics:
        assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        kept = [s for s in samples if s["step"] == row["step"] and any(s["training"]["advantages"])]
        assert all(s["finish_reason"] != "length" for s in kept)
        values = [s["training"]["advantages"][0] for s in kept]
        if values:
            assert statistics.fmean(value * value for value in values) == pytest.approx(1, abs=0.01)


# tests/experience/test_experience.py subtracts the rewards, test_needs_of_own_algorithms.py gets them of greedy responses
@pytest.mark.exhaustive
def test_remax_compares_with_the_greedy_response(tiny_config: Callable[..., Config]) -> None:
    settings = {"algorithm": {"name": "grpo", "advantage": "remax", "policy_loss": "reinforce", "kl": {"coef": 0.0}}}
    metrics, samples = run(tiny_config(**settings, **NO_EVAL, **{"rollout.samples_per_prompt": 1, "run.steps": 2}))
    assert len(samples) == 8
    assert all(row["policy/grad_norm"] >= 0 for row in metrics)


def test_uniform_groups_are_replaced_until_the_step_is_full(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    # Every other call of the run scores all alike: the first round of each step is tied, the second is not.
    (tmp_path / "turns.py").write_text(
        "calls = 0\n"
        "def reward(samples):\n"
        "    global calls\n"
        "    calls += len(samples) > 2\n"  # those before the run are of two made-up responses
        "    return [0.0 if calls % 2 else float(i) for i, _ in enumerate(samples)]\n"
    )
    rewards = {"rewards": [{"name": f"{tmp_path / 'turns.py'}:reward"}]}
    metrics, samples = run(tiny_config(**rewards, **NO_EVAL, **{"rollout.dynamic_sampling_rounds": 3, "run.steps": 2}))
    for row in metrics:
        assert row["rollout/dynamic_sampling_rounds"] == 1
        assert row["rollout/discarded_groups"] == 4
        assert row["reward/uniform_groups"] == 0
        assert row["rollout/samples"] == 16
    assert len({s["group_id"] for s in samples}) == 8


def examples(folder: Path) -> dict[str, str]:
    """Source of four rows with their answers."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(4))
    )
    return {"source": "jsonl", "path": str(folder / "rows.jsonl")}


def test_resampling_is_bounded_and_the_step_stays_full(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def reward(samples):\n    return [1.0] * len(samples)\n")
    rewards = {"rewards": [{"name": f"{tmp_path / 'same.py'}:reward"}]}
    ptx = {"ptx": {"coef": 0.0, "samples_per_step": 4, "data": examples(tmp_path)}}  # which is without examples
    metrics, _ = run(tiny_config(**rewards, **ptx, **NO_EVAL, **{"rollout.dynamic_sampling_rounds": 2, "run.steps": 1}))
    assert metrics[0]["rollout/dynamic_sampling_rounds"] == 2
    assert metrics[0]["rollout/samples"] == 16
    assert metrics[0]["policy/grad_norm"] == 0
    assert "ptx/loss" not in metrics[0]


def test_a_reset_reference_is_the_policy_of_that_step_and_a_resumed_run_keeps_it(tiny_config: Callable[..., Config]) -> None:
    settings = {**NO_EVAL, "reference.reset_every": 2, "run.resume": "auto", "run.steps": 4, "policy.layout": {"dp": 2}}
    config = tiny_config(**settings, **{"run.name": "whole", "run.save_every": 3, "run.keep_checkpoints": 0})
    whole, _ = run(config)
    kl = [row["kl/reference"] for row in whole]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[1] > 1e-7
    assert kl[2] == pytest.approx(0, abs=1e-9)
    assert kl[3] > 1e-7
    # as it was after its third step
    folder = Path(config.run_folder)
    shutil.copytree(folder, folder.with_name("parts"))
    shutil.rmtree(folder.with_name("parts") / "checkpoints" / "step_000004")
    parts, _ = run(tiny_config(**settings, **{"run.name": "parts"}))
    assert (folder.with_name("parts") / "checkpoints" / "step_000004").exists()
    assert [row["kl/reference"] for row in parts] == kl
    assert [row["policy/grad_norm"] for row in parts] == [row["policy/grad_norm"] for row in whole]


def test_supervised_examples_are_mixed_in_with_their_weight(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    source = examples(tmp_path)
    same = {"rewards": [{"name": f"{tmp_path / 'same.py'}:reward"}], **NO_EVAL, "algorithm": {"kl": {"coef": 0.0}}}
    (tmp_path / "same.py").write_text("def reward(samples):\n    return [1.0] * len(samples)\n")
    norms = {}
    for coef in (0.5, 1.0):
        settings = {"ptx": {"coef": coef, "samples_per_step": 4, "data": source}, "policy.layout": {"dp": 2}, "run.steps": 1}
        metrics, _ = run(tiny_config(**same, **settings, **{"run.name": f"ptx-{coef}"}))
        norms[coef] = metrics[0]["policy/grad_norm"]
        assert "ptx/loss" in metrics[0]
    # With rewards that all agree the policy's own gradient is 0, as the test of resampling says: what is left is that of the
    # examples.
    assert norms[1.0] == pytest.approx(2 * norms[0.5], rel=1e-4)
    assert norms[0.5] > 0


@pytest.mark.exhaustive  # tests/experience/test_experience.py asks for them, and test_runs.py has a run with a critic
def test_values_after_truncated_responses_are_asked_for(tiny_config: Callable[..., Config]) -> None:
    settings = {"algorithm": {"name": "ppo", "truncated_responses": "bootstrap", "kl": {"coef": 0.0}}}
    metrics, _ = run(tiny_config(**settings, **NO_EVAL))
    assert metrics[1]["critic/loss"] > 0


@pytest.mark.exhaustive  # test_needs_of_own_algorithms.py and a page of the documentation name theirs by a file
def test_a_loss_and_an_estimator_of_ones_own_are_named_by_their_path(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"advantage": "tests.themes.e2e.own_algorithm:half", "policy_loss": "tests.themes.e2e.own_algorithm:linear"}
    metrics, _ = run(tiny_config(**{"algorithm": {"name": "grpo", "kl": {"coef": 0.0}, **own}, "run.steps": 1}, **NO_EVAL))
    assert metrics[0]["policy/own"] == pytest.approx(7.0)
    assert metrics[0]["policy/loss"] == pytest.approx(-0.5 * 2.0, abs=1e-5)


def test_the_trained_policy_is_exported_for_hugging_face(tiny_config: Callable[..., Config], tiny_model: Path) -> None:
    config = tiny_config(**NO_EVAL, **{"run.export": True, "policy.layout": {"pp": 2}, "run.steps": 1})
    run(config)
    folder = Path(config.run_folder) / "model"
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    moved = [float((a - b).abs().max()) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-2
    assert transformers.AutoTokenizer.from_pretrained(folder)("1+1=")["input_ids"]


def test_a_step_on_kept_tokens_has_the_gradient_of_hugging_face(tiny_config: Callable[..., Config], tiny_model: Path) -> None:
    """One on-policy update under top-p: the norm is that of log-probs over the kept tokens, in float64."""
    algorithm = {"name": "grpo", "kl": {"coef": 0.0}}
    limits = {"rollout.top_p": 0.7, "rollout.min_p": 0.02, "rollout.temperature": 0.9}
    [metrics], samples = run(tiny_config(algorithm=algorithm, **limits, **NO_EVAL | {"run.steps": 1}))
    assert metrics["mismatch/log_prob_max"] < 1e-4
    assert 0.7 <= metrics["policy/kept_probability"] < 0.999
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    loss, entropies = torch.zeros((), dtype=torch.float64), []
    for sample in samples:
        prompt, response = sample["prompt_ids"], torch.tensor(sample["response_ids"])
        logits = model(torch.tensor([prompt + sample["response_ids"]])).logits[0, len(prompt) - 1 : -1] / 0.9
        p = logits.detach().softmax(-1)
        ordered, order = p.sort(dim=-1, descending=True)
        gone = torch.zeros_like(p, dtype=torch.bool).scatter_(1, order, ordered.cumsum(-1) - ordered >= 0.7)
        gone |= p < 0.02 * p.amax(-1, keepdim=True)
        assert not gone.gather(1, response[:, None]).any()
        log_p = logits.masked_fill(gone, -torch.inf).log_softmax(-1)
        entropies += (-(log_p.exp() * log_p.masked_fill(gone, 0.0)).sum(-1)).tolist()
        advantages = torch.tensor(sample["training"]["advantages"], dtype=torch.float64)
        loss = loss - (advantages * log_p.gather(1, response[:, None])[:, 0]).mean() / len(samples)
        of_all = (logits.log_softmax(-1)).gather(1, response[:, None])[:, 0]
        assert sample["training"]["log_probs"] == pytest.approx(of_all.tolist(), abs=1e-4)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics["policy/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert metrics["policy/entropy"] == pytest.approx(statistics.fmean(entropies), rel=1e-4)


def test_further_updates_and_corrections_are_over_kept_tokens_on_sglang(tiny_config: Callable[..., Config]) -> None:
    correction = {"mode": "tis_token", "high": 2.0}
    algorithm = {"name": "grpo", "mini_batches": 2, "kl": {"coef": 0.01}, "rollout_correction": correction}
    limits = {"rollout.engine": "sglang", "rollout.top_p": 0.8, "rollout.top_k": 20, "rollout.min_p": 0.01}
    metrics, samples = run(tiny_config(algorithm=algorithm, **limits, **NO_EVAL))
    for row in metrics:
        assert row["mismatch/log_prob_max"] < 1e-4
        assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert 0 < row["policy/kept_probability"] < 0.999
    for sample in samples:
        assert sample["training"]["log_probs"] == pytest.approx(sample["rollout_log_probs"], abs=1e-4)
