"""Files of a command are read as UTF-8, whatever the locale says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.smallest import WITHOUT_LIBRARIES

PLAIN_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def latin_1(folder: Path) -> dict[str, str]:
    """The variables of a locale with another encoding, made in `folder`."""
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(folder / "en_US.ISO-8859-1")]
    try:
        done = subprocess.run(made, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no locale can be made here: {error}")
    if not (folder / "en_US.ISO-8859-1").is_dir():
        pytest.skip(f"no locale can be made here: {done.stderr.strip()}")
    return {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(folder)}


@pytest.mark.parametrize("locale", ["ascii", "latin-1"])
def test_a_config_is_read_as_utf_8(locale: str, tmp_path: Path) -> None:
    variables = PLAIN_ASCII if locale == "ascii" else latin_1(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    found = "import locale; print(locale.getpreferredencoding(False))"
    python = [sys.executable, "-c", found]
    said = subprocess.run(python, env=environment | variables, capture_output=True, text=True, check=True).stdout
    assert said.strip() in ("ANSI_X3.4-1968", "ISO-8859-1"), "Python itself would read other texts"
    file = tmp_path / "läuft.yaml"
    file.write_text(WITHOUT_LIBRARIES.replace("name: a", "name: größer"), "utf-8")
    command = [sys.executable, "-m", "megarl", "config", str(file)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "größer" in done.stdout.decode("utf-8")
