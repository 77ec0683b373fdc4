"""A config that goes on from a checkpoint: what cannot is refused before anything starts, and the rest is said.

The answers of single fields are the table in `config/at_resume.py`; which roles a checkpoint has, and whether the model has the
same sizes, is looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.config import AnyConfig, Config, SupervisedConfig, to_yaml
from megarl.config.at_resume import Change, changes
from megarl.config.secrets import references
from megarl.config.yaml_tree import load_text
from megarl.errors import ConfigError
from megarl.observe.record_lines import object_line
from megarl.runs.folders import checkpoint_in
from megarl.runs.manifest import made_by
from megarl.runs.provenance import CONFIG, code_differences, provenance
from megarl.runs.run_checkpoint import CheckpointFolder, read_state
from megarl.runs.training_side import REFERENCE

_SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a model's config.json by which its tensors differ."""
_NEW_RUN = "set it back, or begin a new run under another run.name, from its exported model if you like (megarl convert export)"


def resumes_from(config: AnyConfig) -> Path | None:
    """The checkpoint that `run.resume` names, without a look at its files' checksums; None: there is none here."""
    resume = config.run.resume
    if resume == "never":
        return None
    if resume == "auto":
        return next(reversed(CheckpointFolder(Path(config.run_folder) / "checkpoints").all()), None)
    return checkpoint_in(resume) or Path(resume)


def refuse_changes(config: AnyConfig) -> Path | None:
    """`resumes_from`, once the config can go on from there; for a run of which not even Ray has been started.

    Raises:
        ConfigError: it cannot; a sentence for each field.
    """
    checkpoint = resumes_from(config)
    if checkpoint is not None and (checkpoint / CONFIG).is_file() and (checkpoint / "state.json").is_file():
        _checked(checkpoint, config)
    return checkpoint


def differences_at_resume(checkpoint: Path | None, config: AnyConfig, step: int) -> list[str]:
    """Sentences on code, libraries and config that are not those that wrote the checkpoint: what is applied, and what kept.

    Raises:
        ConfigError: the config cannot go on from the checkpoint; a sentence for each field.
    """
    if checkpoint is None or not (checkpoint / CONFIG).is_file():
        return []
    lines = code_differences(made_by(checkpoint), provenance(to_yaml(config), step, None))
    wanted = [f"{place} from {name}" for name, place in references(load_text(to_yaml(config))).items()]
    if wanted:
        lines.append(
            f"saved configs keep no secrets: a run that reads this one's takes from its environment {', '.join(wanted)}"
        )
    changed = _checked(checkpoint, config)
    if isinstance(changed, str):
        return [*lines, f"the config has changed since the checkpoint, whose own cannot be read: {changed}"]
    groups = {
        "the config has changed since the checkpoint, and applies from the next step": ("applied",),
        "the config has changed since the checkpoint, and the rows decide (data.on_change)": ("rows",),
        "the config has changed since the checkpoint, which is kept": ("kept",),
    }
    for words, kinds in groups.items():
        told = [f"{change}{_reason(change)}" for change in changed if change.answer.kind in kinds]
        if told:
            lines.append(f"{words}: {'; '.join(told)}")
    return lines


def _reason(change: Change) -> str:
    return f" ({change.answer.note})" if change.answer.note and change.answer.kind == "kept" else ""


def _checked(checkpoint: Path, config: AnyConfig) -> list[Change] | str:
    """The fields that have changed, none of them refused; or why the checkpoint's own config cannot be read."""
    try:
        before = load_text((checkpoint / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    if not isinstance(before, dict):
        return "it is no mapping"
    _refuse_other_kind(checkpoint, before, config)
    changed = changes(_as_today(before, type(config)), load_text(to_yaml(config)))
    refusals = [*_refusals(changed, config), *_of_roles(checkpoint, changed, config), *_of_models(changed)]
    refusals += _of_groups(checkpoint, changed)
    if refusals:
        raise ConfigError(f"run.resume cannot continue {checkpoint} with this config: {'; '.join(refusals)}; {_NEW_RUN}")
    return changed


def _as_today(tree: dict[str, Any], root: type[Config] | type[SupervisedConfig]) -> dict[str, Any]:
    """A resolved config of an earlier version with the defaults of fields that it did not have, if it can be read as one."""
    try:
        today: dict[str, Any] = load_text(to_yaml(root.model_validate(tree)))
    except (ValidationError, ConfigError):
        return tree
    return today


def _refuse_other_kind(checkpoint: Path, before: Mapping[str, Any], config: AnyConfig) -> None:
    trainer = "supervised" if before.get("objective") else "rl"
    if trainer != config.trainer:
        kinds = {"supervised": "training on given responses", "rl": "reinforcement learning"}
        raise ConfigError(
            f"run.resume cannot continue {checkpoint}, which is of {kinds[trainer]}, with a config of {kinds[config.trainer]}; "
            "begin a new run, with model.path the model that `megarl convert export` makes of the checkpoint"
        )


def _refusals(changed: Sequence[Change], config: AnyConfig) -> Iterator[str]:
    """Fields that cannot change, of roles that take part."""
    for change in changed:
        is_unused = change.name.startswith("critic.") and "critic" not in config.trained_roles
        if change.answer.kind == "refused" and not is_unused:
            yield f"{change}, but {change.answer.note}"


def _of_roles(checkpoint: Path, changed: Sequence[Change], config: AnyConfig) -> Iterator[str]:
    """Roles that change in this run, of which the checkpoint has nothing, and a head that it does not have."""
    moving = (REFERENCE,) if config.reference.reset_every else ()
    told = {change.name: f" ({change})" for change in changed}
    for role in (*config.trained_roles, *moving):
        if not (checkpoint / role).is_dir():
            fields = ("reference.reset_every",) if role in moving else ("algorithm.name", "algorithm.advantage")
            cause = next((told[name] for name in fields if name in told), "")
            yield f"this run {'moves' if role in moving else 'trains'} a {role}, of which the checkpoint has nothing{cause}"
    scores = ("reward_model", "process_reward_model")
    for change in changed:
        if change.name == "objective.name" and (change.before in scores) != (change.after in scores):
            yield f"{change}, but one of them has a head that scores, and the other predicts tokens"


def _of_models(changed: Sequence[Change]) -> Iterator[str]:
    """Other folders of the policy's model, as far as their sizes can be read."""
    for change in changed:
        if change.name != "model.path":
            continue
        old, new = (_sizes(str(folder)) for folder in (change.before, change.after))
        other = [name for name in _SIZES if old and new and old.get(name) != new.get(name)]
        if other:
            told = ", ".join(f"{name} {old.get(name)} and {new.get(name)}" for name in other[:3])
            yield f"{change}, but they are models of other sizes ({told})"


def _sizes(folder: str) -> dict[str, Any]:
    try:
        content = object_line((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    text = content.get("text_config")
    return {**content, **(text if isinstance(text, dict) else {})}


def _of_groups(checkpoint: Path, changed: Sequence[Change]) -> Iterator[str]:
    """Groups that are finished and not trained on have as many responses as they were asked for."""
    for change in changed:
        if change.name == "rollout.samples_per_prompt":
            finished = len((read_state(checkpoint).get("groups") or {}).get("samples", []))
            if finished:
                yield f"{change}, but the checkpoint has {finished} finished groups of {change.before} responses"
