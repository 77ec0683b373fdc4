"""Confines the process that calls it, for good: limits, no reading outside given folders, and the filter of system calls.

Imported by path from the children, so it imports nothing of megarl.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable

import system_calls

_OPEN_FILES, _PROCESSES = 64, 4096

# Landlock, by number on every machine: creating a rule set, adding a rule, applying it to this thread.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH, _VERSION = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights over files each version of Landlock knows; 16 from the fifth on."""
_NO_TCP, _NO_SIGNALS_OUT = 0b11, 0b11
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")
"""Besides Python's own folders: libraries, time zones. Not /proc, /etc, /home or /tmp."""


def confine(memory_bytes: int, cpu_s: int, readable: Iterable[str] = ()) -> None:
    """Let this process do nothing from here on but compute within `memory_bytes` of address space and `cpu_s` CPU seconds.

    It may read system libraries, Python's own folders and `readable`; where the kernel has no Landlock (before 5.13, or
    switched off), whatever its user may read.

    Raises:
        OSError: a limit or the filter of system calls cannot be set; the message says which.
    """
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: _PROCESSES,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (allowed, allowed))
    _restrict_reading([*_READABLE, sys.prefix, sys.base_prefix, *readable])
    system_calls.install()


def landlock_version() -> int:
    """The version of Landlock that this kernel has; 0: none."""
    return max(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)), 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _restrict_reading(readable: Iterable[str]) -> None:
    """By Landlock, which also takes /proc of other processes and, in newer kernels, TCP and signals away."""
    if not (version := landlock_version()):
        return
    libc = _libc()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    fields = [rights, *([_NO_TCP] if version >= 4 else []), *([_NO_SIGNALS_OUT] if version >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if rules < 0:
        raise OSError(f"landlock_create_ruleset failed: {os.strerror(ctypes.get_errno())}")
    for path in dict.fromkeys(readable):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
            result = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, folder), ctypes.c_uint(0))
            os.close(folder)
            if result < 0:
                raise OSError(f"landlock_add_rule for {path} failed: {os.strerror(ctypes.get_errno())}")
    # the kernel asks for no new privileges first; so does the filter
    libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)) < 0:
        raise OSError(f"landlock_restrict_self failed: {os.strerror(ctypes.get_errno())}")
    os.close(rules)
