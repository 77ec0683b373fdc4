"""The class of a run's engines: a kind that megarl has, or a class of the user's own by its import path."""

from __future__ import annotations

import inspect

from megarl.config import Config
from megarl.config.engine_kinds import RUNNING, capabilities_of, is_users_own, kind_of
from megarl.config.rollout import RolloutConfig
from megarl.config.rollout_checks import check_rollout
from megarl.errors import ConfigError
from megarl.models.registry import sees
from megarl.option_list import functions
from megarl.rollout.engines.protocol import Engine
from megarl.system.user_code import absolute_name, load_user_function

CLASSES = {
    "sglang": "megarl.rollout.engines.sglang.engine:SglangEngine",
    RUNNING: "megarl.rollout.engines.sglang.external:ExternalEngine",
    "embedded": "megarl.rollout.engines.embedded:EmbeddedEngine",
    "replay": "megarl.rollout.engines.replay:ReplayEngine",
}
"""Kinds of engine as import paths, so that a run imports what it uses."""


def engine_path(rollout: RolloutConfig) -> str:
    """The import path of the class of a run's engines, which other processes load it by wherever they were started."""
    if is_users_own(rollout.engine):
        return absolute_name(rollout.engine)
    of_options = (of_option(rollout) for of_option in functions("engine_path", "engine_path"))
    return next(filter(None, of_options), None) or CLASSES[kind_of(rollout)]


def load_engine(path: str) -> type[Engine]:
    """The class at an import path.

    Raises:
        ConfigError: it cannot be imported, is not derived from `Engine`, or lacks one of its methods.
    """
    engine_class = load_user_function(path, ConfigError)
    if not (isinstance(engine_class, type) and issubclass(engine_class, Engine)):
        raise ConfigError(f"rollout.engine is '{path}', which must be a class derived from megarl.rollout.Engine")
    if inspect.isabstract(engine_class):
        missing = sorted(engine_class.__abstractmethods__)
        raise ConfigError(f"rollout.engine is '{path}', a class without {', '.join(missing)}, which every engine must have")
    return engine_class


def check_engine(config: Config, platform: str) -> type[Engine]:
    """The class of a run's engines, after whatever can be said against it and its config before anything is started.

    Raises:
        ConfigError: the class cannot be used, or contradicts a field.
        EngineError: engines of this kind cannot serve the model.
    """
    engine = load_engine(engine_path(config.rollout))
    able = capabilities_of(config.rollout)
    check_rollout(config, able)
    if sees(config.model.path) and not able.sees:
        reason = "has no answers to prompts that show pictures, which model.path is made for"
        raise ConfigError.of(
            "rollout.engine", config.rollout.engine, reason, allowed="'embedded', or 'sglang' with servers of the run's own"
        )
    if config.data.video == "native" and not able.sees_videos:
        reason = f"is not how rollout.engine = '{config.rollout.engine}' computes videos"
        raise ConfigError.of("data.video", "native", reason, allowed="'frames', or rollout.engine 'embedded'")
    engine.check(config, platform)
    return engine
