"""Writes the locks, one for each Python: `lock.py torch==2.13.0` (`make locks`). Each names all packages that `make venv`
installs under that Python, at the versions of constraints.txt, with the hashes of their files as the package index tells them.

Neither torch nor torchvision is in a lock: which build of them is right depends on the machine, and each build has other files.
Wheels that lie on this machine (pip's find-links and extra-index-url) are not asked for: a lock is for others, too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from install import PIP, find_uv, for_uv, pip_settings  # the file beside this one

HERE = Path(__file__).parent
LOCKS = {"lock-py311.txt": "3.11.5", "lock-py312.txt": "3.12"}
"""File -> the Python that it is for; pymdown-extensions, a part of the extra `docs`, needs 3.11.5."""
EXTRAS = ("sglang", "wandb", "mlflow", "docs", "test", "fuzz")
"""What of setup.py is locked: all extras that may lie beside each other without a GPU; `test` has those not named in it."""
FILES = ("sglang-cpu.txt", "rdma-cpu.txt", "model.txt")
LEFT_TO_THE_MACHINE = ("torch", "torchvision")
OF_THIS_MACHINE = ("find-links", "extra-index-url", "constraint")
"""Settings of pip that would make a lock another one elsewhere."""
PLATFORM = "x86_64-manylinux_2_34"
"""The oldest that SGLang has wheels for. It decides which packages are needed; hashes are listed of all their files."""


def command(uv: str, file: str, torch: str, options: list[str]) -> list[str]:
    """Return the call of uv that writes a lock. `torch` is a file that pins it; `options` are pip's settings, translated."""
    words = [uv, "pip", "compile", "setup.py", *(f"requirements/{name}" for name in FILES)]
    words += ["--generate-hashes", "--python-version", LOCKS[file], "--python-platform", PLATFORM]
    words += [word for extra in EXTRAS for word in ("--extra", extra)]
    words += [word for package in LEFT_TO_THE_MACHINE for word in ("--no-emit-package", package)]
    words += ["--constraint", "requirements/constraints.txt", "--constraint", torch, "--config-file", "requirements/lock.toml"]
    return [*words, "--custom-compile-command", "make locks", "--quiet", "--output-file", f"requirements/{file}", *options]


def main(torch: str) -> int:
    """Write all locks for `torch`, a requirement with its version; return uv's exit status."""
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = {name: value for name, value in pip_settings(listing).items() if name not in OF_THIS_MACHINE}
    options, variables = for_uv(settings)
    if (uv := find_uv()) is None:
        sys.exit("the locks are written by uv, which cannot be had: put it on the PATH")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pin:
        pin.write(torch + "\n")
        pin.flush()
        for file in LOCKS:
            done = subprocess.run(
                command(uv, file, pin.name, options), cwd=HERE.parent, env=os.environ | variables, check=False
            )
            if done.returncode:
                return done.returncode
            print(f"written: requirements/{file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
