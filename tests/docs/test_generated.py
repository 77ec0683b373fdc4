"""The pages that follow from the program are those of today's program."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl import errors
from megarl.cli.commands import COMMANDS
from megarl.config import SupervisedConfig, config_fields
from tests.docs.pages import DOCS, ROOT

COMMAND = "python tools/docs/generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools/docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "cli.md", "errors.md"])
def test_the_page_is_what_the_program_says(generate: ModuleType, name: str) -> None:
    assert (DOCS / name).read_text() == generate.generated()[name], f"docs/{name} is out of date: run `{COMMAND}`"


def test_a_page_that_is_out_of_date_is_named_and_then_written(tmp_path: Path) -> None:
    for name in ("config.md", "cli.md", "errors.md"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    page = tmp_path / "errors.md"
    page.write_text(page.read_text().replace("ConfigError", "ConfigErrer"))
    command = [sys.executable, *COMMAND.split()[1:], "--folder", str(tmp_path)]
    checked = subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (1, "errors.md is out of date\n")
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (written.returncode, written.stdout) == (0, "errors.md written\n")
    assert page.read_text() == (DOCS / "errors.md").read_text()


def test_every_field_has_a_row() -> None:
    page = (DOCS / "config.md").read_text()
    fields = {field.name for field in [*config_fields(), *config_fields(SupervisedConfig)]}
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) == fields


def test_every_command_has_a_heading() -> None:
    headed = re.findall(r"^## `megarl ([\w-]+)", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert set(headed) == set(COMMANDS)


def test_every_error_has_its_exit_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|[^|]*\|$", (DOCS / "errors.md").read_text(), re.MULTILINE))
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert rows == {name: {"RunStopped": "75", "RunInterrupted": "130"}.get(name, "2") for name in kinds}
