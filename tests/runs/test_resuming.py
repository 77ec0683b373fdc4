"""A config that cannot go on from a checkpoint is refused in one sentence before anything starts; the rest is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import AnyConfig, Config, to_yaml
from megarl.config.yaml_tree import load_text
from megarl.errors import ConfigError
from megarl.runs.provenance import CONFIG, provenance
from megarl.runs.resuming import differences_at_resume, refuse_changes, resumes_from
from megarl.runs.run_checkpoint import CheckpointFolder, write_state
from megarl.trainers.rl import train as rl
from megarl.trainers.supervised import train as given
from tests.config import smallest

PPO = "algorithm.name=ppo"


def saved(config: AnyConfig, roles: tuple[str, ...] = ("policy",), step: int = 4, **state: Any) -> Path:
    """A checkpoint of a run of `config` that has `roles`, as far as its files matter before anything starts."""
    checkpoints = CheckpointFolder(Path(config.run_folder) / "checkpoints")
    folder = checkpoints.begin(step)
    for role in roles:
        (folder / role).mkdir()
        (folder / role / "common.pt").write_bytes(b"x")
    (folder / CONFIG).write_text(to_yaml(config))
    write_state(folder, {"step": step, "evaluations": {}, **state})
    return checkpoints.commit(step, provenance(to_yaml(config), step, step))


def resumed(config: AnyConfig, *overrides: str) -> AnyConfig:
    """The smallest config in the run's folder, resumed with these fields."""
    same = [f"run.folder={config.run.folder}", f"run.name={config.run.name}", f"model.path={config.model.path}"]
    make = smallest.config if isinstance(config, Config) else smallest.supervised
    return make(*same, "run.resume=auto", *overrides)


@pytest.fixture
def run(tmp_path: Path) -> AnyConfig:
    return smallest.config(f"run.folder={tmp_path}", "run.name=mine", f"model.path={tmp_path / 'model'}")


