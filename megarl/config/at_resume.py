"""The answer of every config field to a change at resume: applied, refused or kept. A literal table; a test walks through it.

docs/checkpoints.md is written from it. Options answer for their own fields, in their `at_resume.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.yaml_tree import tree_leaves
from megarl.option_list import parts

AnswerKind = Literal["applied", "refused", "kept", "rows", "grows", "steered", "like"]
KINDS: dict[AnswerKind, str] = {
    "applied": "applies from the next step",
    "refused": "refused",
    "kept": "kept from the checkpoint",
    "rows": "as `data.on_change` says, if other rows come of it",
    "grows": "applies where entries are added; refused where one is taken away",
    "steered": "applies; kept from the checkpoint while a target steers it",
    "like": "as",
}
"""Every kind of answer, as the page says it."""


@dataclass(frozen=True)
class FieldAnswer:
    """A field's answer; `note` is the reason, the field that steers it, or the field whose answer it has."""

    kind: AnswerKind
    note: str = ""


APPLIED, ROWS = FieldAnswer("applied"), FieldAnswer("rows")


def applied(note: str) -> FieldAnswer:
    """The new value holds from the next step, with a remark."""
    return FieldAnswer("applied", note)


def refused(why: str) -> FieldAnswer:
    """The run cannot go on with another value."""
    return FieldAnswer("refused", why)


def kept(why: str) -> FieldAnswer:
    """The new value changes nothing, as the checkpoint has what follows from the old one."""
    return FieldAnswer("kept", why)


def like(field: str) -> FieldAnswer:
    """A section, or a field, with the answers of another."""
    return FieldAnswer("like", field)


def answers(*lines: tuple[str, FieldAnswer, str]) -> dict[str, FieldAnswer]:
    """By dotted name the answer of each field; a line has a section (empty: none), an answer, and names apart by spaces."""
    return {f"{section}.{name}".lstrip("."): answer for section, answer, names in lines for name in names.split()}


PROMPTS = applied("prompts that the checkpoint has under way stay as they are")
NEEDS_ROLE = applied("refused where it trains a critic that the checkpoint does not have")
OF_CORE = answers(
    ("run", APPLIED, "name folder steps epochs resume save_every save_minutes keep_checkpoints keep_best max_restarts"),
    ("run", APPLIED, "eval_every eval_before deterministic log_samples export"),
    ("run", refused("the order of rows and random numbers follow from it"), "seed"),
    ("run.guards[]", APPLIED, "metric above below action for_steps"),
    ("model", kept("the weights are the checkpoint's; tokenizer and reference are read from the folder"), "path"),
    ("model", APPLIED, "architecture dtype layer_spec recompute fp8 fp8_recipe fp8_param fp8_bf16_layers int4_experts"),
    ("policy.layout", APPLIED, "tp pp cp ep etp dp vpp sequence_parallel first_stage_layers last_stage_layers"),
    ("policy.optimizer", refused("the checkpoint has the other optimizer's moments"), "name"),
    (
        "policy.optimizer",
        applied("the schedule is that of the new config, at the same step"),
        "lr min_lr warmup_steps schedule",
    ),
    ("policy.optimizer", APPLIED, "betas eps weight_decay clip_grad offload_fraction momentum newton_schulz_steps"),
    ("policy.optimizer.groups[]", APPLIED, "match lr_factor weight_decay"),
    ("policy.experts", APPLIED, "balance_coef sequence_balance_coef z_loss_coef bias_update_rate"),
    ("policy", APPLIED, "threads_per_rank max_tokens_per_micro_batch static_shapes logit_chunk_tokens share_prefix"),
    ("policy", FieldAnswer("grows", "the checkpoint has no moments of what was frozen"), "freeze"),
    ("policy", applied("a field that changes tensors is refused by the ranks"), "megatron"),
    ("critic", like("policy.layout"), "layout"),
    ("critic", like("policy.optimizer"), "optimizer"),
    ("critic", like("policy.experts"), "experts"),
    ("critic", APPLIED, "threads_per_rank max_tokens_per_micro_batch static_shapes logit_chunk_tokens value_clip"),
    ("critic", like("policy.freeze"), "freeze"),
    ("critic", like("policy.megatron"), "megatron"),
    ("critic", applied("counted from the first step of the run"), "warmup_steps"),
    ("critic", kept("the weights are the checkpoint's"), "init_from"),
    ("reference", applied("of a reference that is reset, the weights are the checkpoint's"), "path"),
    ("reference", like("policy.layout"), "layout"),
    ("reference", APPLIED, "megatron reset_share"),
    ("reference", applied("refused where it is set first, as the checkpoint has no reference"), "reset_every"),
    ("algorithm", NEEDS_ROLE, "name advantage"),
    ("algorithm", APPLIED, "advantage_args policy_loss policy_loss_args aggregation norm_length clip_low clip_high dual_clip"),
    ("algorithm", APPLIED, "gamma gae_lambda advantage_normalisation advantage_eps unbiased_std truncated_responses"),
    ("algorithm", applied("schedules go on at the same step"), "epochs mini_batches"),
    ("algorithm.old_policy_kl", FieldAnswer("steered", "algorithm.old_policy_kl.target"), "coef"),
    ("algorithm.old_policy_kl", APPLIED, "target"),
    ("algorithm.kl", FieldAnswer("steered", "algorithm.kl.target"), "coef"),
    ("algorithm.kl", APPLIED, "estimator apply_to unbiased target horizon"),
    ("algorithm.entropy", FieldAnswer("steered", "algorithm.entropy.target"), "coef"),
    ("algorithm.entropy", APPLIED, "target delta max_coef top_share"),
    ("algorithm.positive_nll", APPLIED, "coef threshold"),
    ("algorithm.shaping", APPLIED, "overlong_tokens length_penalty normalise clip"),
    ("algorithm.rollout_correction[]", APPLIED, "mode low high normalise"),
    ("objective", applied("refused between losses of a scoring and of a predicting model"), "name"),
    ("objective", APPLIED, "beta label_smoothing target_margin length_normalised rpo_alpha mixture aggregation"),
    ("objective", APPLIED, "desirable_weight undesirable_weight"),
    ("data.train", ROWS, "source name path split args limit seed columns keep"),
    ("data.train", like("data.train"), "parts"),
    ("data.train", APPLIED, "weight weight_by_step"),
    ("data", APPLIED, "on_change answer_key source_key rows_per_step"),
    ("data", applied("the evaluation from before the run is not made again"), "eval"),
    ("data", PROMPTS, "prompt_key system_prompt chat_template image_key video_key image_folder min_pixels max_pixels fps"),
    ("data", PROMPTS, "audio_key max_frames video media_folder prompt system_key template_args ignore_fields"),
    ("data", APPLIED, "turns response_key messages_key tools_key chosen_key rejected_key label_key steps_key margin_key"),
    ("data", ROWS, "max_prompt_tokens overlong_prompts bad_pictures equal_pairs max_tokens overlong"),
    (
        "evaluations[]",
        APPLIED,
        "name rows samples_per_prompt temperature top_p top_k min_p max_new_tokens prompt_key answer_key",
    ),
    ("evaluations[]", APPLIED, "prompt source_key stop stop_token_ids"),
    ("evaluations[].rewards", APPLIED, "name weight args on_error max_error_share strict_steps ahead"),
    ("rollout", applied("steps of weights and stages are counted on"), "prompts_per_step"),
    ("rollout", applied("refused while the checkpoint has finished groups of the old number"), "samples_per_prompt"),
    ("rollout", APPLIED, "engine dynamic_sampling_rounds max_new_tokens temperature top_p top_k min_p greedy"),
    ("rollout", APPLIED, "stop stop_token_ids"),
    ("rollout", APPLIED, "ignore_eos engines tp weight_transport delta_every verify_every replay_from threads engine_args"),
    ("rollout.servers", APPLIED, "urls port model_path"),
    ("rollout.schedule", APPLIED, "mode max_staleness over_sample partial_responses mask_older_tokens"),
    ("rollout.episode", APPLIED, "kind tools max_turns tool_timeout_s tool_max_tokens turn_cache_bytes"),
    ("rollout.deadlines", APPLIED, "generate_s update_s reward_s"),
    ("", APPLIED, "rewards"),
    ("resources", APPLIED, "placement ray_address gpu"),
    ("resources.deadlines", APPLIED, "start_s step_s save_s"),
    ("profile", APPLIED, "steps ranks"),
)


