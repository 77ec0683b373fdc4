"""Installs packages into the environment of the Python that runs it: `install.py ARGUMENTS` is `pip install ARGUMENTS`, by uv.

uv is much faster than pip, but does not read pip's settings. On a machine where pip is told to take torch from a folder of
wheels, uv alone would fetch another build of torch. So pip's settings are translated; where one cannot be, pip installs.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OWN_UV = Path(sys.prefix, ".uv")
"""Where uv lies if the machine has none. Not in the environment itself: the package set is the same with pip."""

AS_OPTION = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
AS_VARIABLE = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
AS_FLAG = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
WITHOUT_EFFECT = {
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
"""Settings of pip that change what it says or how it works, not what it installs."""


class Untranslatable(Exception):
    """A setting of pip for which uv has no equivalent here."""


def pip_settings(listing: str) -> dict[str, str]:
    """Return name -> value from what `pip config list` prints: one `section.name='value'` a line, environment over files."""
    settings: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in settings:
            settings[section][name] = str(ast.literal_eval(value))
    return settings["global"] | settings["install"] | settings[":env:"]


def for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment variables that make uv choose the packages that pip would.

    Raises:
        Untranslatable: a setting is not among those that are known here.
    """
    options, variables = ["--index-strategy", "unsafe-best-match"], {}  # the best release of all indexes, as pip takes it
    for name, value in settings.items():
        if name in AS_OPTION:
            options += [word for entry in value.split() for word in (AS_OPTION[name], entry)]
        elif name in AS_VARIABLE:
            variables[AS_VARIABLE[name]] = value
        elif name in AS_FLAG:
            options += [AS_FLAG[name]] if value.lower() in ("1", "true", "yes", "on") else []
        elif name not in WITHOUT_EFFECT:
            raise Untranslatable(name)
    return options, variables


def find_uv() -> str | None:
    """Return uv's path: the one on the PATH, or one that pip fetches for this environment; None where it cannot be had."""
    own = OWN_UV / "bin" / "uv"
    if (found := shutil.which("uv")) is not None:
        return found
    if not own.exists():
        print("uv is not on the PATH: pip fetches it", file=sys.stderr)
        subprocess.run([*PIP, "install", "--quiet", "--target", str(OWN_UV), "uv"], check=False)
    return str(own) if own.exists() else None


def main(arguments: list[str]) -> int:
    """Install by uv if it can be had and knows every setting of pip, otherwise by pip. INSTALLER=pip chooses pip."""
    by_pip = [*PIP, "install", "--quiet", *arguments]
    if os.environ.get("INSTALLER") == "pip":
        return subprocess.run(by_pip, check=False).returncode
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    try:
        options, variables = for_uv(pip_settings(listing))
    except Untranslatable as setting:
        print(f"pip installs, because uv has no equivalent of pip's setting {setting}", file=sys.stderr)
        return subprocess.run(by_pip, check=False).returncode
    if (uv := find_uv()) is None:
        print("pip installs, because uv cannot be had", file=sys.stderr)
        return subprocess.run(by_pip, check=False).returncode
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *options, *arguments]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
