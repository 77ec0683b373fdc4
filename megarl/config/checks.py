"""Checks across fields, and of the model folders' own sizes against the layouts: one sentence per contradiction.

`check_fields_agree` is pure and runs whenever a Config is made; `check_models` reads `config.json` files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from megarl.config.batch import batch_arithmetic
from megarl.config.fp8 import check_fp8, check_fp8_sizes
from megarl.config.guard_rules import parse_guards
from megarl.config.layout import Layout
from megarl.config.presets import GROUP_ADVANTAGES
from megarl.config.profile_config import check_profile
from megarl.config.rollout_checks import check_rollout
from megarl.errors import ConfigError, LayoutError, ModelError, nearest

if TYPE_CHECKING:
    from megarl.config.schema import Config, ModelConfig, RunConfig, SourceConfig, TrainedRole
    from megarl.config.supervised import SupervisedConfig

PROCEDURAL_ROWS = 1000
"""Rows of a procedural source whose `limit` is null."""


def check_fields_agree(config: Config) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other."""
    _check_algorithm(config)
    check_rollout(config)
    check_source("data.train", config.data.train)
    if config.data.eval is not None:
        check_source("data.eval", config.data.eval)
        _check_held_out(config.data.train, config.data.eval)
    check_run(config.run, evaluates=config.data.eval is not None)
    layouts = (config.policy.layout, config.critic.layout, config.reference.layout, config.reward_model.layout)
    check_profile(config.profile, config.run.steps, [layout for layout in layouts if layout is not None])
    if not config.rewards and not config.uses_reward_model:
        raise ConfigError("rewards is empty and reward_model.path is null, but a run needs at least one source of reward")
    trained = {"policy": config.policy, "critic": config.critic}
    for name, role in trained.items():
        optimizer = role.optimizer
        if optimizer.min_lr > optimizer.lr:
            raise ConfigError(
                f"{name}.optimizer.min_lr is {optimizer.min_lr}, but it may be at most {name}.optimizer.lr = {optimizer.lr}"
            )
    check_offload(config.model, trained, valued=("critic",))
    frozen = {"the reference": config.uses_reference, "the reward model": config.uses_reward_model}
    check_fp8(config.model, trained=trained, frozen=[name for name, is_there in frozen.items() if is_there])
    batch_arithmetic(config)


def check_run(run: RunConfig, *, evaluates: bool) -> None:
    """Check what `run` alone says, and what of it needs evaluations."""
    name = PurePosixPath(run.name)
    if not run.name.strip() or not run.name.isprintable() or name.is_absolute() or ".." in name.parts:
        raise ConfigError(f"run.name is {run.name!r}, but it may be a name that is a folder inside run.folder")
    rules = parse_guards(run.guards)
    if not run.save_every and (back := [rule for rule in rules if rule.action == "rollback"]):
        raise ConfigError(f"run.guards says '{back[0]}', but run.save_every is 0, so there is no checkpoint to go back to")
    if run.eval_every and not evaluates:
        raise ConfigError(f"run.eval_every is {run.eval_every}, but data.eval is null; give data.eval or set it to 0")
    if run.keep_best is not None and not evaluates:
        raise ConfigError(f"run.keep_best is '{run.keep_best}', but data.eval is null, so nothing is measured; it may be null")


def check_offload(model: ModelConfig, trained: dict[str, TrainedRole], valued: Sequence[str]) -> None:
    """Refuse to offload a part of what megatron-core can only offload whole; `valued` roles have a value head."""
    for name, role in trained.items():
        fraction = role.optimizer.offload_fraction
        if 0 < fraction < 1 and (model.dtype == "float32" or name in valued):
            which = "model.dtype is 'float32'" if model.dtype == "float32" else "its value head is in float32"
            raise ConfigError(
                f"{name}.optimizer.offload_fraction is {fraction}, but {which}: beside an offloaded part megatron-core does "
                "not update float32 weights; it may be 0 or 1"
            )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.advantage in GROUP_ADVANTAGES and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            f"rollout.samples_per_prompt is {config.rollout.samples_per_prompt}, but algorithm.advantage = "
            f"'{algorithm.advantage}' compares the responses of one prompt and needs at least 2"
        )
    _check_kl(config)
    _check_ptx(config)
    correction = algorithm.correction
    if correction.mode not in ("none", "tis_token", "tis_sequence") and correction.low >= correction.high:
        raise ConfigError(
            f"algorithm.correction.low is {correction.low}, but it may be below algorithm.correction.high = {correction.high}"
        )
    if algorithm.truncated == "bootstrap" and algorithm.advantage != "gae":
        raise ConfigError("algorithm.truncated is 'bootstrap', but only algorithm.advantage = 'gae' has values to bootstrap")
    if algorithm.shaping.overlong_tokens > config.rollout.max_new_tokens:
        raise ConfigError(
            f"algorithm.shaping.overlong_tokens is {algorithm.shaping.overlong_tokens}, but it may be at most "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}"
        )
    if algorithm.advantage == "grpo_process" and not (config.reward_model.process and config.uses_reward_model):
        raise ConfigError(
            "algorithm.advantage is 'grpo_process', but nothing scores steps; it needs reward_model.path with "
            "reward_model.process true"
        )
    if algorithm.clip_low >= 1:
        raise ConfigError(f"algorithm.clip_low is {algorithm.clip_low}, but it may be from 0 to below 1")
    if config.critic.warmup_steps and not config.uses_critic:
        raise ConfigError(
            f"critic.warmup_steps is {config.critic.warmup_steps}, but algorithm.advantage = '{algorithm.advantage}' "
            "trains no critic; only 'gae' does"
        )


