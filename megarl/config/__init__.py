"""The config of a run: typed schema, YAML and overrides, batch arithmetic, validation. Importable without torch."""

from megarl.config.batch import BatchArithmetic, batch_arithmetic
from megarl.config.layout import Coords, Layout
from megarl.config.load import (
    AnyConfig,
    load_any,
    load_config,
    parse_any,
    parse_config,
    parse_supervised_config,
    save_resolved,
    to_yaml,
)
from megarl.config.reference import ConfigField, config_fields
from megarl.config.schema import Config
from megarl.config.supervised import SupervisedConfig

__all__ = [
    "AnyConfig",
    "BatchArithmetic",
    "Config",
    "ConfigField",
    "Coords",
    "Layout",
    "SupervisedConfig",
    "batch_arithmetic",
    "config_fields",
    "load_any",
    "load_config",
    "parse_any",
    "parse_config",
    "parse_supervised_config",
    "save_resolved",
    "to_yaml",
]
