"""Commands in a sandbox do their work in its folder and reach nothing else; they end on time and leave nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.errors import EpisodeError
from megarl.options.sandboxes.containers import Container, apptainer, docker, found_container
from megarl.options.sandboxes.sandbox import CommandResult, Sandbox, Sandboxes, open_sandboxes
from megarl.options.sandboxes.section import SandboxConfig
from tests.rewards.sandboxed import landlock_version

SMALL: dict[str, Any] = {"memory_mb": 256, "processes": 16, "disk_mb": 8, "output_kb": 8, "timeout_s": 2}
IMAGE = os.environ.get("MEGARL_SANDBOX_IMAGE")
"""A Docker image with sh and python3 that is on this machine, for the tests in containers."""
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
pytestmark = [pytest.mark.slow, needs_landlock]


def ran(*commands: Any, row: dict[str, Any] | None = None, port: int | None = None, **settings: Any) -> list[CommandResult]:
    """The results of `commands` in one sandbox, which must leave nothing."""
    config = SandboxConfig(kind="seccomp", **{**SMALL, **settings})
    return in_sandbox(Sandboxes(config, None, port), *commands, row=row)


def in_sandbox(sandboxes: Sandboxes, *commands: Any, row: dict[str, Any] | None = None) -> list[CommandResult]:
    async def scenario() -> tuple[list[CommandResult], str]:
        async with sandboxes.opened(row or {}) as sandbox:
            return [await sandbox.run(*command) for command in map(_arguments, commands)], sandbox.folder

    try:
        results, folder = asyncio.run(scenario())
    finally:
        sandboxes.close()
    assert not Path(folder).exists()
    assert processes_in(folder) == []
    return results


def _arguments(command: Any) -> tuple[Any, ...]:
    return command if isinstance(command, tuple) else (command,)


def processes_in(folder: str) -> list[psutil.Process]:
    """Those whose environment names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME", "").startswith(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module", params=["seccomp", "docker"])
def kinds(request: pytest.FixtureRequest) -> Callable[..., Sandboxes]:
    """Makes sandboxes of a kind."""
    if request.param == "docker":
        if IMAGE is None:
            pytest.skip("MEGARL_SANDBOX_IMAGE names no image")
        return lambda **settings: open_sandboxes(SandboxConfig(kind="docker", image=IMAGE, **{**SMALL, **settings}), [])
    return lambda **settings: open_sandboxes(SandboxConfig(kind="seccomp", **{**SMALL, **settings}), [])


def test_files_stay_between_commands_and_nothing_else_does(kinds: Callable[..., Sandboxes], tmp_path: Path) -> None:
    (tmp_path / "given" / "src").mkdir(parents=True)
    (tmp_path / "given" / "src" / "a.txt").write_text("a file of the folder\n")
    row = {"files": {"tests/b.txt": "a file of the row\n"}}
    sandboxes = kinds(files=str(tmp_path / "given"), files_key="files", environment={"GIVEN": "yes"})
    results = in_sandbox(
        sandboxes,
        "cat src/a.txt tests/b.txt; echo $GIVEN; export LOST=yes; mkdir new; echo made > new/c.txt; chmod 700 new",
        "cat new/c.txt; echo ${LOST:-lost}; pwd | sed s/.*work/work/; echo wrong >&2; exit 3",
        (["python3", "-c", "print(input()[::-1])"], "olleh\n"),
        "cat src/a.txt > d.txt && rm src/a.txt && mv d.txt e.txt && wc -c < e.txt",
        ["no-such-program"],
        row=row,
    )
    assert results[0] == CommandResult(0, "a file of the folder\na file of the row\nyes\n", "")
    assert results[1] == CommandResult(3, "made\nlost\nwork\n", "wrong\n")
    assert results[2] == CommandResult(0, "hello\n", "")
    assert results[3] == CommandResult(0, "21\n", "")
    assert results[4].exit_code in (126, 127)
    assert (tmp_path / "given" / "src" / "a.txt").read_text() == "a file of the folder\n"


