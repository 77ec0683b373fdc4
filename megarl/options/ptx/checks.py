"""Checks of the section `ptx`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.config.source_checks import check_source
from megarl.errors import ConfigError
from megarl.options.ptx.section import ptx_of


def check(config: Config) -> None:
    """Refuse examples that are not there, or that do not divide among updates and replicas."""
    ptx = ptx_of(config)
    if not ptx.coef:
        return
    if ptx.data is None:
        raise ConfigError.needs("ptx.coef", "rows to train on", "set ptx.data, or remove ptx.coef")
    check_source("ptx.data", ptx.data)
    share = config.algorithm.mini_batches * config.policy.layout.dp
    if ptx.samples_per_step % share:
        raise ConfigError.of(
            "ptx.samples_per_step",
            ptx.samples_per_step,
            allowed=f"a multiple of {share} (algorithm.mini_batches times policy.layout.dp)",
        )
    for name, value in config.rollout.sampling_limits.items():
        off = type(config.rollout).model_fields[name].default
        why = "leaves out tokens, and rows of ptx.data may have any"
        raise ConfigError.of(f"rollout.{name}", value, why, allowed=str(off))
