"""What commands of an episode try to reach or to leave: the network, the system, the run, episodes beside and after it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.options.sandboxes.sandbox import CommandResult, Sandboxes
from megarl.options.sandboxes.section import SandboxConfig
from megarl.options.tools.sandbox_tools import SandboxTools
from tests.rewards.sandboxed import landlock_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock"),
]
SETTINGS: dict[str, Any] = {"memory_mb": 256, "processes": 16, "disk_mb": 8, "output_kb": 8, "timeout_s": 20}


def _call(number: int, *arguments: str) -> str:
    """A system call of x86_64 by its number, which must fail."""
    return f"import ctypes; assert ctypes.CDLL(None).syscall({', '.join([str(number), *arguments])}) >= 0"


def _socket(*of: int) -> str:
    return f"import socket; socket.socket({', '.join(map(str, of))})"


IN_PYTHON = {
    "a socket of netlink": _socket(16, 3, 0),
    "a socket of packets": _socket(17, 3, 0),
    "a socket of the kernel's ciphers": _socket(38, 5, 0),
    "a socket to the machine's host": _socket(40, 1, 0),
    "a raw socket of pings": _socket(2, 2, 1),
    "a socket of SCTP": _socket(2, 1, 132),
    "a socket of several paths": _socket(2, 1, 262),
    "an end of a pair that goes elsewhere": "import socket\na, b = socket.socketpair()\na.connect('/run/docker.sock')",
    "an address without a file": "import socket; socket.socket(socket.AF_UNIX).bind(b'\\0megarl-attack')",
    "listening for the next episode": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "data with the first packet": "import socket; socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', {port}))",
    "sockets that were inherited": "import os\nfor n in range(3, 200):\n  try: os.write(n, b'x')\n  except OSError: continue\n"
    "  break\nelse: raise SystemExit(1)",
    "a ring of requests": _call(425, "4", "b'\\0' * 256"),
    "a queue of messages": _call(240, "b'megarl'", "0o102", "0o666", "0"),
    "shared memory": _call(29, "0x4d454741", "4096", "0o1666"),
    "a key in the user's ring": _call(248, "b'user'", "b'k'", "b'v'", "1", "-4"),
    "a handle of the run": _call(434, "{run}", "0"),
    "memory of the run": _call(310, "{run}", "0", "0", "0", "0", "0"),
    "counters of the machine": _call(298, "b'\\0' * 128", "0", "-1", "-1", "0"),
    "a program of the kernel": _call(321, "0", "b'\\0' * 64", "64"),
    "faults in its own hands": _call(323, "1"),
    "a watch on others' folders": _call(254, _call(253).rpartition("assert ")[2].removesuffix(" >= 0"), "b'/tmp'", "0x100"),
    "a file by its handle": _call(304, "-100", "b'\\0' * 64", "0"),
    "a namespace of its own": _call(272, "0x10000000"),
    "another root": "import os; os.chroot('.')",
    "a higher priority": "import os; os.nice(-5)",
}
IN_SHELL = {
    "a connection of the shell's own": "exec 3<>/dev/tcp/127.0.0.1/{port}",
    "all processes": "ls /proc | grep '^[0-9]'",
    "words of the run": "cat /proc/{run}/cmdline",
    "the folder of the run": "cat /proc/{run}/cwd/setup.py",
    "the system through the run": "cat /proc/{run}/root/etc/shadow",
    "the keeper": "cat /proc/$PPID/environ; kill -9 $PPID",
    "never to be ended for memory": "echo -1000 > /proc/self/oom_score_adj",
    "settings of the kernel": "echo 1 > /proc/sys/vm/drop_caches",
    "keys of the machine": "cat /proc/keys",
    "connections of the machine": "cat /proc/net/tcp /proc/self/net/tcp",
    "limits lifted": "ulimit -v unlimited",
    "a group without limits": "mkdir /sys/fs/cgroup/megarl",
    "a file system of its own": "mount -t tmpfs x .",
    "another user by a program of root's": "timeout 5 su -c id < /dev/null",
    "the clock": "date -s 2020-01-01",
    "folders of all": "for d in /tmp /var/tmp /dev/shm /run/lock /run; do touch $d/megarl-attack && exit 0; done; false",
}
TRIES = {**{name: ["python3", "-c", text] for name, text in IN_PYTHON.items()}, **IN_SHELL}


def _sandboxes(**settings: Any) -> Sandboxes:
    return Sandboxes(SandboxConfig(kind="seccomp", **{**SETTINGS, **settings}), None)


@pytest.fixture(scope="module")
def tried() -> Iterator[dict[str, CommandResult]]:
    """All of it in one sandbox, before the eyes of a server that nobody may reach."""

    async def scenario(port: int) -> dict[str, CommandResult]:
        sandboxes = _sandboxes()
        results = {}
        async with sandboxes.opened({}) as sandbox:
            for name, command in TRIES.items():
                parts = [command] if isinstance(command, str) else command
                filled = [part.replace("{port}", str(port)).replace("{run}", str(os.getpid())) for part in parts]
                results[name] = await sandbox.run(filled[0] if isinstance(command, str) else filled)
            results["afterwards"] = await sandbox.run("echo alive")
        sandboxes.close()
        return results

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        yield asyncio.run(scenario(server.getsockname()[1]))
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("name", TRIES)
def test_a_command_reaches_nothing_beside_its_folder(name: str, tried: dict[str, CommandResult]) -> None:
    result = tried[name]
    assert (result.exit_code != 0, result.stdout, result.ended_by) == (True, result.stdout if name == "the clock" else "", "")
    assert tried["afterwards"].stdout == "alive\n"


BOMBS = {
    "memory": "python3 -c 'x = [bytearray(1 << 20) for _ in range(4000)]; import time; time.sleep(60)'",
    "processes": "python3 -c '\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
    "processes that leave": "python3 -c '\nimport os\nwhile True:\n  try:\n    if os.fork(): os._exit(0)\n"
    "  except OSError: pass'; sleep 60",
    "files": "i=0; while :; do i=$((i+1)); head -c 100000 /dev/zero > f$i; done",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_one_episode_ends_nothing_in_another_and_is_gone_for_the_next(name: str) -> None:
    """The episodes beside it have as many processes and as much memory as without it."""
    started = '[s.run(["echo", str(n)]).returncode for n in range(4)]'
    work = f"python3 -c 'import subprocess as s; print({started}, len(bytearray(100 << 20)))'"

    folders: list[str] = []

    async def scenario() -> tuple[CommandResult, list[CommandResult], CommandResult]:
        sandboxes = _sandboxes(timeout_s=6)
        async with sandboxes.opened({}) as bad, sandboxes.opened({}) as good:
            folders.extend([bad.folder, good.folder])
            bomb = asyncio.create_task(bad.run(BOMBS[name]))
            beside = [await good.run(work, timeout_s=60) for _ in range(2)]
            ended = await bomb
        async with sandboxes.opened({}) as after:
            folders.append(after.folder)
            following = await after.run("ls -A . $TMPDIR; " + work, timeout_s=60)
        sandboxes.close()
        return ended, beside, following

    bomb, beside, following = asyncio.run(scenario())
    assert bomb.ended_by or bomb.exit_code
    for result in (*beside, following):
        assert (result.exit_code, result.stdout.split("\n")[-2]) == (0, "[0, 0, 0, 0] 104857600")
    assert "f1" not in following.stdout
    assert not any(Path(folder).exists() for folder in folders)


def test_nothing_of_an_episode_is_there_for_another() -> None:
    """Each hides a file in all ways that it has; another one knows the place and does not get it."""

    async def scenario() -> list[CommandResult]:
        sandboxes = _sandboxes()
        async with sandboxes.opened({}) as first, sandboxes.opened({}) as second:
            folder = first.folder
            await first.run("echo secret > s; chmod 777 . .. s; mkfifo pipe; cp /bin/cat c; chmod 4777 c; (sleep 600 < pipe &)")
            looked = [
                await second.run(f"cat {folder}/work/s"),
                await second.run(f"{folder}/work/c {folder}/work/s"),
                await second.run(f"ln {folder}/work/s here; cp -r {folder}/work there; cat here there/s"),
                await second.run(f"echo changed > {folder}/work/s"),
                await second.run(f"echo x > {folder}/work/pipe", timeout_s=3),
                await second.run(f"rm -rf {folder}"),
            ]
            own = await first.run("cat s")
        sandboxes.close()
        return [*looked, own]

    *looked, own = asyncio.run(scenario())
    assert own.stdout == "secret\n"
    assert [(result.stdout, result.exit_code != 0) for result in looked] == [("", True)] * len(looked)


def test_a_command_is_not_slowed_by_what_the_one_before_it_left() -> None:
    async def scenario() -> list[float]:
        sandboxes = _sandboxes(disk_mb=64)
        took = []
        async with sandboxes.opened({}) as sandbox:
            for command in ("true", "for i in $(seq 200); do (sleep 300 &) ; mkdir -p d/$i; done 2>/dev/null; true", "true"):
                began = time.monotonic()
                await sandbox.run(command)
                took.append(time.monotonic() - began)
        sandboxes.close()
        return took

    first, _, after = asyncio.run(scenario())
    assert after < 5 + 4 * first


PATHS = {
    "options": ("-rf --help", "of its own"),
    "a command in its place": ("$(touch made)", "of its own"),
    "a quote and a command": ("a'; touch made; echo '", "of its own"),
    "new lines": ("a\nb/c", "of its own"),
    "a tilde": ("~/x", "of its own"),
    "up": ("../../../../etc/megarl-attack", "refused"),
    "another root": ("/etc/megarl-attack", "refused"),
    "the run's folder": (f"/proc/{os.getpid()}/cwd/megarl-attack", "refused"),
    "a device": ("/dev/tcp/127.0.0.1/22", "refused"),
    "a zero byte": ("a\0b", "refused"),
    "nothing": ("", "refused"),
    "too long": ("d/" * 3000, "refused"),
    "the keeper's answers": ("/proc/self/fd/1", "refused"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_of_a_policy_is_a_path_and_stays_in_the_folder(name: str) -> None:
    path, expected = PATHS[name]

    async def scenario() -> tuple[str, str, str]:
        tools = SandboxTools(["sandbox:write_file", "sandbox:read_file", "sandbox:bash"], _sandboxes())
        async with tools.begun({}) as call:
            wrote = await call("write_file", {"path": path, "content": "kept"})
            read = await call("read_file", {"path": path})
            made = await call("bash", {"command": "ls made 2>/dev/null; true"})
        tools.close()
        return wrote.told.text, read.told.text, made.told.text

    wrote, read, made = asyncio.run(scenario())
    assert made == "[no output]"
    assert (wrote == "[no output]", read == "kept") == ((True, True) if expected == "of its own" else (False, False)), (
        wrote,
        read,
    )
    assert not Path("/etc/megarl-attack").exists()


ARGUMENTS: dict[str, dict[str, Any]] = {
    "a number": {"command": 3},
    "a list": {"command": ["ls"]},
    "a limit of its own": {"command": "ls", "timeout_s": "9999"},
    "an environment of its own": {"command": "ls", "environment": "LD_PRELOAD=x"},
    "an input of its own": {"command": "ls", "stdin": "x"},
    "none": {},
    "another tool's": {"code": "print(1)"},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_a_tool_has_not_are_refused_before_anything_runs(name: str) -> None:
    async def scenario() -> str:
        tools = SandboxTools(["sandbox:bash"], _sandboxes())
        async with tools.begun({}) as call:
            answer = await call("bash", ARGUMENTS[name])
        tools.close()
        assert answer.failure == "tool_errors"
        return answer.told.text

    assert asyncio.run(scenario()) == "error: bash: it takes the texts command, no more and no less"