def _check_kl(config: Config) -> None:
    kl, advantage = config.algorithm.kl, config.algorithm.advantage
    if kl.coef and kl.where == "reward" and advantage in ("grpo", "grpo_process", "dr_grpo", "rloo", "opo", "gpg"):
        raise ConfigError(
            f"algorithm.kl.where is 'reward', but algorithm.advantage = '{advantage}' gives a whole response one "
            "advantage and has no place for a penalty per token; it may be 'loss', or algorithm.kl.coef 0"
        )
    if kl.target is not None and (kl.where != "reward" or not kl.coef):
        raise ConfigError("algorithm.kl.target is set, but only a KL in the reward with a coef above 0 is steered")
    if kl.unbiased and kl.where != "loss":
        raise ConfigError("algorithm.kl.unbiased is true, but it is for the KL in the loss (algorithm.kl.where: loss)")
    every = config.reference.reset_every
    if every and (not config.uses_reference or config.reference.layout is not None):
        raise ConfigError(
            f"reference.reset_every is {every}, but it needs algorithm.kl.coef above 0 and a reference in the policy's own "
            "processes (reference.layout: null)"
        )


def _check_ptx(config: Config) -> None:
    if not config.ptx.coef:
        return
    if config.ptx.data is None:
        raise ConfigError(
            f"ptx.coef is {config.ptx.coef}, but ptx.data is null; give it a source of rows, or set ptx.coef to 0"
        )
    check_source("ptx.data", config.ptx.data)
    share = config.algorithm.mini_batches * config.policy.layout.dp
    if config.ptx.samples_per_step % share:
        raise ConfigError(
            f"ptx.samples_per_step is {config.ptx.samples_per_step}, but it must be a multiple of {share}, the mini-batches "
            "of a step times policy.layout.dp"
        )


def check_source(field: str, source: SourceConfig) -> None:
    if source.weight != 1:
        raise ConfigError(f"{field}.weight is {source.weight}, but only the parts of a mixture have a weight; it may be 1.0")
    if source.source != "mixture":
        _check_single_source(field, source)
        return
    if not source.parts:
        raise ConfigError(f"{field}.parts is empty, but {field}.source = 'mixture' needs at least one source with its weight")
    for name in ("name", "path", "args"):
        if getattr(source, name):
            raise ConfigError(f"{field}.{name} is set, but {field}.source is 'mixture'; it may be set in {field}.parts")
    for number, part in enumerate(source.parts):
        if part.source == "mixture":
            raise ConfigError(f"{field}.parts[{number}].source is 'mixture', but a part may be any other source")
        _check_single_source(f"{field}.parts[{number}]", part)


def _check_single_source(field: str, source: SourceConfig) -> None:
    if source.parts:
        raise ConfigError(f"{field}.parts is set, but {field}.source is '{source.source}'; only 'mixture' has parts")
    needs = "path" if source.source in ("jsonl", "parquet", "dataset") else "name"
    if getattr(source, needs) is None:
        example = {
            "reasoning_gym": "a task such as 'basic_arithmetic'",
            "python": "'package.module:function'",
            "dataset": "the folder of rows",
        }.get(source.source, "the file of rows")
        raise ConfigError(f"{field}.{needs} is null, but {field}.source = '{source.source}' needs {example}")
    if source.source == "python" and ":" not in (source.name or ""):
        raise ConfigError(f"{field}.name is '{source.name}', but a python source is 'package.module:function'")


def _check_held_out(train: SourceConfig, held_out: SourceConfig) -> None:
    """A procedural row depends on seed + index and the arguments alone: overlapping ranges are the same rows."""
    for a, one in enumerate(train.parts or (train,)):
        for b, other in enumerate(held_out.parts or (held_out,)):
            train_field = f"data.train.parts[{a}]" if train.parts else "data.train"
            _check_ranges(train_field, one, f"data.eval.parts[{b}]" if held_out.parts else "data.eval", other)


