"""The section `profile`: steps of training that are recorded operation by operation, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from megarl.config.layout import Layout
from megarl.config.section import Count, Positive, Section
from megarl.errors import ConfigError


class ProfileConfig(Section):
    """Steps that torch's profiler records on training ranks. Off if `steps` is empty."""

    steps: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Steps (from 1) whose trace and memory snapshot are written to `<run folder>/profile/`."""
    ranks: Annotated[tuple[Count, ...], Field(strict=False)] = (0,)
    """Ranks to record, in each group of training ranks (policy, critic, …)."""


def check_profile(profile: ProfileConfig, run_steps: int | None, layouts: Sequence[Layout]) -> None:
    """Refuse steps that the run does not have, and ranks that none of its `layouts` has.

    Raises:
        ConfigError: names the field, its value and what it must be.
    """
    late = [step for step in profile.steps if run_steps is not None and step > run_steps]
    if late:
        raise ConfigError.of("profile.steps", profile.steps, allowed=f"steps from 1 to run.steps = {run_steps}")
    last = max(layout.world_size for layout in layouts) - 1
    absent = [rank for rank in profile.ranks if rank > last]
    if absent:
        raise ConfigError.of("profile.ranks", profile.ranks, allowed=f"ranks from 0 to {last} of the largest layout")
