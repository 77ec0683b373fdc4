"""Contradictions of `policy.indexer` with the rest of a config."""

from __future__ import annotations

from pathlib import Path

from megarl.config import AnyConfig, Config, SupervisedConfig
from megarl.config.engine_kinds import EngineCapabilities
from megarl.errors import ConfigError, ModelError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.sparse_attention.section import indexer_of
from megarl.options.sparse_attention.sparse_family import VARIANT

FIELD, REPLAY = "policy.indexer.train", "policy.indexer.replay"


def check(config: Config) -> None:
    """Refuse training, and replay, of indexers that the policy does not have, or of which nothing but adapters is trained.

    Raises:
        ConfigError: names the field.
    """
    _check(config)
    replay = indexer_of(config.policy).replay
    if replay != "none" and not _has_indexers(config.model.path):
        reason = f"is for models that choose keys by indexers, and the model in '{config.model.path}' has none"
        raise ConfigError.of(REPLAY, replay, reason, allowed="'none'")


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Refuse replay of what nobody records.

    Raises:
        ConfigError: names the field.
    """
    if indexer_of(config.policy).replay == "engine" and not engine.indexes:
        reason = f"asks engines for the keys that indexers chose, which rollout.engine = '{config.rollout.engine}' cannot say"
        raise config.refusal(REPLAY, reason, allowed="'none'")


def check_supervised(config: SupervisedConfig) -> None:
    """See `check`; there is no engine whose choices could be replayed."""
    _check(config)
    if indexer_of(config.policy).replay != "none":
        reason = "only reinforcement learning has: no engine chose keys for rows"
        raise config.refusal(REPLAY, reason, allowed="'none'")


def _check(config: AnyConfig) -> None:
    train = indexer_of(config.policy).train
    if train == "none":
        return
    if config.policy.has_adapters:
        raise ConfigError.of(FIELD, train, "trains weights, and policy.lora trains adapters in their place", allowed="'none'")
    if not _has_indexers(config.model.path):
        reason = f"is for models that choose keys by indexers, and the model in '{config.model.path}' has none"
        raise ConfigError.of(FIELD, train, reason, allowed="'none'")


def _has_indexers(folder: str) -> bool:
    """Return whether the model of a folder has some; True where it cannot be read, which is said elsewhere."""
    if not (Path(folder) / "config.json").is_file():
        return True
    try:
        hf_config = load_hf_config(folder)
        return architecture_for(hf_config).transformer_config_kwargs(hf_config).get("experimental_attention_variant") == VARIANT
    except ModelError:
        return True
