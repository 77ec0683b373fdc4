"""Checks across fields: one sentence per contradiction. Pure, and run whenever a config is read.

What needs the model's own sizes is in `models/check_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.algorithm_checks import check_algorithm
from megarl.config.batch import batch_arithmetic
from megarl.config.evaluations import check_evaluations, check_rewards
from megarl.config.fp8 import check_fp8
from megarl.config.guard_rules import parse_guards
from megarl.config.layout import closest, divisors
from megarl.config.megatron_options import check_megatron_sections
from megarl.config.profile import check_profile
from megarl.config.rollout_checks import check_rollout
from megarl.config.schema import Config
from megarl.config.sections import ModelConfig, ReferenceConfig, RunConfig, TrainedRole
from megarl.config.source_checks import check_held_out, check_source
from megarl.config.supervised import OBJECTIVE_FIELDS, PAIR_LOSSES, TOKEN_LOSSES, ObjectiveConfig, SupervisedConfig
from megarl.errors import ConfigError
from megarl.option_list import functions
from megarl.system.path_names import why_no_folder


def check_fields_agree(config: Config, *, is_judged: bool = True) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other, or, if it `is_judged`, without a reward."""
    check_algorithm(config)
    check_megatron_sections(config)
    check_rollout(config)
    check_source("data.train", config.data.train)
    if config.data.eval is not None:
        check_source("data.eval", config.data.eval)
        check_held_out(config.data.train, "data.eval", config.data.eval)
    for index, evaluation in enumerate(config.evaluations):
        check_source(f"evaluations[{index}].rows", evaluation.rows)
        check_held_out(config.data.train, f"evaluations[{index}].rows", evaluation.rows)
    single_turn = config.rollout.episode.kind == "single"
    check_evaluations(config.evaluations, has_rewards=bool(config.rewards), single_turn=single_turn)
    check_rewards("rewards", config.rewards, of_steps=True)
    check_run(config.run, evaluates=config.evaluates, evaluations="data.eval or evaluations")
    for check in functions("checks", "check"):
        check(config)
    check_profile(config.profile, config.run.known_steps, [*config.layouts.values()])
    needs_none = not is_judged or any(needs_none(config) for needs_none in functions("questions", "needs_no_reward"))
    if not config.reward_weights and not needs_none:
        raise ConfigError("a run needs a source of reward: set rewards, or set reward_model.path")
    trained = {"policy": config.policy, "critic": config.critic}
    for name, role in trained.items():
        if role.optimizer.min_lr > role.optimizer.lr:
            allowed = f"at most {name}.optimizer.lr = {role.optimizer.lr}"
            raise config.refusal(f"{name}.optimizer.min_lr", allowed=allowed)
    check_offload(config.model, trained, valued=("critic",))
    sections = ((role.section or role.name).partition(".")[0] for role in config.roles if role.trained is None)
    frozen = [f"the {name.replace('_', ' ')}" for name in dict.fromkeys(sections)]
    check_fp8(config.model, trained=trained, frozen=frozen)
    _check_reset(config.reference, config.model, needed_by=None if config.uses_reference else "algorithm.kl.coef above 0")
    batch_arithmetic(config)


def check_supervised(config: SupervisedConfig) -> None:
    """`check_fields_agree` for a run that trains on given responses."""
    check_megatron_sections(config)
    _check_objective(config)
    check_source("data.train", config.data.train)
    if config.data.eval is not None:
        check_source("data.eval", config.data.eval)
    longest = config.data.max_tokens * (2 if config.objective.name in PAIR_LOSSES else 1)
    if config.policy.max_tokens_per_micro_batch < longest:
        reason = f"is less than the {longest} tokens that one row can have (data.max_tokens, twice for a pair)"
        raise config.refusal("policy.max_tokens_per_micro_batch", reason, allowed=f"at least {longest}")
    rows, dp = config.data.rows_per_step, config.policy.layout.dp
    if rows % dp:
        rule = "does not divide data.rows_per_step"
        raise config.refusal("policy.layout.dp", f"{rule} = {rows}", allowed=closest(divisors(rows), dp), rule=rule)
    check_run(config.run, evaluates=config.data.eval is not None, evaluations="data.eval")
    for check in functions("checks", "check_supervised"):
        check(config)
    check_profile(config.profile, config.run.known_steps, [config.policy.layout])
    check_offload(config.model, {"policy": config.policy}, valued=("policy",) if config.has_value_head else ())
    check_fp8(config.model, trained={"policy": config.policy}, frozen=["the reference"] if config.uses_reference else [])
    loader = "objective.name to a loss with a reference"
    _check_reset(config.reference, config.model, needed_by=None if config.uses_reference else loader)


