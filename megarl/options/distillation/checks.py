"""Checks of `algorithm.distillation` and `teacher`: one sentence per contradiction."""

from __future__ import annotations

from collections import Counter

from megarl.config.megatron_options import check_megatron
from megarl.config.presets import PRESETS
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.distillation.questions import needs_teacher
from megarl.options.distillation.section import DistillationConfig, distillation_of, teacher_of

_FIELD = "algorithm.distillation"
_READ_BY = {"advantage": ("gamma",), "loss": ("divergence", "beta", "top_k", "top_k_of")}


def check(config: Config) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other."""
    teacher = teacher_of(config)
    check_megatron("teacher.megatron", teacher.megatron or {}, is_trained=False)
    for index, named_teacher in enumerate(teacher.named):
        check_megatron(f"teacher.named[{index}].megatron", named_teacher.megatron or {}, is_trained=False)
    _check_teachers(config)
    distillation, default = distillation_of(config.algorithm), DistillationConfig()
    read = ("reward_coef", *_READ_BY[distillation.apply_to]) if distillation.coef else ()
    unread = f"{_FIELD}.apply_to = '{distillation.apply_to}'" if distillation.coef else f"{_FIELD}.coef = 0"
    for field in ("reward_coef", *(name for names in _READ_BY.values() for name in names)):
        value, unset = getattr(distillation, field), getattr(default, field)
        if field not in read and value != unset:
            raise ConfigError.of(f"{_FIELD}.{field}", value, f"{unread} does not read", allowed=str(unset))
    if "beta" in read and distillation.divergence != "jsd" and distillation.beta != default.beta:
        reason = f"{_FIELD}.divergence = '{distillation.divergence}' does not read"
        raise ConfigError.of(f"{_FIELD}.beta", distillation.beta, reason, allowed=str(default.beta))
    if not distillation.reward_coef:
        _check_without_rewards(config)
    for name, value in config.rollout.sampling_limits.items() if distillation.in_loss else ():
        why = "leaves out tokens, and algorithm.distillation.apply_to = 'loss' compares the likeliest of all"
        raise ConfigError.of(f"rollout.{name}", value, why, allowed=str(type(config.rollout).model_fields[name].default))
    if distillation.asks_policy and config.algorithm.bypasses_old_log_probs:
        reason = "needs the policy's pass at the start of the step, which algorithm.rollout_correction leaves out by 'bypass'"
        raise ConfigError.of(f"{_FIELD}.top_k_of", "policy", reason, allowed="'teacher', or another correction")


def _check_teachers(config: Config) -> None:
    algorithm, teacher = config.algorithm, teacher_of(config)
    if needs_teacher(config) and not teacher.folders:
        remedy = "set teacher.path or teacher.named"
        if distillation_of(algorithm).coef:
            raise ConfigError.needs(f"{_FIELD}.coef", "a teacher", f"{remedy}, or set {_FIELD}.coef to 0")
        reader = algorithm.advantage if algorithm.estimator_needs.teacher_log_probs else algorithm.policy_loss
        raise ConfigError.needs(f"'{reader}'", "the log-probs of a teacher", remedy)
    if teacher.folders and not needs_teacher(config):
        field = next(iter(teacher.folders))
        what = "an estimator or a loss that reads the teacher's log-probs, or distillation"
        raise ConfigError.needs(field, what, f"set {_FIELD}.coef, or algorithm.advantage or policy_loss, or remove {field}")
    if not teacher.named and teacher.data_key != type(teacher)().data_key:
        raise ConfigError.needs("teacher.data_key", "teachers that rows name", "set teacher.named, or remove teacher.data_key")
    name, times = next(iter(Counter(named_teacher.name for named_teacher in teacher.named).most_common(1)), ("", 0))
    if times > 1:
        raise ConfigError.of("teacher.named", name, f"{times} teachers are called", allowed="different for each teacher")


def _check_without_rewards(config: Config) -> None:
    """Refuse what reads rewards where they are only logged."""
    algorithm, rollout, unset = config.algorithm, config.rollout, PRESETS["opd"]["advantage"]
    more = f"or set {_FIELD}.reward_coef above 0"
    reason = f"{_FIELD}.reward_coef = 0 does not read"
    for field, value, allowed in (
        ("algorithm.advantage", algorithm.advantage, unset),
        ("algorithm.advantage_normalisation", algorithm.advantage_normalisation, "none"),
        ("algorithm.gamma", algorithm.gamma, 1.0),
        ("rollout.dynamic_sampling_rounds", rollout.dynamic_sampling_rounds, 0),
    ):
        if value != allowed:
            raise ConfigError.of(field, value, reason, allowed=f"{allowed!r}, {more}")
    if config.data.eval is not None and not config.reward_weights:
        raise ConfigError.needs("data.eval", "a source of reward to measure by", "set rewards, or remove data.eval")
    if algorithm.kl.coef and algorithm.kl.apply_to == "reward":
        raise ConfigError.of("algorithm.kl.apply_to", "reward", reason, allowed=f"'loss', {more}")
