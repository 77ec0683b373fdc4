"""The seccomp filter of the sandbox: which system calls a program that a model wrote may not make.

Imported by path from `sandbox_child.py`, so it imports nothing of megarl. A list of what is refused, not of what is allowed:
Python itself runs under it. Numbers per machine are those of Linux's syscall tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_COMMON = (*range(424, 435), 438, 440, 442, 447, 452, *range(463, 468))
"""Everywhere the same: pidfd_send_signal, io_uring, mounting, pidfd, process_madvise, memfd_secret, fchmodat2, xattrat."""

_X86_64 = (
    *(29, 64, 68, 240, 241),  # shmget, semget, msgget, mq_open, mq_unlink: what outlives a process
    *(*range(41, 51), 53, 54, 288, 299, 307),  # socket, connect, accept, send, receive, bind, listen, socketpair
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    *(62, 129, 200, 234, 297),  # kill, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo
    *(101, 310, 311, 312, 298, 321, 323),  # ptrace, process_vm_readv and _writev, kcmp, perf_event_open, bpf, userfaultfd
    *(76, 77, 285, 319),  # truncate, ftruncate, fallocate, memfd_create
    *(*range(82, 89), 258, 259, 263, 264, 265, 266, 316, 133),  # rename, mkdir, rmdir, creat, link, unlink, symlink, mknod
    *(*range(90, 95), 260, 268, 132, 235, 261, 280),  # chmod, chown, utime
    *(188, 189, 190, 197, 198, 199),  # setxattr, removexattr
    *(105, 106, 113, 114, 116, 117, 119, 109, 112),  # setuid and the like, setpgid, setsid
    *(141, 160, 203, 251, 302),  # setpriority, setrlimit, sched_setaffinity, ioprio_set, prlimit64
    *(135, 155, 161, 163, 165, 166, 167, 168, 169, 170, 171, 172, 173, 175, 176),  # personality, mount, reboot, modules
    *(159, 164, 227, 305, 246, 320, 313, 248, 249, 250),  # clocks, kexec, keys
    *(272, 308, 300, 303, 304),  # unshare, setns, fanotify_init, open_by_handle_at
)
_AARCH64 = (
    *(194, 190, 186, 180, 181),
    *(*range(198, 204), *range(206, 209), 210, 211, 212, 242, 243, 269),
    *(221, 281),
    *(129, 130, 131, 138, 240),
    *(117, 270, 271, 272, 241, 280, 282),
    *(45, 46, 47, 279),
    *(*range(33, 39), 276),
    *(*range(52, 56), 88),
    *(5, 6, 7, 14, 15, 16),
    *(143, 144, 145, 146, 147, 149, 159, 154, 157),
    *(140, 164, 122, 30, 261),
    *(92, 41, 51, 89, 40, 39, 224, 225, 142, 161, 162, 105, 106),
    *(171, 170, 112, 266, 104, 294, 273, 217, 218, 219),
    *(97, 268, 262, 264, 265),
)

# audit architecture, refused calls, clone, {open or openat: the argument with its flags}
_MACHINES = {
    "x86_64": (0xC000003E, _X86_64, 56, {2: 1, 257: 2}),
    "aarch64": (0xC00000B7, _AARCH64, 220, {56: 2}),
}
_CLONE3, _OPENAT2 = 435, 437
_CLONE_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
_X32 = 0x40000000  # x86_64 answers to a second set of numbers above this one

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as classic BPF: (code, jump if true, jump if false, operand) per instruction.

    Raises:
        OSError: the system calls of `machine` are not known here.
    """
    if machine not in _MACHINES:
        raise OSError(f"no list of system calls for {machine} machines, only for {' and '.join(_MACHINES)}")
    audit, refused, clone, opens = _MACHINES[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)]
    for number in (_CLONE3, _OPENAT2):  # their flags are behind a pointer; ENOSYS makes the C library use the older call
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in (*refused, *_COMMON):
        program += [(_EQUAL, 0, 1, number), refuse]
    # In the offsets of arguments: 16 bytes of header, then 8 per argument, the low half first on both machines.
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), (_HAS_BITS, 1, 0, _CLONE_THREAD), refuse, (_RETURN, 0, 0, _ALLOW)]
    for number, argument in opens.items():
        program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * argument), (_HAS_BITS, 0, 1, _WRITING), refuse]
        program += [(_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def install() -> None:
    """Put this process, for good, under the filter, without capabilities and without a way to new privileges.

    Raises:
        OSError: the kernel refuses, or lets through what the filter refuses; the message says which.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def must(what: str, result: int) -> None:
        if result != 0:
            raise OSError(f"{what} failed: {os.strerror(ctypes.get_errno())}")

    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(platform.machine()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    must("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    header, nothing = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    must("capset (giving up capabilities)", libc.capset(header, nothing))
    mode = ctypes.c_ulong(_FILTER_MODE)
    must("prctl(PR_SET_SECCOMP), the filter of system calls,", libc.prctl(_PR_SET_SECCOMP, mode, program))
    try:
        os.kill(os.getpid(), 0)
    except PermissionError:
        return
    raise OSError("the kernel took the filter of system calls (seccomp) and does not apply it")
