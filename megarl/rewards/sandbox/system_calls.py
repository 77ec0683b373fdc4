"""The seccomp filters of the sandboxes: the system calls that code under one may make; every other one is refused.

`COMPUTE` is for a process that only computes. Commands that work in a folder have `command_calls.rules`.

Imported by path from the children, so it imports nothing of megarl. Numbers are those of Linux's system call tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Numbers = tuple[int | None, int | None]
"""Numbers of a system call on x86_64 and on aarch64; None: the machine has no such call."""

# name: number on x86_64, number on aarch64 (None: the machine has no such call)
ALLOWED: dict[str, Numbers] = {
    # files that are open, and looking at others
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68)},
    **{"preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57), "getdents64": (217, 61)},
    **{"stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439)},
    **{"readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50)},
    **{"umask": (95, 166), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59)},
    **{"poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "eventfd2": (290, 19)},
    **{"epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22)},
    # memory
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233)},
    **{"brk": (12, 214), "msync": (26, 227), "membarrier": (324, 283)},
    # signals that come, timers of this process
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136)},
    **{"rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None)},
    **{"alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128)},
    # threads
    **{"futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293)},
    **{"set_tid_address": (218, 96), "arch_prctl": (158, None), "sched_yield": (24, 124), "sched_getaffinity": (204, 123)},
    **{"sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "getcpu": (309, 168)},
    **{"sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126)},
    # time, and what this process and machine are
    **{"nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163)},
    **{"sysinfo": (99, 179), "uname": (63, 160), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173)},
    **{"getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158)},
    **{"getresuid": (118, 148), "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156)},
    **{"getpriority": (140, 141), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94)},
}

# audit architecture, column of the tables
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_READ_PERSONALITY = 0xFFFFFFFF  # a call with no effect that no rules allow
_X32 = 0x40000000  # x86_64 answers to a second set of numbers above this one
_NEW = 424  # from here on the numbers are the same everywhere, and C libraries have another way where the kernel is older

_REFUSE = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_UNKNOWN = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
_PASS = (_RETURN, 0, 0, _ALLOW)
_SUCCEED = (_RETURN, 0, 0, _ERRNO)

# Calls that do much or little by their arguments: (numbers, argument, values that are allowed).
COMMANDS: list[tuple[Numbers, int, tuple[int, ...]]] = [
    # fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN, F_SETSIG, leases, locks, seals, pipe sizes.
    ((72, 25), 1, (0, 1, 2, 3, 1030)),
    # ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not FIOASYNC, nor what changes a file's attributes.
    ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # prctl: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (names of memory areas, by malloc)
    ((157, 167), 0, (3, 15, 16, 0x53564D41)),
]
_FCNTL, _F_SETFL = (72, 25), 4
_OPEN, _OPENAT, _CLONE, _PRLIMIT = (2, None), (257, 56), (56, 220), (302, 261)
_CLONE_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
_O_ASYNC = 0x2000  # FASYNC, which the os module does not name everywhere

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class Rules:
    """System calls that a filter lets through. Each system call is in one of the fields at most."""

    allowed: Mapping[str, Numbers]
    values: Sequence[tuple[Numbers, Sequence[tuple[int, Sequence[int]]]]] = ()
    """Calls of which each (argument, values) must have one of the values."""
    without: Sequence[tuple[Numbers, int, int]] = ()
    """Calls of which an argument must have none of the bits."""
    only_with: Sequence[tuple[Numbers, int, int]] = ()
    """Calls of which an argument must have one of the bits."""
    pretended: Mapping[str, Numbers] = field(default_factory=dict)
    """Calls that are answered with success and do nothing."""


COMPUTE = Rules(
    ALLOWED,
    [(numbers, [(argument, values)]) for numbers, argument, values in COMMANDS],
    [(_OPEN, 1, _WRITING), (_OPENAT, 2, _WRITING)],
    [(_CLONE, 0, _CLONE_THREAD)],
)


def instructions(machine: str, rules: Rules = COMPUTE) -> list[Instruction]:
    """The filter as classic BPF: (code, jump if true, jump if false, operand) per instruction.

    Raises:
        OSError: the system calls of `machine` are not known here.
    """
    if machine not in MACHINES:
        raise OSError(f"no list of system calls for {machine} machines, only for {' and '.join(MACHINES)}")
    audit, column = MACHINES[machine]
    program: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)]
    for calls, answer in ((rules.allowed, _PASS), (rules.pretended, _SUCCEED)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [(_EQUAL, 0, 1, number), answer]

    def case(numbers: Numbers, body: list[Instruction]) -> None:
        """`body`, which must end in a return, for one call."""
        if (number := numbers[column]) is not None:
            program.extend([(_EQUAL, 0, len(body), number), *body])

    for numbers, argument, bits in rules.without:
        case(numbers, [_argument(argument), (_HAS_BITS, 0, 1, bits), _REFUSE, _PASS])
    for numbers, argument, bits in rules.only_with:
        case(numbers, [_argument(argument), (_HAS_BITS, 0, 1, bits), _PASS, _REFUSE])
    # prlimit64 of this process, with no new limits (a null pointer)
    prlimit = [(_EQUAL, 0, 4, 0), _argument(2), (_EQUAL, 0, 2, 0), _argument(2, high=True), (_EQUAL, 1, 0, 0), _REFUSE, _PASS]
    case(_PRLIMIT, [_argument(0), *prlimit])
    for numbers, conditions in rules.values:
        body: list[Instruction] = []
        for argument, values in conditions:
            others = [_REFUSE]
            if numbers == _FCNTL:  # other flags, but not that a signal comes
                others = [(_EQUAL, 1, 0, _F_SETFL), _REFUSE, _argument(2), (_HAS_BITS, 0, 1, _O_ASYNC), _REFUSE]
            body.append(_argument(argument))
            body += [(_EQUAL, len(values) - 1 - index + len(others), 0, value) for index, value in enumerate(values)]
            body += others
        case(numbers, [*body, _PASS])
    # openat2 and clone3 have their flags behind a pointer: they too are unknown, and the older call is made instead.
    return [*program, (_AT_LEAST, 0, 1, _NEW), _UNKNOWN, _REFUSE]


def _argument(number: int, *, high: bool = False) -> Instruction:
    """Load the low or high half of an argument. Both machines are little-endian; arguments follow a header of 16 bytes."""
    return (_LOAD, 0, 0, 16 + 8 * number + 4 * high)


def keep_capabilities(capabilities: int) -> None:
    """Give up all capabilities but these (bits below 32), for this process and the programs that it starts.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), struct.pack("3I12x", *[capabilities] * 3)
    _must("capset (giving up capabilities)", libc.capset(header, data))
    for bit in (bit for bit in range(32) if capabilities >> bit & 1):
        _must("prctl(PR_CAP_AMBIENT)", libc.prctl(_PR_CAP_AMBIENT, *map(ctypes.c_ulong, (_PR_CAP_AMBIENT_RAISE, bit, 0, 0))))


def install(rules: Rules = COMPUTE, *, capabilities: int = 0) -> None:
    """Put this process, for good, under the filter, with `capabilities` and no way to new ones.

    Raises:
        OSError: the kernel refuses, or lets through what the filter refuses; the message says which.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(platform.machine(), rules))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    _must("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    keep_capabilities(capabilities)
    mode = ctypes.c_ulong(_FILTER_MODE)
    _must("prctl(PR_SET_SECCOMP), the filter of system calls,", libc.prctl(_PR_SET_SECCOMP, mode, program))
    if libc.personality(ctypes.c_ulong(_READ_PERSONALITY)) != -1:
        raise OSError("the kernel took the filter of system calls (seccomp) and does not apply it")


def _must(what: str, result: int) -> None:
    if result != 0:
        raise OSError(f"{what} failed: {os.strerror(ctypes.get_errno())}")