def _check_ranges(train_field: str, train: SourceConfig, field: str, held_out: SourceConfig) -> None:
    same_task = (train.source, train.name, train.args) == (held_out.source, held_out.name, held_out.args)
    if train.source != "reasoning_gym" or not same_task:
        return
    train_end = train.seed + (train.limit or PROCEDURAL_ROWS)
    eval_end = held_out.seed + (held_out.limit or PROCEDURAL_ROWS)
    if train.seed < eval_end and held_out.seed < train_end:
        raise ConfigError(
            f"{field}.seed is {held_out.seed}, but {train_field} already uses the rows of seeds {train.seed} to "
            f"{train_end - 1}; it may be {train_end} or more"
        )


def check_models(config: Config | SupervisedConfig) -> None:
    """Check that every model folder exists, that the layouts divide its model and that FP8 can hold what a rank has.

    Raises:
        ModelError: a folder, or its config.json, is missing or unreadable.
        ConfigError: a layout does not divide heads, layers, feed-forward width or experts, or leaves widths unfit for FP8.
    """
    from megarl.config.supervised import SupervisedConfig  # which is made of the sections that this file checks

    sizes = read_sizes("model.path", config.model.path)

    def check(field: str, path: str | None, layout: Layout | None, path_field: str = "") -> None:
        model = read_sizes(path_field or f"{field}.path", path) if path else sizes
        layout = layout or config.policy.layout
        _check_layout(f"{field}.layout", layout, model, config.model.layer_spec)
        check_fp8_sizes(config.model, f"{field}.layout", layout, model)

    check("policy", None, config.policy.layout)
    if config.uses_reference:
        check("reference", config.reference.path, config.reference.layout)
    if isinstance(config, SupervisedConfig):
        return
    # what training asks of layouts with experts is not asked of an engine
    _check_layout("rollout", Layout(tp=config.rollout.tp), {**sizes, "num_experts": None})
    if config.uses_critic:
        check("critic", config.critic.init_from, config.critic.layout, "critic.init_from")
    if config.uses_reward_model:
        check("reward_model", config.reward_model.path, config.reward_model.layout)


def read_sizes(field: str, folder: str) -> dict[str, Any]:
    """Read the sizes that layouts must divide from `folder`/config.json (and `hidden_size`, `attention_width`).

    `field` is the config field that named the folder.
    """
    path = Path(folder)
    if not path.is_dir():
        siblings = [str(p) for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise ModelError(
            f"{field} is '{folder}', but there is no such folder{nearest(folder, siblings)}; "
            "it may be a Hugging Face model folder"
        )
    try:
        tree = json.loads((path / "config.json").read_text())
        tree = {**tree, **tree.get("text_config", {})}
        heads, hidden = int(tree["num_attention_heads"]), int(tree["hidden_size"])
        for name in ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "hidden_size"):
            if tree.get(name) is not None and int(tree[name]) < 1:
                raise ValueError(f"{name} is {tree[name]}, but it must be above 0")
        if heads % (kv_heads := int(tree.get("num_key_value_heads") or heads)):
            raise ValueError(f"num_key_value_heads is {kv_heads}, but it must divide num_attention_heads, which is {heads}")
        return {
            "hidden_size": hidden,
            "attention_width": heads * int(tree.get("v_head_dim") or tree.get("head_dim") or hidden // heads),
            "num_layers": int(tree["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            **_widths(tree),
        }
    except FileNotFoundError:
        raise ModelError(
            f"{field} is '{folder}', but the folder has no config.json; it may be a Hugging Face model folder"
        ) from None
    except KeyError as error:
        raise ModelError(f"{field} is '{folder}', but its config.json has no {error}") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, OverflowError, RecursionError, OSError) as error:
        raise ModelError(f"{field} is '{folder}', but its config.json cannot be read: {error}") from None


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _widths(tree: dict[str, Any]) -> dict[str, int | None]:
    """The feed-forward widths that tensor parallelism divides: of dense layers and shared experts, and of the experts."""
    width = int(tree["intermediate_size"])
    experts = next((int(tree[key]) for key in _EXPERT_KEYS if tree.get(key)), None)
    if experts is None:
        return {"ffn_size": width, "num_experts": None, "expert_ffn_size": None}
    of_expert = int(tree.get("moe_intermediate_size") or width)
    has_dense_layers = (
        tree.get("first_k_dense_replace") or tree.get("mlp_only_layers") or tree.get("decoder_sparse_step", 1) > 1
    )
    shared = int(tree.get("n_shared_experts") or 0) * of_expert
    split_by_tp = [size for size in (width if has_dense_layers else 0, shared) if size]
    return {
        "ffn_size": math.gcd(*split_by_tp) if split_by_tp else None,
        "num_experts": experts,
        "expert_ffn_size": of_expert,
    }


def _check_layout(field: str, layout: Layout, sizes: dict[str, Any], layer_spec: str = "auto") -> None:
    try:
        layout.check_layer_spec(layer_spec)
        layout.check_model(**{key: size for key, size in sizes.items() if key not in ("hidden_size", "attention_width")})
    except LayoutError as error:
        raise ConfigError(str(error).replace("layout.", f"{field}.")) from None
