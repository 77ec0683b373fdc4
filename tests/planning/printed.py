"""What `megarl plan` prints for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl import cli


def planned(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The plan as JSON."""
    capsys.readouterr()
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)