def at_resume() -> dict[str, FieldAnswer]:
    """By dotted name, as `config_fields` gives them, the answer of each field, those of options among them."""
    table = dict(OF_CORE)
    for option in parts("at_resume"):
        table |= option.AT_RESUME
    return table


def answer_for(name: str, table: Mapping[str, FieldAnswer]) -> FieldAnswer:
    """The answer of the field, or the entry of a mapping or list, that a resolved config has under `name`.

    Of a section that came or went as a whole it is the strictest of its fields'.
    """
    plain = re.sub(r"\[\d+\]", "[]", name)
    within = [answer for field, answer in table.items() if re.match(rf"{re.escape(plain)}(\[\])?\.", field)]
    if plain not in table and within:
        order: tuple[AnswerKind, ...] = ("refused", "grows", "rows", "kept")
        return min(within, key=lambda answer: order.index(answer.kind) if answer.kind in order else len(order))
    known, rest = plain, ""
    while known not in table:
        if not known:
            raise KeyError(name)
        known, _, last = known.rpartition(".") if "." in known else ("", "", known)
        rest = f".{last}{rest}"
        known = known if known in table else known.removesuffix("[]") if known.removesuffix("[]") in table else known
    answer = table[known]
    return answer if answer.kind != "like" else answer_for(answer.note + rest, table)


@dataclass(frozen=True)
class Change:
    """A field that a resumed run has otherwise than its checkpoint; `answer` is one of the three of `settled`."""

    name: str
    before: Any
    after: Any
    answer: FieldAnswer

    def __str__(self) -> str:
        return f"{self.name} was {self.before!r}, now {self.after!r}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every field that differs between two resolved configs as plain trees, in order of names, with its answer."""
    table = at_resume()
    named = {name: pair for name, pair in _differing(before, after) if name not in ("run.resume", "run.name", "run.folder")}
    return [
        Change(name, old, new, _settled(answer_for(name, table), old, new, before, after))
        for name, (old, new) in sorted(named.items())
    ]


def _settled(answer: FieldAnswer, old: Any, new: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> FieldAnswer:
    """`answer` as applied, refused, kept or left to the rows, with these values."""
    if answer.kind == "grows":
        grows = {*map(str, old or ())} <= {*map(str, new or ())}
        return APPLIED if grows else refused(answer.note)
    if answer.kind == "steered":
        targets = [dict(tree_leaves(tree)).get(answer.note) for tree in (before, after)]
        return kept(f"{answer.note} steers it") if None not in targets else APPLIED
    return answer


_ABSENT = object()


def _differing(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(dotted name, (old value, new value)) of what differs; a section that is on one side only differs as a whole."""
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before and after:
        for key in {**before, **after}:
            old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
            yield from _differing(old, new, f"{name}.{key}" if name else str(key))
    elif _are_sections(before) and _are_sections(after) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differing(old, new, f"{name}[{number}]")
    elif before != after:
        yield name, (None if before is _ABSENT else before, None if after is _ABSENT else after)


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)
