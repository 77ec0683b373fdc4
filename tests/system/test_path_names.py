"""Names that become folders and files: refused in a sentence where they name none, encoded where they must be one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.checks import check_run
from megarl.config.sections import RunConfig
from megarl.errors import ConfigError
from megarl.system.path_names import file_name_of

REFUSED = ["", " ", ".", "./", "..", "a/../../b", "/etc/x", "a\nb", "a\x1b[2J", "x" * 300, "a/" + "é" * 150, "a\u202eb"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_no_folder_of_a_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.name is .* run\.folder; it must be a name such as 'run-1'$"):
        check_run(RunConfig(name=name), evaluates=False, evaluations="")


def test_names_with_slashes_and_of_any_language_are_folders() -> None:
    for name in ("a/b", "run-1", "ä/日本", "x" * 200, "a b"):
        check_run(RunConfig(name=name), evaluates=False, evaluations="")


def test_any_name_is_one_file_that_no_other_name_has(tmp_path: Path) -> None:
    names = [*REFUSED, "a/b", "a%2Fb", "日本" * 100, "日本" * 101, "y" * 4000, "y" * 4001]
    for name in names:
        file = tmp_path / f"{file_name_of(name)}.json"
        file.write_text(name)
        assert file.parent == tmp_path
    assert len([*tmp_path.iterdir()]) == len(names)