ENDLESS = {
    "sleeps": ("sleep 600", {"time"}),
    "computes": ("python3 -c 'while True: pass'", {"time"}),
    "ignores": ("trap '' TERM INT HUP; while :; do sleep 1; done", {"time"}),
    "floods": ("while :; do echo flood; echo flood >&2; done", {"output", "time"}),
    "floods_fast": ("yes", {"output"}),
    "eats": ("python3 -c 'x = [bytearray(1 << 20) for _ in range(4000)]'", {"memory", ""}),
    "eats_in_parts": (
        "for i in 1 2 3 4 5 6; do python3 -c 'x = b\"x\" * (100 << 20); import time; time.sleep(60)' & done; wait",
        {"memory", ""},
    ),
    "bomb": ("f() { f | f & }; f; sleep 60", {"time", "processes", ""}),
    "python_bomb": ("python3 -c '\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass'", {"time", "processes"}),
    "fills": ("dd if=/dev/zero of=big bs=1M count=100 2>/dev/null; sleep 60", {"disk"}),
    "fills_many": ("i=0; while :; do i=$((i+1)); : > f$i; done", {"disk", "time"}),
    "fills_deep": (
        'python3 -c \'\nimport os\nfor _ in range(3000):\n  os.mkdir("d" * 200); os.chdir("d" * 200)\'; sleep 60',
        {"disk"},
    ),
    "fills_hidden": (
        'python3 -c \'\nimport os, time\nfs = []\nfor n in range(8):\n  f = open("x", "wb"); os.unlink("x"); '
        'f.write(b"x" * (4 << 20)); f.flush(); fs.append(f)\ntime.sleep(60)\'',
        {"disk"},
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_or_grows_is_ended_and_leaves_nothing(name: str) -> None:
    command, ended_by = ENDLESS[name]
    started = time.monotonic()
    first, second = ran(command, "rm -rf ./*; echo alive")
    assert time.monotonic() - started < 60
    assert first.ended_by in ended_by
    assert first.ended_by or first.exit_code or name == "bomb"
    assert second.stdout == "alive\n" or name == "fills_deep"
    assert len(first.stdout) + len(first.stderr) <= 16 << 10


def test_output_is_cut_and_says_so() -> None:
    [result] = ran("head -c 100000 /dev/zero | tr '\\0' x")
    assert (result.exit_code, result.stdout, result.is_cut, result.ended_by) == (0, "x" * 8192, True, "")
    assert result.told().endswith("[the rest of the output was cut]")


@pytest.mark.parametrize(
    "command",
    [
        "(sleep 600 &) ; echo done",
        "setsid sleep 600 & echo done",
        "nohup sleep 600 > /dev/null 2>&1 & echo done",
        'python3 -c \'\nimport os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.execvp("sleep", ["sleep", "600"])\n\' ; echo done',  # noqa: E501
        'python3 -c \'\nimport os\nos.setpgid(0, 0)\nos.fork() or os.execvp("sleep", ["sleep", "600"])\'; echo done',
    ],
)
def test_no_process_outlives_its_command(command: str) -> None:
    async def scenario() -> None:
        sandboxes = Sandboxes(SandboxConfig(kind="seccomp", **SMALL), None)
        async with sandboxes.opened({}) as sandbox:
            result = await sandbox.run(command)
            assert result.stdout == "done\n"
            assert [p for p in processes_in(sandbox.folder) if p.status() != psutil.STATUS_ZOMBIE] == []
        sandboxes.close()

    asyncio.run(scenario())


OUTSIDE = {
    "shadow": "cat /etc/shadow",
    "home": "ls {home}",
    "repository": "cat {repository}/setup.py",
    "run_environment": "cat /proc/{parent}/environ",
    "run_memory": "head -c 1 /proc/{parent}/mem",
    "run_files": "ls /proc/{parent}/fd",
    "other_tmp": "cat {secret}",
    "link": "ln -s {secret} link; cat link",
    "link_to_folder": "ln -s {secret_folder} there; cat there/secret",
    "hard_link": "ln {secret} hard; cat hard",
    "rename": "mv {secret} here; cat here",
    "overwrite": "echo changed > {secret}",
    "write_by_link": "ln -s {secret} out; echo changed > out",
    "delete": "rm -f {secret}",
    "truncate": "python3 -c 'import os; os.truncate(\"{secret}\", 0)'",
    "truncate_by_opening": "python3 -c 'import os; os.open(\"{secret}\", os.O_RDONLY | os.O_TRUNC)'",
    "make": "touch {secret_folder}/made",
    "chroot": "chroot . /bin/sh",
    "namespace": "unshare -Ur id",
    "kill": "kill -9 {parent}",
    "kill_by_group": "kill -9 -{group}",
    "trace": "python3 -c 'import ctypes; l = ctypes.CDLL(None, use_errno=True); assert l.ptrace(16, {parent}, 0, 0) == 0'",
    "priority": "python3 -c 'import os; os.setpriority(os.PRIO_PROCESS, {parent}, 19)'",
    "affinity": "python3 -c 'import os; os.sched_setaffinity({parent}, [0])'",
    "root": "python3 -c 'import os; os.setuid(0)'",
    "device": "mknod disk b 8 0",
    "udp": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)'",
    "unix": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"/var/run/docker.sock\")'",
    "tcp": "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 3)'",
    "keyring": "python3 -c 'import ctypes; assert ctypes.CDLL(None).syscall(250, 0, -3, 0) > 0'",
    "shared_memory": "echo x > /dev/shm/megarl-attack",
    "parent_folder": "touch ../../made",
}


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_is_read_changed_or_reached(name: str, tmp_path: Path, listening: int) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    command = OUTSIDE[name]
    for field, value in {
        "home": Path.home(), "repository": Path.cwd(), "parent": os.getpid(), "group": os.getpgid(0), "port": listening,
        "secret_folder": tmp_path, "secret": secret,
    }.items():  # fmt: skip
        command = command.replace("{" + field + "}", str(value))
    before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    [result] = ran(command)
    assert result.exit_code != 0
    assert "the secret" not in result.stdout
    assert secret.read_text() == "the secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == before
    assert not Path("/dev/shm/megarl-attack").exists()


def test_the_same_attacks_work_outside(tmp_path: Path) -> None:
    """So the refusals above are the sandbox's."""
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    done = subprocess.run(
        ["sh", "-c", f"ln -s {secret} link; cat link; echo x > {tmp_path}/made"], cwd=tmp_path, stdout=-1, check=True
    )
    assert done.stdout == b"the secret"
    assert (tmp_path / "made").exists()


def test_one_port_is_all_that_an_agent_reaches(listening: int) -> None:
    connect = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {}), 3)'"
    with socket.create_server(("127.0.0.1", 0)) as other:
        allowed, refused = ran(connect.format(listening), connect.format(other.getsockname()[1]), port=listening)
    assert allowed.exit_code == 0
    assert "PermissionError" in refused.stderr
    [wide] = ran(connect.format(listening), network=True)
    assert wide.exit_code == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that another user may enter, unlike pytest's own, whose parents it would have to open too."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_times_and_modes_of_what_is_outside_stay_where_commands_have_the_run_s_user(open_folder: Path) -> None:
    """Landlock does not watch these, so under the user of the run they are answered and not made."""
    if shutil.which("setpriv") is None or os.geteuid():
        pytest.skip("needs root and setpriv, to run a keeper as another user")
    capabilities = "+dac_read_search"  # to find this Python wherever it is installed
    program = (
        "import asyncio, sys\nsys.path[:] = eval(sys.argv[1])\n"
        "from megarl.options.sandboxes.section import SandboxConfig\nfrom megarl.options.sandboxes.sandbox import Sandboxes\n"
        "async def main():\n"
        "    boxes = Sandboxes(SandboxConfig(kind='seccomp'), None)\n"
        "    async with boxes.opened({}) as box:\n"
        "        for command in sys.argv[2:]: print((await box.run(command)).exit_code)\n"
        "    boxes.close()\n"
        "asyncio.run(main())"
    )
    mine = open_folder / "mine"
    mine.write_text("")
    mine.chmod(0o640)
    os.chown(mine, 54321, 54321)
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", f"--inh-caps=-all,{capabilities}"]
    argv = [*user, f"--ambient-caps=-all,{capabilities}", sys.executable, "-c", program, repr(sys.path)]
    commands = [f"chmod 0 {mine}", f"touch -d 2001-01-01 {mine}", "kill -9 " + str(os.getpid()), "echo x > x; cat x"]
    done = subprocess.run([*argv, *commands], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "0", "1", "0"], done.stderr
    assert mine.stat().st_mode & 0o777 == 0o640
    assert mine.stat().st_mtime > 1.5e9


