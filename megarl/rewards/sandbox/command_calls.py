"""The system calls of commands that work in a folder: they start programs and change files, which Landlock keeps in the folder.

Imported by path from the children, so it imports nothing of megarl.
"""

from __future__ import annotations

from typing import Literal

import system_calls
from system_calls import ALLOWED, COMMANDS, Numbers, Rules

Network = Literal["none", "port", "all"]
"""`port`: TCP to the one port that Landlock lets through."""

_FURTHER: dict[str, Numbers] = {
    # programs and their ends
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "wait4": (61, 260), "waitid": (247, 95)},
    **{"setrlimit": (160, 164)},
    # files, in the folders that Landlock allows
    **{"open": (2, None), "openat": (257, 56), "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34)},
    **{"rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38)},
    **{"renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    **{"ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "flock": (73, 32)},
    **{"fadvise64": (221, 223), "copy_file_range": (326, 285), "sendfile": (40, 71), "getxattr": (191, 8)},
    **{"lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12)},
    # pairs of sockets inside the process
    **{"socketpair": (53, 199), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210)},
    **{"getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209)},
}
_OF_OWNERS: dict[str, Numbers] = {
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88), "utimes": (235, None)},
    **{"utime": (132, None), "futimesat": (261, None)},
}
"""Landlock does not watch these: allowed to a user of the sandbox's own, who owns nothing else."""
_TRUNCATE: dict[str, Numbers] = {"truncate": (76, 45)}
_SIGNALS: dict[str, Numbers] = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_IN_GROUP: dict[str, Numbers] = {"setsid": (112, 157), "setpgid": (109, 154)}
"""Whatever a command starts stays in its process group, by which it is ended. Programs that want another one go on without."""
_SERVERS: dict[str, Numbers] = {"bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242)}

_FCNTL, _PRCTL = (72, 25), (157, 167)
_LOCKS = (5, 6, 7, 36, 37, 38)
_PRCTL_FURTHER = (1, 23, 38, 39)  # PR_SET_PDEATHSIG, PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS
_CLONE: Numbers = (56, 220)
_NAMESPACES = 0x7E020000
_SENDTO, _SENDMSG, _FAST_OPEN = (44, 206), (46, 211), 0x20000000
"""Data that goes out with a connection, which Landlock would not see."""
_SOCKET, _CONNECT = (41, 198), (42, 203)
_INET, _NETLINK = (2, 10), 16
_STREAM = (1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800)
_DATAGRAM = tuple(kind + 1 for kind in _STREAM)


def rules(*, own_user: bool, signals: bool, network: Network) -> Rules:
    """System calls that a command may ask of the kernel.

    Args:
        own_user: its user owns nothing but its folder.
        signals: they cannot reach other processes of its user.
        network: what it may reach.
    """
    allowed = {**ALLOWED, **_FURTHER}
    pretended = dict(_IN_GROUP)
    (allowed if own_user else pretended).update(_OF_OWNERS)
    if own_user:
        allowed |= _TRUNCATE
    if own_user or signals:
        allowed |= _SIGNALS
    values = []
    for numbers, argument, usual in COMMANDS:
        further = {_FCNTL: _LOCKS, _PRCTL: _PRCTL_FURTHER}.get(numbers, ())
        values.append((numbers, [(argument, (*usual, *further))]))
    if network == "all":
        allowed |= {"connect": _CONNECT, **_SERVERS}
        values.append((_SOCKET, [(0, (*_INET, _NETLINK)), (1, (*_STREAM, *_DATAGRAM, 3, 3 | 0x80000))]))
    if network == "port":
        allowed |= {"connect": _CONNECT}
        values.append((_SOCKET, [(0, _INET), (1, _STREAM), (2, (0, 6))]))
    return Rules(
        allowed,
        values,
        without=[(_CLONE, 0, _NAMESPACES), (_SENDTO, 3, _FAST_OPEN), (_SENDMSG, 2, _FAST_OPEN)],
        pretended=pretended,
    )


def install(*, own_user: bool, signals: bool, network: Network, capabilities: int = 0) -> None:
    """Put this process and all that it starts under these rules; raises as `system_calls.install`."""
    system_calls.install(rules(own_user=own_user, signals=signals, network=network), capabilities=capabilities)
