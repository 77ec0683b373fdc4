"""`make venv` installs by uv what pip would: pip's settings reach uv; where one cannot be translated, pip installs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements" / "install.py"
INSTALL = runpy.run_path(str(SCRIPT))


def stand_in(folder: Path, name: str) -> None:
    """A program that prints its arguments and the certificates that it would trust."""
    program = folder / name
    program.write_text('#!/bin/sh\necho "$0 $@ certificates=$SSL_CERT_FILE"\n')
    program.chmod(0o755)


def installed(tmp_path: Path, **settings: str) -> str:
    """What install.py says and starts for `torch==1.0`, with a stand-in for uv, and no settings of pip but these."""
    stand_in(tmp_path, "uv")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "SSL_CERT_FILE"}
    environment = clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull, **settings}
    command = [sys.executable, str(SCRIPT), "--dry-run", "--no-deps", "no-such-package-of-megarl"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_every_known_setting_of_pip_has_its_counterpart() -> None:
    listing = "\n".join(
        [
            "global.index-url='https://a/simple'",
            "global.find-links='/from/a/file'",
            ":env:.find-links='/wheels /more'",
            "install.extra-index-url='\\nhttps://b/simple\\nfile:///c/simple'",
            "global.constraint='/held.txt'",
            "global.no-index='false'",
            ":env:.no-cache-dir='1'",
            "global.cert='/ca.crt'",
            "global.timeout='60'",
            "global.retries='3'",
            "list.format='columns'",
        ]
    )
    options, variables = INSTALL["for_uv"](INSTALL["pip_settings"](listing))
    pairs = ["--default-index https://a/simple", "--find-links /wheels", "--find-links /more", "--constraint /held.txt"]
    pairs += ["--index https://b/simple", "--index file:///c/simple", "--index-strategy unsafe-best-match", "--no-cache"]
    assert sorted(" ".join(options).replace(" --", "\n--").splitlines()) == sorted(pairs)
    assert variables == {"SSL_CERT_FILE": "/ca.crt", "UV_HTTP_TIMEOUT": "60"}


def test_pip_s_own_listing_is_what_is_read(tmp_path: Path) -> None:
    """The folder of wheels is where a CPU build of torch lies: without it a CUDA build is installed, and nothing complains."""
    said = installed(tmp_path, PIP_FIND_LINKS="/wheels", PIP_CERT="/ca.crt")
    assert said.startswith(f"{tmp_path}/uv pip install --quiet --python {sys.executable} ")
    assert " --find-links /wheels " in said
    assert said.endswith(" --dry-run --no-deps no-such-package-of-megarl certificates=/ca.crt\n")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"INSTALLER": "pip"}, {"PIP_ONLY_BINARY": ":all:"}])
def test_pip_installs_where_it_is_told_to_or_where_uv_would_choose_otherwise(tmp_path: Path, settings: dict[str, str]) -> None:
    said = installed(tmp_path, PIP_NO_INDEX="1", **settings)
    assert "No matching distribution found for no-such-package-of-megarl" in said
    assert ("only-binary" in said) == ("PIP_ONLY_BINARY" in settings)
