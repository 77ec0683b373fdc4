"""What `megarl plan` prints for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl import cli


def planned(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The plan as JSON; the test is skipped where the model is of an option that this installation does not have."""
    capsys.readouterr()
    code = cli.main(["plan", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    if code and "which this installation does not have" in printed.err:
        pytest.skip(printed.err)
    assert code == 0, printed.err
    return json.loads(printed.out)
