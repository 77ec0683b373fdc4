"""Config fields and values that had other names in earlier versions: an old name is refused with the new one.

The table is the only place that knows the old names; entries of a list stand as `[]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.config.yaml_tree import tree_places
from megarl.errors import ConfigError

_SOURCES = ("data.train", "data.eval", "ptx.data", "data.train.parts[]", "data.eval.parts[]", "ptx.data.parts[]")

RENAMED: dict[str, str] = {
    "algorithm.kl.where": "algorithm.kl.apply_to",
    "algorithm.entropy_coef": "algorithm.entropy.coef",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.penalty_coef": "algorithm.old_policy_kl.coef",
    "algorithm.old_policy_kl_coef": "algorithm.old_policy_kl.coef",
    "algorithm.correction": "algorithm.rollout_correction",
    "algorithm.truncated": "algorithm.truncated_responses",
    "critic.clip_range": "critic.value_clip",
    "policy.share_prompts": "policy.share_prefix",
    "reward_model.process": "reward_model.per_step",
    "rollout.sync": "rollout.weight_transport",
    "rollout.resample_rounds": "rollout.dynamic_sampling_rounds",
    "rollout.schedule.staleness": "rollout.schedule.max_staleness",
    "rollout.engine_args.urls": "rollout.servers.urls",
    "rollout.engine_args.port": "rollout.servers.port",
    "rollout.engine_args.model_path": "rollout.servers.model_path",
    "run.restarts": "run.max_restarts",
    "trackers.to": "trackers.backends",
} | {f"{source}.fields": f"{source}.columns" for source in _SOURCES}
"""Old field -> new field."""

RENAMED_VALUES: dict[str, dict[str, str]] = {
    "rollout.weight_transport": {"tensors": "shared_memory", "disk": "folder"},
    "rollout.schedule.mode": {"one_step": "one_step_off_policy"},
}
"""New field -> old value -> new value."""

FOREIGN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs", "num_train_epochs", "num_episodes"), ("run.epochs",)),
    **dict.fromkeys(("max_steps", "total_training_steps"), ("run.steps",)),
    **dict.fromkeys(("save_freq", "save_steps"), ("run.save_every",)),
    **dict.fromkeys(("test_freq", "eval_steps"), ("run.eval_every",)),
    **dict.fromkeys(("ppo_epochs", "num_iterations"), ("algorithm.epochs",)),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size"), ("rollout.prompts_per_step", "data.rows_per_step")),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt"), ("rollout.samples_per_prompt",)),
    **dict.fromkeys(("max_response_length", "max_completion_length", "generate_max_len"), ("rollout.max_new_tokens",)),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("data.max_prompt_tokens",)),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), ("policy.optimizer.lr",)),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef"), ("algorithm.kl.coef",)),
    **dict.fromkeys(("model_name_or_path", "pretrain"), ("model.path",)),
}
"""Names of other trainers -> fields that mean the same, by kind of run; a hint, whatever section they stand in."""

FOREIGN_VALUES: dict[str, dict[object, str]] = {
    "algorithm.kl.estimator": {"low_var_kl": "k3", "kl": "k1", "mse": "k2"},
    "model.dtype": {"fp32": "float32", "bf16": "bfloat16"},
    "model.recompute": {True: "full", False: "none"},
    "run.resume": {True: "auto", False: "never"},
    **{f"{role}.optimizer.schedule": {"constant_with_warmup": "constant"} for role in ("policy", "critic")},
}
"""Field -> value of other trainers -> the value that means the same; a hint."""

_GUARD = re.compile(r"(?P<action>\S+) if (?P<metric>\S+) (?P<side>above|below) (?P<bound>\S+)(?: for (?P<steps>\d+) steps?)?")


def check_renamed(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError if the config `tree`, as the user wrote it, has a field or value under an old name."""
    for name, value in tree_places(tree):
        pattern = re.sub(r"\[\d+\]", "[]", name)
        new = RENAMED.get(pattern)
        new_value = RENAMED_VALUES.get(new or pattern, {}).get(value) if isinstance(value, str) else None
        if new is not None:
            # the entries' numbers in the old name belong into the new one
            new_name = name.rpartition(".")[0] + "." + new.rpartition(".")[2] if "[]" in new else new
            now = f"; its value '{value}' is now '{new_value}'" if new_value else ""
            raise ConfigError(f"{name} was renamed: write {new_name} instead{now}")
        if new_value:
            raise ConfigError(f"{name} is '{value}', which was renamed: write '{new_value}' instead")
        if pattern == "run.guards[]" and isinstance(value, str):
            raise ConfigError(f"{name} is '{value}'; it must be a section such as {_as_section(value)}")


def new_names(old: str) -> list[str]:
    """The fields that were once called `old`, in any section."""
    return [new for name, new in RENAMED.items() if name.rpartition(".")[2] == old and "[]" not in new]


def _as_section(text: str) -> str:
    """A guard that was written as a sentence, as the section that it is now."""
    old = _GUARD.fullmatch(" ".join(text.split()))
    if old is None:
        return "{metric: kl/reference, above: 0.5, action: stop, for_steps: 3}"
    steps = f", for_steps: {old['steps']}" if old["steps"] else ""
    return f"{{metric: {old['metric']}, {old['side']}: {old['bound']}, action: {old['action']}{steps}}}"
