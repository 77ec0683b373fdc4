"""`megarl node join`: the process at the other site."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megarl.errors import ConfigError
from megarl.models.from_hub import model_here
from megarl.options.elastic_engines.sites.joining import SiteSettings, join
from megarl.system.redaction import redacted


def join_run(url: str, token: str, model: str | None, name: str, patience_s: float) -> None:
    """Work for the run at `url`, as the site `name`, until it or the run ends; tells of it line by line.

    Raises:
        MegarlError: one sentence; see `joining.join`.
    """

    def folder(of_run: str) -> str:
        if model is not None:
            return model_here(model, "--model")
        if not Path(of_run).is_dir():
            raise ConfigError(f"--model is missing: the run's model.path is {of_run!r:.200}, which is no folder here")
        return of_run

    asyncio.run(join(SiteSettings(url, token, name, patience_s, _say), _on_signal, folder))


def _say(line: str) -> None:
    sys.stdout.write(f"{redacted(line)}\n")
    sys.stdout.flush()


def _on_signal(callback: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, callback)
