"""What a run is: typed schema, YAML and overrides, batch arithmetic, validation. Importable without torch."""

from megarl.config.batch import BatchArithmetic, batch_arithmetic
from megarl.config.checks import check_models
from megarl.config.layout import Coords, Layout
from megarl.config.leaves import Leaf, leaves
from megarl.config.load import (
    load_config,
    load_supervised_config,
    parse_config,
    parse_supervised_config,
    save_resolved,
    to_yaml,
)
from megarl.config.schema import Config
from megarl.config.supervised import SupervisedConfig

__all__ = [
    "BatchArithmetic",
    "Config",
    "Coords",
    "Layout",
    "Leaf",
    "SupervisedConfig",
    "batch_arithmetic",
    "check_models",
    "leaves",
    "load_config",
    "load_supervised_config",
    "parse_config",
    "parse_supervised_config",
    "save_resolved",
    "to_yaml",
]
