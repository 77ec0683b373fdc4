"""Whatever the process of an agent's function prints, it does not steer the terminal of the run."""

from __future__ import annotations

import io
import sys

import pytest

from megarl.options.agents.function_process import _pass_on
from megarl.system.terminal import SafeStream


def test_output_of_an_agent_is_printed_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", SafeStream(printed))
    _pass_on(io.BytesIO(b"plain\n\x1b]0;taken over\x07\xff\n"))
    assert printed.getvalue() == "plain\n\\x1b]0;taken over\\x07\ufffd\n"