def _check_reset(reference: ReferenceConfig, model: ModelConfig, *, needed_by: str | None) -> None:
    """Refuse to move a reference that is not there or that the policy's ranks do not hold.

    `needed_by`: what would load a reference, where there is none.
    """
    if reference.reset_every and needed_by is not None:
        raise ConfigError.needs_set("reference.reset_every", "a reference model", needed_by)
    if reference.reset_every and reference.layout is not None:
        remedy = "remove reference.layout, or remove reference.reset_every"
        raise ConfigError.needs("reference.reset_every", "the reference in the policy's processes", remedy)
    if reference.reset_share != 1 and not reference.reset_every:
        what = "steps after which the reference moves"
        raise ConfigError.needs_set("reference.reset_share", what, "reference.reset_every")
    if reference.reset_share != 1 and model.fp8_param:
        reason = "would be lost in weights of FP8 (model.fp8_param)"
        raise ConfigError.of("reference.reset_share", reference.reset_share, reason, allowed="1.0, or remove model.fp8_param")


def _check_objective(config: SupervisedConfig) -> None:
    objective, data = config.objective, config.data
    for field, losses in OBJECTIVE_FIELDS.items():
        value, unset = getattr(objective, field), type(objective).model_fields[field].default
        if not {*objective.losses} & {*losses} and value != unset:
            shown = str(unset).lower() if isinstance(unset, bool) else str(unset)
            reason = f"objective.name = '{objective.name}' does not read"
            raise config.refusal(f"objective.{field}", reason, allowed=shown)
    _check_mixture(objective)
    if {*objective.losses} & {*OBJECTIVE_FIELDS["label_smoothing"]} and not objective.label_smoothing:
        remedy = "set it above 0, or set objective.name to 'dpo', which is the same without it"
        raise ConfigError.needs(f"objective.name = '{objective.name}'", "objective.label_smoothing", remedy)
    if data.margin_key is not None and objective.name != "reward_model":
        raise ConfigError.needs_set("data.margin_key", "the loss of a reward model", "objective.name to 'reward_model'")
    if data.turns != "together" and objective.name not in TOKEN_LOSSES:
        reason = f"objective.name = '{objective.name}' does not read"
        raise config.refusal("data.turns", reason, allowed="'together': its rows have one answer each, or part in a turn")
    if objective.name == "kto" and data.rows_per_step < 2:
        reason = "leaves objective.name = 'kto' no other row to pair a prompt with"
        raise config.refusal("data.rows_per_step", reason, allowed="at least 2")


def _check_mixture(objective: ObjectiveConfig) -> None:
    if objective.name != "mixture" and objective.mixture:
        reason = f"objective.name = '{objective.name}' does not read"
        raise ConfigError.of("objective.mixture", objective.mixture, reason, allowed="{}, or set objective.name to 'mixture'")
    if objective.name == "mixture" and not {*objective.mixture} - {"sft"}:
        remedy = "set objective.mixture, such as to {dpo: 0.8, bco_pair: 0.2, sft: 1.0}"
        raise ConfigError.needs("objective.name = 'mixture'", "a pair loss in objective.mixture", remedy)
    if objective.name == "mixture" and objective.rpo_alpha:
        reason = "would count once for every pair loss of objective.mixture"
        raise ConfigError.of("objective.rpo_alpha", objective.rpo_alpha, reason, allowed="0.0: set the weight of sft instead")


def check_run(run: RunConfig, *, evaluates: bool, evaluations: str) -> None:
    """Check what `run` alone says, and what of it needs evaluations; `evaluations`: the fields that set them."""
    if why := why_no_folder(run.name):
        raise ConfigError.of("run.name", run.name, f"{why} run.folder", allowed="a name such as 'run-1'")
    rules = parse_guards(run.guards)
    if not run.save_every and (back := [rule for rule in rules if rule.action == "rollback"]):
        remedy = "set run.save_every, or choose another action in run.guards"
        raise ConfigError.needs(f"the guard '{back[0]}'", "checkpoints", remedy)
    for field in ("eval_every", "keep_best"):
        if getattr(run, field) not in (0, None) and not evaluates:
            raise ConfigError.needs_set(f"run.{field}", "an evaluation set", evaluations)


def check_evaluates(config: Config) -> None:
    """Refuse a config without anything to evaluate on, which only a command that evaluates needs."""
    if not config.evaluates:
        raise ConfigError("data.eval is null and evaluations is empty, but eval needs rows to measure on")


def check_offload(model: ModelConfig, trained: dict[str, TrainedRole], valued: Sequence[str]) -> None:
    """Refuse to offload a part of what megatron-core can only offload whole; `valued` roles have a value head."""
    for name, role in trained.items():
        fraction = role.optimizer.offload_fraction
        if fraction and role.optimizer.name == "muon":
            reason = "is for AdamW alone: Muon needs momenta where it computes"
            raise ConfigError.of(f"{name}.optimizer.offload_fraction", fraction, reason, allowed="0 with optimizer.name 'muon'")
        if 0 < fraction < 1 and (model.dtype == "float32" or name in valued):
            what = "a model of model.dtype = 'float32'" if model.dtype == "float32" else "a model with a float32 value head"
            reason = f"{what} cannot have: megatron-core offloads float32 weights only as a whole"
            raise ConfigError.of(f"{name}.optimizer.offload_fraction", fraction, reason, allowed="0 or 1")
