"""Sandboxes for an option that lets tools or agents work in them."""

from __future__ import annotations

from megarl.options.sandboxes.sandbox import Sandboxes, open_sandboxes
from megarl.options.sandboxes.section import SandboxConfig


def open_chosen(settings: SandboxConfig, choices: list[str], port: int | None = None) -> Sandboxes:
    """Open sandboxes; what `kind: auto` chose is added to `choices`. `port`: the one that commands may reach.

    Raises:
        EpisodeError: this machine has none of the kind that is wanted.
    """
    opened = open_sandboxes(settings, port)
    if settings.kind == "auto":
        choices.append(f"sandboxes: {opened.kind} (rollout.episode.sandbox.kind is 'auto')")
    return opened
