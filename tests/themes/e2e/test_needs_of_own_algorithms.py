"""An estimator and a loss in a user's own file get what they say they need, in a real run: a critic's values, greedy rewards,
the engine's and the reference's log-probs. What they were given is compared with Hugging Face's models, run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")

ESTIMATOR = '''
"""A user's own estimator, above both the greedy response and the critic; it writes down what it was given. And a reward."""

import json
from pathlib import Path

import torch

from megarl.algorithms import AdvantageInputs, AdvantageOutputs, needs


@needs(values=True, greedy=True, token_penalty=False)
def above_both(inputs: AdvantageInputs) -> AdvantageOutputs:
    seen = {name: getattr(inputs, name).tolist() for name in ("scores", "greedy_scores", "values", "mask")}
    with Path(__file__).with_name("seen.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\\n")
    above = (inputs.scores - inputs.greedy_scores)[:, None] - inputs.values
    returns = inputs.scores[:, None].expand_as(inputs.values)
    return AdvantageOutputs(advantages=torch.where(inputs.mask, above, 0), returns=torch.where(inputs.mask, returns, 0))


def by_letters(sample, scale):
    text = sample.prompt_text + sample.response_text
    return scale * sum(place * ord(letter) for place, letter in enumerate(text, start=1))
'''

LOSS = '''
"""A loss and an estimator of the user's own that take everybody's log-probs, and arguments of the config."""

import torch

from megarl.algorithms import AdvantageOutputs, needs


@needs(rollout_log_probs=True, reference_log_probs=True, teacher_log_probs=True)
def with_all(log_probs, old, advantages, *, scale, rollout_log_probs, reference_log_probs, teacher_log_probs, **_):
    own = rollout_log_probs + scale * reference_log_probs + 100 * teacher_log_probs
    return -advantages * log_probs, {"own": own.sum()}


@needs(teacher_log_probs=True, old_log_probs=True)
def towards_teacher(inputs):
    """On-policy distillation: the teacher's log-prob less the policy's, of every token."""
    return AdvantageOutputs(advantages=torch.where(inputs.mask, inputs.teacher_log_probs - inputs.old_log_probs, 0))
'''


def log_probs_of(folder: Path, sample: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's log-prob of each response token, float `[L]`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([sample["prompt_ids"] + sample["response_ids"]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[len(sample["prompt_ids"]) - 1 :, 0]


def test_an_estimator_in_a_users_file_gets_the_critic_and_the_greedy_rewards_it_needs(
    tiny_config: Callable[..., Config], tiny_model: Path, reward_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    algorithm = {"advantage": f"{tmp_path / 'mine.py'}:above_both", "kl": {"coef": 0.0}}
    reward = {"name": f"{tmp_path / 'mine.py'}:by_letters", "args": {"scale": 1e-5}}
    settings = {"data.eval": None, "run.steps": 1, "critic.init_from": str(reward_model)}
    config = tiny_config(**settings, algorithm=algorithm, rewards=[reward])
    assert config.uses_critic
    train(config)

    samples = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    seen = json.loads((tmp_path / "seen.jsonl").read_text())
    assert len(samples) == len(seen["scores"]) == 16
    policy = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    critic = transformers.LlamaForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    expected_greedy = []
    for row, sample in enumerate(samples):
        prompt, length = sample["prompt_ids"], len(sample["response_ids"])
        with torch.no_grad():
            ids = torch.tensor([prompt])
            answer = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[
                0, len(prompt) :
            ]
            hidden = critic.model(torch.tensor([prompt + sample["response_ids"]])).last_hidden_state[0]
            values = critic.score(hidden)[len(prompt) - 1 : -1, 0]  # before each token is chosen
        text = sample["prompt_text"] + tokenizer.decode(answer, skip_special_tokens=True)
        expected_greedy.append(sum(place * ord(letter) for place, letter in enumerate(text, start=1)) * 1e-5)
        assert seen["values"][row][:length] == pytest.approx(values.tolist(), abs=1e-5)
        assert seen["mask"][row][:length] == [True] * length
        assert seen["scores"][row] == pytest.approx(sample["training"]["reward"], abs=1e-6)
        above = sample["training"]["reward"] - expected_greedy[-1] - values
        assert sample["training"]["advantages"] == pytest.approx(above.tolist(), abs=1e-5)
    assert seen["greedy_scores"] == pytest.approx(expected_greedy, abs=1e-6)
    assert len(set(expected_greedy)) > 1  # or the comparison would say little
    (metrics,) = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    assert metrics["critic/grad_norm"] > 0  # it is trained on the returns of the user's estimator


def test_a_loss_in_a_users_file_gets_the_log_probs_it_needs(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    torch.manual_seed(5)
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_model))
    other.save_pretrained(tmp_path / "other")
    torch.manual_seed(6)
    teacher = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_model))
    teacher.save_pretrained(tmp_path / "teacher")
    for folder in ("other", "teacher"):
        transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / folder)
    mine = tmp_path / "mine.py"
    algorithm = {"policy_loss": f"{mine}:with_all", "policy_loss_args": {"scale": 10}, "kl": {"coef": 0.0}}
    algorithm |= {"advantage": f"{mine}:towards_teacher"}
    settings = {"data.eval": None, "run.steps": 1, "reference.path": str(tmp_path / "other"), "algorithm": algorithm}
    settings |= {"teacher.path": str(tmp_path / "teacher")}
    config = tiny_config(**settings, **{"policy.layout": {"dp": 2}})
    assert config.uses_reference
    train(config)

    samples = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    of_teacher = [log_probs_of(tmp_path / "teacher", s) for s in samples]
    reported = [
        log_probs_of(tiny_model, s) + 10 * log_probs_of(tmp_path / "other", s) + 100 * taught
        for s, taught in zip(samples, of_teacher, strict=True)
    ]
    for sample, taught in zip(samples, of_teacher, strict=True):
        wanted = taught - log_probs_of(tiny_model, sample)
        assert sample["training"]["advantages"] == pytest.approx(wanted.tolist(), abs=1e-4)
    (metrics,) = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    assert metrics["policy/own"] == pytest.approx(float(torch.cat(reported).mean()), abs=1e-2)


def test_what_a_users_estimator_needs_is_checked_with_the_config(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    own = {"algorithm.advantage": f"{tmp_path / 'mine.py'}:above_both"}
    with pytest.raises(ConfigError, match=r"mine\.py:above_both' cannot use: its greedy responses"):
        tiny_config(**own, **{"rollout.schedule": {"mode": "one_step_off_policy"}})
    with pytest.raises(ConfigError, match=r"mine\.py:above_both' has no place for; it must be 'loss'"):
        tiny_config(**own, **{"algorithm.kl": {"apply_to": "reward", "coef": 0.1}})
    with pytest.raises(ConfigError, match=r"critic\.layout\.dp is 3"):
        tiny_config(**own, **{"critic.layout": {"dp": 3}})
    assert tiny_config(**own, **{"algorithm.truncated_responses": "bootstrap", "critic.warmup_steps": 1}).uses_critic
