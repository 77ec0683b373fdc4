"""Texts of a command are UTF-8, whatever the locale of its shell or batch job says."""

from __future__ import annotations

import os
import sys


def speak_utf8() -> None:
    """Begin the command again in Python's UTF-8 mode where the locale has another encoding; child processes get it, too.

    Files without a byte order mark would be read as that encoding: rows silently wrong in ISO-8859-1, and not at all in ASCII.
    """
    if not sys.flags.utf8_mode and sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
