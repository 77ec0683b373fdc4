"""The field `rollout.max_engines`, and `rollout.engines: {min: 4, max: 64}`, which stands for `engines` and it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Section
from megarl.errors import ConfigError

DESCRIPTION = (
    "Engines come and go while the run goes on: at least `engines`, at most this many, wherever Ray has room. `engines: "
    "{min: 4, max: 64}` sets both (docs/operations.md). null: always `engines`."
)
MAX_ENGINES: AddedField[int | None] = AddedField("RolloutConfig", "max_engines", Positive | None, None, DESCRIPTION)


class SitesConfig(Section):
    """The address at which engines of other sites join the run (`megarl node join`, docs/operations.md)."""

    host: str = "127.0.0.1"
    """Address to listen at: that of a tunnel's or TLS proxy's end on this machine, or one that sites can reach themselves."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8480
    """Port to listen at. 0: a free one."""
    engines: Positive = 1
    """Of `rollout.max_engines` so many are kept for other sites; more of them may come where the run's nodes have no room."""
    token_file: str | None = None
    """File with the token that sites bring, 16 characters or more. null: MEGARL_SITES_TOKEN, else one is made in the run's
    folder (`sites/token`)."""


SITES: AddedField[SitesConfig | None] = AddedField(
    "RolloutConfig",
    "sites",
    SitesConfig | None,
    None,
    "Engines of other sites may be among those that come (`megarl node join`). null: none.",
)
FIELDS = (MAX_ENGINES, SITES)
max_engines_of = MAX_ENGINES.of
"""Engines that a section `rollout` may have at most; None: their number is fixed."""
sites_of = SITES.of
"""The address at which engines of other sites join; None: none do."""
FORM = "a whole number above 0, or {min, max} with two of them"


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Write `rollout.engines: {min, max}` of a plain tree as two fields; any other tree is returned as it is.

    Raises:
        ConfigError: `min` or `max` is missing or no whole number above 0, or `max_engines` is set beside them.
    """
    rollout = tree.get("rollout")
    if not isinstance(rollout, Mapping) or not isinstance(engines := rollout.get("engines"), Mapping):
        return tree
    if {*engines} != {"min", "max"}:
        raise ConfigError.of("rollout.engines", dict(engines), allowed=FORM)
    for name, value in engines.items():
        if type(value) is not int or value < 1:
            raise ConfigError.of(f"rollout.engines.{name}", value, allowed="a whole number of at least 1")
    least, most = engines["min"], engines["max"]
    if least > most:
        reason, allowed = f"is above rollout.engines.max = {most}", f"at most {most}"
        raise ConfigError.of("rollout.engines.min", least, reason, allowed=allowed, rule="is above rollout.engines.max")
    if rollout.get("max_engines") not in (None, most):
        reason = f"contradicts rollout.engines.max = {most}"
        raise ConfigError.of("rollout.max_engines", rollout["max_engines"], reason, allowed="left out")
    return {**tree, "rollout": {**rollout, "engines": least, "max_engines": most}}
