"""Contradictions of `rollout.speculative` with its engine and among its fields."""

from __future__ import annotations

from megarl.config import Config
from megarl.config.engine_kinds import EngineCapabilities
from megarl.errors import ConfigError
from megarl.options.prediction.section import SpeculativeConfig, drafts_of

OWN_MODEL = ("standalone", "eagle", "eagle3")
"""Algorithms whose draft is a model of its own."""


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Refuse drafts that the run's engine cannot make or verify, and settings of drafts that are off.

    Raises:
        ConfigError: names the field.
    """
    rollout, drafts, section = config.rollout, drafts_of(config.rollout), "rollout.speculative"
    if drafts.algorithm == "none":
        changed = [name for name, field in type(drafts).model_fields.items() if getattr(drafts, name) != field.default]
        if changed:
            raise ConfigError.needs_set(f"{section}.{changed[0]}", "speculative decoding", f"{section}.algorithm")
        return
    if rollout.schedule.continues and not engine.in_process:
        reason = f"cannot tell which tokens of a draft an engine had looked at when it was cut ({section}.algorithm)"
        by, allowed = rollout.schedule.continues_by
        raise config.refusal(f"rollout.schedule.{by}", reason, allowed=allowed)
    if drafts.algorithm not in engine.drafts:
        able = ", ".join(f"'{name}'" for name in ("none", *engine.drafts))
        reason = f"rollout.engine = '{rollout.engine}' cannot do"
        reason += ": whoever starts its servers chooses" if rollout.servers.urls else ""
        raise ConfigError.of(f"{section}.algorithm", drafts.algorithm, reason, allowed=able)
    if (drafts.algorithm in OWN_MODEL) != (drafts.draft_model is not None):
        if drafts.draft_model is None:
            what, remedy = "a draft", f"set {section}.draft_model to its folder"
            raise ConfigError.needs(f"{section}.algorithm = '{drafts.algorithm}'", what, remedy)
        reason = f"{section}.algorithm = '{drafts.algorithm}' does not read"
        raise ConfigError.of(f"{section}.draft_model", drafts.draft_model, reason, allowed="null")
    if drafts.topk > 1 and not engine.draft_trees:
        reason = f"makes drafts trees, which rollout.engine = '{rollout.engine}' cannot verify"
        raise ConfigError.of(f"{section}.topk", drafts.topk, reason, allowed="1")
    _check_draft_tree(drafts)


def _check_draft_tree(drafts: SpeculativeConfig) -> None:
    field, tokens, topk = "rollout.speculative.num_draft_tokens", drafts.num_draft_tokens, drafts.topk
    if topk == 1:
        if tokens not in (None, drafts.num_steps + 1):
            reason = "is not num_steps + 1, which are the tokens of a draft with topk = 1"
            raise ConfigError.of(field, tokens, reason, allowed=f"null or {drafts.num_steps + 1}")
        return
    if tokens is None:
        raise ConfigError.needs(f"rollout.speculative.topk = {topk}", "the size of the tree of drafts", f"set {field}")
    most = 1 + topk + (drafts.num_steps - 1) * topk**2
    if drafts.algorithm != "ngram" and tokens > most:
        reason = f"is more than {drafts.num_steps} steps of {topk} candidates make"
        raise ConfigError.of(field, tokens, reason, allowed=f"at most {most}")
