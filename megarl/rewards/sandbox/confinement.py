"""Confines the process that calls it, for good: limits, no files outside given folders, and the filter of system calls.

`confine` leaves it nothing but computing; `confine_commands` a folder to work in and programs to start.

Imported by path from the children, so it imports nothing of megarl.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import command_calls
import system_calls

_OPEN_FILES, _PROCESSES = 64, 4096

# Landlock, by number on every machine: creating a rule set, adding a rule, applying it to this thread.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH, _NET_PORT, _VERSION = 1, 2, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_READ = _READ_FILE | _READ_DIR
_TRUNCATE, _DEVICES = 1 << 14, 1 << 6 | 1 << 11
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
"""Rights that a rule for a file, not a folder, may give."""
_CONNECT_TCP = 1 << 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights over files each version of Landlock knows; 16 from the fifth on."""
_NO_TCP, _NO_SIGNALS_OUT = 0b11, 0b11
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")
"""Besides Python's own folders: libraries, time zones. Not /proc, /etc, /home or /tmp."""


_RUN_FROM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt")
_SETTINGS = ("ld.so.cache", "localtime", "passwd", "group", "nsswitch.conf", "alternatives", "hosts", "resolv.conf", "ssl")
"""Files of /etc, for commands."""
_DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
_SYSTEM_FIGURES = ("/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/loadavg", "/proc/version")
_PR_SET_KEEPCAPS = 8
_CAP_DAC_READ_SEARCH = 1 << 2


@dataclass(frozen=True)
class CommandLimits:
    """Limits of the commands of a folder; `processes` besides `others`, those that their user has already."""

    memory_bytes: int
    file_bytes: int
    processes: int
    others: int = 0
    user: int | None = None
    """A user of their own; None: they have the one of this process."""
    port: int | None = None
    """The one TCP port that they may connect to."""
    network: bool = False
    """Whether they may connect to anything."""


def confine(memory_bytes: int, cpu_s: int, readable: Iterable[str] = ()) -> None:
    """Let this process do nothing from here on but compute within `memory_bytes` of address space and `cpu_s` CPU seconds.

    It may read system libraries, Python's own folders and `readable`; where the kernel has no Landlock (before 5.13, or
    switched off), whatever its user may read.

    Raises:
        OSError: a limit or the filter of system calls cannot be set; the message says which.
    """
    _limit(
        {
            resource.RLIMIT_AS: memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_NPROC: _PROCESSES,
        }
    )
    if landlock_version():
        _restrict_files(dict.fromkeys([*_READABLE, sys.prefix, sys.base_prefix, *readable], _READ))
    system_calls.install()


def confined(memory_bytes: int, cpu_s: int) -> str:
    """`confine`, with the working folder to read: what is missing on this machine, or an empty text."""
    try:
        confine(memory_bytes, cpu_s, [os.getcwd()])
    except (OSError, ValueError, AttributeError) as error:
        return str(error).replace("\n", " ")
    return ""


def confine_commands(limits: CommandLimits, folder: str, readable: Iterable[str] = ()) -> None:
    """Let this process, and all that it starts, change files in `folder` alone, and reach no process but its own.

    It may read and run what lies in the system's folders, Python's own and `readable`.

    Raises:
        OSError: the kernel cannot hold it so; the message says what is missing.
    """
    version = landlock_version()
    if not version:
        raise OSError("the kernel has no Landlock (Linux 5.13, and not switched off)")
    if limits.port is not None and version < 4:
        raise OSError(f"the kernel's Landlock has version {version}, and connecting to one port only needs 4 (Linux 6.7)")
    capabilities = 0
    if limits.user is not None:
        capabilities = _CAP_DAC_READ_SEARCH  # Landlock says what is read, wherever this Python is installed
        _libc().prctl(_PR_SET_KEEPCAPS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        os.setgroups([])
        os.setresgid(*[limits.user] * 3)
        os.setresuid(*[limits.user] * 3)
        system_calls.keep_capabilities(capabilities)
    _limit(
        {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_FSIZE: limits.file_bytes,
            resource.RLIMIT_NOFILE: _OPEN_FILES * 4,
            resource.RLIMIT_NPROC: limits.processes + limits.others,
        }
    )
    grants = dict.fromkeys([*_RUN_FROM, sys.prefix, sys.base_prefix, *readable], _EXECUTE | _READ)
    grants |= dict.fromkeys([*(f"/etc/{name}" for name in _SETTINGS), *_SYSTEM_FIGURES], _READ)
    grants |= dict.fromkeys(_DEVICE_FILES, _READ | _WRITE_FILE | _TRUNCATE)
    grants[folder] = (1 << 16) - 1 & ~_DEVICES
    _restrict_files(grants, tcp=not limits.network, port=limits.port)
    network: command_calls.Network = "all" if limits.network else "port" if limits.port is not None else "none"
    own_user = limits.user is not None
    command_calls.install(own_user=own_user, signals=version >= 6, network=network, capabilities=capabilities)


def tasks_of_user() -> int:
    """Processes and threads that this process's user has on the machine."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if int(lines["Uid"].split()[0]) == os.getuid():
                count += int(lines["Threads"])
    return count


def landlock_version() -> int:
    """The version of Landlock that this kernel has; 0: none."""
    return max(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)), 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _limit(limits: Mapping[int, int]) -> None:
    for limit, requested in {**limits, resource.RLIMIT_CORE: 0}.items():
        hard = resource.getrlimit(limit)[1]
        allowed = requested if hard == resource.RLIM_INFINITY else min(requested, hard)
        resource.setrlimit(limit, (allowed, allowed))


def _restrict_files(grants: Mapping[str, int], *, tcp: bool = True, port: int | None = None) -> None:
    """Nothing but `grants` (path: rights) by Landlock, which also takes /proc of other processes and, in newer kernels,
    signals to them and, with `tcp`, connections away, but those to `port`."""
    version, libc = landlock_version(), _libc()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    fields = [rights, *([_NO_TCP * tcp] if version >= 4 else []), *([_NO_SIGNALS_OUT] if version >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if rules < 0:
        raise OSError(f"landlock_create_ruleset failed: {os.strerror(ctypes.get_errno())}")

    def add(kind: int, rule: bytes, what: str) -> None:
        if libc.syscall(_ADD_RULE, rules, kind, rule, ctypes.c_uint(0)) < 0:
            raise OSError(f"landlock_add_rule for {what} failed: {os.strerror(ctypes.get_errno())}")

    for path, granted in grants.items():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            of_kind = granted if os.path.isdir(path) else granted & _OF_FILES
            try:
                add(_PATH_BENEATH, struct.pack("=Qi", of_kind & rights, descriptor), path)
            finally:
                os.close(descriptor)
    if port is not None:
        add(_NET_PORT, struct.pack("QQ", _CONNECT_TCP, port), f"port {port}")
    # the kernel asks for no new privileges first; so does the filter
    libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)) < 0:
        raise OSError(f"landlock_restrict_self failed: {os.strerror(ctypes.get_errno())}")
    os.close(rules)