KILLED = """
import asyncio, os, sys
from megarl.options.sandboxes.section import SandboxConfig
from megarl.options.sandboxes.sandbox import Sandboxes

async def main():
    sandbox = await Sandboxes(SandboxConfig(kind="seccomp"), None).open({})
    print(sandbox.folder, flush=True)
    await sandbox.run("(setsid sleep 600 &); mkdir -p a/b; sleep 600", timeout_s=600)

asyncio.run(main())
"""


def test_a_killed_driver_leaves_no_process_and_no_folder() -> None:
    driver = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    folder = driver.stdout.readline().strip()
    until = time.monotonic() + 30
    while len(processes_in(folder)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(processes_in(folder)) >= 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    while (Path(folder).exists() or processes_in(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert processes_in(folder) == []


def _while_it_sleeps(act: Callable[[Sandbox, asyncio.Task[CommandResult]], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> str:
        sandboxes = Sandboxes(SandboxConfig(kind="seccomp"), None)
        sandbox = await sandboxes.open({})
        running = asyncio.create_task(sandbox.run("(setsid sleep 600 &); sleep 600", timeout_s=600))
        while len(processes_in(sandbox.folder)) < 2:
            await asyncio.sleep(0.05)
        await act(sandbox, running)
        sandboxes.close()
        return sandbox.folder

    folder = asyncio.run(scenario())
    assert not Path(folder).exists()
    assert processes_in(folder) == []


def test_closing_ends_a_command_that_runs() -> None:
    async def act(sandbox: Sandbox, running: asyncio.Task[CommandResult]) -> None:
        started = time.monotonic()
        await sandbox.close()
        assert time.monotonic() - started < 10
        assert (await running).exit_code == -signal.SIGKILL

    _while_it_sleeps(act)


def test_a_keeper_that_is_killed_is_one_error_and_leaves_nothing() -> None:
    async def act(sandbox: Sandbox, running: asyncio.Task[CommandResult]) -> None:
        assert sandbox._process.pid is not None
        os.kill(sandbox._process.pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="the process that keeps an episode's sandbox ended"):
            await running

    _while_it_sleeps(act)


def test_many_sandboxes_at_once_see_nothing_of_each_other() -> None:
    async def scenario() -> None:
        sandboxes = Sandboxes(SandboxConfig(kind="seccomp", at_once=4), None)

        async def one(number: int) -> str:
            async with sandboxes.opened({}) as sandbox:
                await sandbox.run(f"echo {number} > number")
                return (await sandbox.run("cat number; ls ../../ 2>/dev/null | grep -c sandbox; ls -A")).stdout

        assert await asyncio.gather(*map(one, range(12))) == [f"{number}\n0\nnumber\n" for number in range(12)]
        sandboxes.close()

    threads = threading.active_count()
    asyncio.run(scenario())
    assert threading.active_count() <= threads + 4


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"../x": "a"}, "a row has the file '../x', which is not inside the sandbox's folder"),
        ({"/etc/x": "a"}, "a row has the file '/etc/x', which is not inside the sandbox's folder"),
        (
            {"x": 3},
            r"a row's 'files' \(rollout.episode.sandbox.files_key\) is a dict; it must be an object whose keys",
        ),
        (None, r"a row's 'files' .* is a NoneType; it must be an object"),
        ({"x": "a" * (2 << 20)}, "the files that it begins with are more than its disk_mb"),
    ],
)
def test_files_of_a_row_are_checked(files: Any, sentence: str) -> None:
    with pytest.raises(EpisodeError, match=sentence):
        ran("true", row={"files": files}, files_key="files", disk_mb=1)


def test_what_a_command_prints_is_text_and_nothing_else() -> None:
    answer = json.dumps({"exit_code": 0, "stdout": "forged", "stderr": "", "ended_by": "", "is_cut": False, "problem": ""})
    everywhere = f"for n in 3 4 5 6 7 8 9; do eval \"echo '{answer}' >&$n\" 2>/dev/null; done"
    forged = f"{everywhere}; echo '{answer}'; printf '\\377\\000'; exit 4"
    [result] = ran(forged)
    assert (result.exit_code, result.stdout) == (4, answer + "\n\ufffd\x00")


def test_a_machine_without_the_kind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for kind in ("docker", "apptainer"):
        with pytest.raises(EpisodeError, match=f"rollout.episode.sandbox.kind is '{kind}', but there is no program '{kind}'"):
            found_container(SandboxConfig(kind=kind, image="x"))  # type: ignore[arg-type]
    assert found_container(SandboxConfig(kind="auto", image="x")) is None


BOX = """#!/bin/sh
echo "$@" >> {folder}/log
case $1 in
  run) shift 2; exec "$@" ;;
  after) [ -e {folder}/full ] && exit 1 ;;
esac
exit 0
"""


@pytest.mark.parametrize("is_full", [False, True])
def test_commands_run_in_a_container_that_is_cleared_after_each_and_removed(tmp_path: Path, is_full: bool) -> None:
    """A program in Docker's place: what is put before a command is filled in, and what is done when."""
    box = str(tmp_path / "box")
    Path(box).write_text(BOX.format(folder=tmp_path))
    Path(box).chmod(0o755)
    if is_full:
        (tmp_path / "full").touch()
    steps = {step: [box, step, "{name}"] for step in ("start", "after", "recover", "remove")}
    container = Container([box, "run", "{name}", "{environment}"], **steps)
    settings = SandboxConfig(kind="docker", image="x", **{**SMALL, "timeout_s": 1})
    first, second = in_sandbox(Sandboxes(settings, container), ["echo", "hi"], ["sleep", "600"])
    assert (first.stdout, second.ended_by) == ("hi\n", "time")
    after = ["after", "recover"] if is_full else ["after"]
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [line[0] for line in lines] == ["start", "run", *after, "run", *after, "remove"]
    assert len({line[1] for line in lines}) == 1


DOCKER = """
    docker run --detach --rm --pull never --name {name} --entrypoint '' --network none --memory 512m --memory-swap 512m
    --pids-limit 9 --cap-drop ALL --security-opt no-new-privileges --user {user} --read-only --tmpfs /tmp:rw,exec,size=7m
    --volume {work}:/work --workdir /work python:3.11 sh -c 'while :; do sleep 3600; done'
"""
APPTAINER = """
    apptainer --silent exec --containall --no-privs --no-home --bind {work}:/work --pwd /work --net --network none
    --memory 512M --pids-limit 9 --env HOME=/work {environment} python:3.11
"""


def test_command_lines_of_containers_close_the_network_and_set_every_limit() -> None:
    settings = SandboxConfig(kind="docker", image="python:3.11", memory_mb=512, processes=9, disk_mb=7)
    assert docker(settings).start == shlex.split(DOCKER)
    assert docker(settings).remove == ["docker", "rm", "--force", "{name}"]
    assert apptainer(settings).wrap == shlex.split(APPTAINER)
    wide = settings.model_copy(update={"network": True})
    assert "host" in docker(wide).start
    assert "--net" not in apptainer(wide).wrap


@pytest.mark.skipif(IMAGE is None, reason="MEGARL_SANDBOX_IMAGE names no image")
@pytest.mark.parametrize(
    ("command", "ended_by"),
    [
        ("sleep 600", "time"), ("(setsid sleep 600 &); echo done", ""), ("yes", "output"),
        ("dd if=/dev/zero of=big bs=1M count=100; sleep 60", "disk"),
        ("python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 22), 3)'", ""),
        ("echo x > /usr/x; cat /etc/shadow; kill -9 1; touch /x", ""),
        ("f() { f | f & }; f; sleep 60", "time"),
        ("python3 -c 'x = b\"x\" * (2 << 30)'", ""),
    ],
)  # fmt: skip
def test_docker_holds_the_same_limits(command: str, ended_by: str) -> None:
    sandboxes = open_sandboxes(SandboxConfig(kind="docker", image=IMAGE, **{**SMALL, "timeout_s": 8}), [])
    first, second = in_sandbox(sandboxes, command, "rm -f big; echo alive")
    assert first.ended_by == ended_by
    assert first.exit_code != 0 or first.stdout == "done\n"
    assert second.stdout == "alive\n"
    left = subprocess.run(["docker", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, check=True).stdout
    assert "megarl-sandbox" not in left
