"""Answers of teachers to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.questions import ConfiguredRole
from megarl.config.schema import Config
from megarl.options.distillation.section import distillation_of, teacher_of


def needs_teacher(config: Config) -> bool:
    """Return whether the policy is distilled, or estimator or loss read a teacher's log-probs."""
    algorithm = config.algorithm
    is_read = algorithm.loss_needs.teacher_log_probs or algorithm.estimator_needs.teacher_log_probs
    return distillation_of(algorithm).coef > 0 or is_read


def further_roles(config: Config) -> tuple[ConfiguredRole, ...]:
    """The teachers, the one of rows that name none first."""
    teacher = teacher_of(config)
    if not needs_teacher(config):
        return ()
    named = (
        ConfiguredRole(entry.role, entry.path, f"{section}.path", entry.layout, None, section=section, megatron=entry.megatron)
        for section, entry in ((f"teacher.named[{index}]", entry) for index, entry in enumerate(teacher.named))
    )
    if teacher.path is None:
        return (*named,)
    return ConfiguredRole("teacher", teacher.path, "teacher.path", teacher.layout, None, megatron=teacher.megatron), *named


def further_folders(config: Config) -> dict[str, str]:
    """Every teacher's folder, by the config field that names it."""
    return teacher_of(config).folders


def reads_old_log_probs_early(config: Config) -> bool:
    """Return whether something besides the policy loss reads what a pass at the start of the step gives."""
    distillation = distillation_of(config.algorithm)
    return distillation.in_advantage or distillation.asks_policy


def needs_no_reward(config: Config) -> bool:
    """Return whether rewards are only logged."""
    return not distillation_of(config.algorithm).reward_coef


def adds_to_advantages(config: Config) -> bool:
    """Return whether advantages have a term that reads the policy's log-probs."""
    return distillation_of(config.algorithm).in_advantage