REFUSED = {
    "another algorithm": (
        [PPO], r"trains a critic, of which the checkpoint has nothing \(algorithm\.name was 'grpo', now 'ppo'\)",
    ),
    "a reference that is reset": (
        ["reference.reset_every=2", "algorithm.kl.coef=0.1"], r"moves a reference, of which the checkpoint has nothing",
    ),
    "adapters": (["policy.lora.rank=8"], r"policy\.lora\.rank was 0, now 8, but the checkpoint has the other adapters"),
    "an optimizer": (["policy.optimizer.name=muon"], r"name was 'adamw', now 'muon', but .* other optimizer's moments"),
    "a seed": (["run.seed=3"], r"run\.seed was 0, now 3, but the order of rows"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_on_is_refused_before_anything_starts(
    run: AnyConfig, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for start in ("cluster_ahead", "open_run"):
        monkeypatch.setattr(rl, start, lambda *given, name=start: begun.append(name))
    checkpoint = saved(run)
    overrides, sentence = REFUSED[what]
    before = sorted(path for path in Path(run.run.folder).rglob("*"))
    with pytest.raises(ConfigError, match=sentence) as refused:
        rl.train(resumed(run, *overrides))
    assert str(refused.value).startswith(f"run.resume cannot continue {checkpoint} with this config: ")
    assert "\n" not in str(refused.value)
    assert begun == []
    assert sorted(path for path in Path(run.run.folder).rglob("*")) == before


def test_all_refusals_are_said_at_once(run: AnyConfig) -> None:
    saved(run)
    with pytest.raises(ConfigError) as refused:
        refuse_changes(resumed(run, PPO, "policy.optimizer.name=muon", "run.seed=1"))
    assert all(name in str(refused.value) for name in ("a critic", "policy.optimizer.name", "run.seed"))


def test_a_critic_that_is_there_goes_on_and_one_that_is_not_used_may_be_anything(run: AnyConfig) -> None:
    checkpoint = saved(resumed(run, PPO), ("policy", "critic"))
    assert refuse_changes(resumed(run, PPO)) == checkpoint
    assert refuse_changes(resumed(run, "critic.optimizer.name=muon")) == checkpoint  # GRPO from there
    with pytest.raises(ConfigError, match=r"critic\.optimizer\.name was 'adamw', now 'muon'"):
        refuse_changes(resumed(run, PPO, "critic.optimizer.name=muon"))


def test_models_of_other_sizes_are_refused_and_a_folder_that_moved_is_not(run: AnyConfig, tmp_path: Path) -> None:
    checkpoint = saved(run)
    for name, layers in (("model", 4), ("moved", 4), ("larger", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    moved = resumed(run, f"model.path={tmp_path / 'moved'}")
    assert refuse_changes(moved) == checkpoint
    [said] = differences_at_resume(checkpoint, moved, 4)
    assert said.startswith("the config has changed since the checkpoint, which is kept: model.path was")
    with pytest.raises(ConfigError, match=r"models of other sizes \(num_hidden_layers 4 and 6\)"):
        refuse_changes(resumed(run, f"model.path={tmp_path / 'larger'}"))


def test_runs_of_the_other_kind_are_refused(run: AnyConfig, tmp_path: Path) -> None:
    saved(run)
    other = smallest.supervised(f"run.folder={tmp_path}", "run.name=mine", "run.resume=auto")
    with pytest.raises(ConfigError, match="which is of reinforcement learning, with a config of training on given responses"):
        given.train(other)


def test_a_head_that_scores_and_one_that_predicts_are_refused_of_each_other(tmp_path: Path) -> None:
    sft = smallest.supervised(f"run.folder={tmp_path}", "run.name=mine")
    saved(sft)
    with pytest.raises(
        ConfigError, match=r"objective\.name was 'sft', now 'reward_model', but one of them has a head that scores"
    ):
        given.train(resumed(sft, "objective.name=reward_model"))
    assert refuse_changes(resumed(sft, "objective.name=dft")) is not None


def test_finished_groups_keep_their_number_of_responses(run: AnyConfig) -> None:
    saved(run, groups={"samples": [[{}] * 8] * 3})
    with pytest.raises(ConfigError, match=r"samples_per_prompt was \d+, now 2, but the checkpoint has 3 finished groups"):
        refuse_changes(resumed(run, "rollout.samples_per_prompt=2", "rollout.prompts_per_step=32"))


def test_what_applies_and_what_is_kept_is_said(run: AnyConfig) -> None:
    checkpoint = saved(run)
    changed = resumed(run, "run.steps=9", "policy.optimizer.lr=2e-6", "data.train.limit=7", "critic.init_from=elsewhere")
    assert differences_at_resume(checkpoint, changed, 4) == [
        "the config has changed since the checkpoint, and applies from the next step: policy.optimizer.lr was 1e-06, now "
        f"2e-06; run.steps was {run.run.steps}, now 9",
        "the config has changed since the checkpoint, and the rows decide (data.on_change): data.train.limit was None, now 7",
        "the config has changed since the checkpoint, which is kept: critic.init_from was None, now 'elsewhere' (the weights "
        "are the checkpoint's)",
    ]
    assert differences_at_resume(checkpoint, resumed(run), 4) == []


def test_fields_that_an_earlier_version_did_not_have_are_no_change_at_their_default(run: AnyConfig) -> None:
    checkpoint = saved(run)
    tree = load_text(to_yaml(run))
    del tree["data"]["on_change"], tree["run"]["keep_best"]
    (checkpoint / CONFIG).write_text(yaml.safe_dump(tree))
    assert differences_at_resume(checkpoint, resumed(run), 4) == []
    [said] = differences_at_resume(checkpoint, resumed(run, "data.on_change=append"), 4)
    assert "data.on_change was 'refuse', now 'append'" in said


def test_a_config_that_cannot_be_read_is_said_and_refuses_nothing(run: AnyConfig) -> None:
    checkpoint = saved(run)
    (checkpoint / CONFIG).write_text("a: [")
    [said] = differences_at_resume(checkpoint, resumed(run), 4)
    assert "whose own cannot be read" in said
    assert refuse_changes(resumed(run)) == checkpoint


def test_the_checkpoint_is_the_one_that_run_resume_names(run: AnyConfig, tmp_path: Path) -> None:
    first, second = saved(run, step=2), saved(run, step=4)
    assert resumes_from(run) is None
    assert resumes_from(resumed(run)) == second
    assert resumes_from(resumed(run, f"run.resume={first}")) == first
    assert resumes_from(resumed(run, "run.name=other")) is None
    assert resumes_from(resumed(run, "run.name=other", f"run.resume={tmp_path / 'mine'}")) == second
