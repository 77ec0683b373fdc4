"""A program in a response passes only by passing the tests, and can do nothing but compute while it tries."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.builtin.code_tests import extract_program
from megarl.rewards.sandbox import program as sandboxed_program
from megarl.rewards.sandbox import system_calls
from tests.rewards.sandboxed import landlock_version

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2"]
PAIRS = [{"input": "2\n", "output": "4\n"}, {"input": "-1", "output": "-2"}]


def _sample(code: str, tests: Any) -> Sample:
    return Sample(
        "s", "g", "train-0", [1], [], [], [], [], "stop", response_text=f"```python\n{code}\n```", row={"answer": tests}
    )


def _rewards(**args: Any) -> RewardSources:
    return build_rewards([RewardConfig(name="code_tests", args={"timeout_s": 2, **args})], DATA)


@pytest.fixture(scope="module")
def rewards() -> RewardSources:
    return _rewards(partial=True)


@pytest.mark.parametrize(
    ("code", "tests", "reward"),
    [
        ("def double(x): return 2 * x", ASSERTS, 1.0),
        ("def double(x): return 4", ASSERTS, 0.5),
        ("def double(x): return 4", '["assert double(2) == 4"]', 1.0),
        ("def double(x) return", ASSERTS, 0.0),
        ("print(2 * int(input()))", PAIRS, 1.0),
        ("print(2 * int(open(0).read()), '  ')", PAIRS, 1.0),
        ("print(4)", PAIRS, 0.5),
        ("print(2 * int(input())); raise SystemExit(1)", PAIRS, 0.0),
        ("def double(x): return 2 * x", "def check(f):\n    assert f(2) == 4\n\ncheck(double)", 1.0),
        ("def double(x): return 4", "def check(f):\n    assert f(5) == 10\n\ncheck(double)", 0.0),
        ("print(2 * int(input()))", {"inputs": ["2\n", "-1"], "outputs": ["4\n", "-2"]}, 1.0),
        ("print(4)", json.dumps({"inputs": ["2\n", "-1"], "outputs": ["4\n", "-2"]}), 0.5),
        ("print(4)", {"input": ["2\n", "-1"], "output": ["4\n", "-2"]}, 0.5),
        ("import threading\nt = threading.Thread(target=lambda: print(2 * int(input())))\nt.start()", PAIRS, 1.0),
    ],
)
def test_reward_is_the_fraction_of_passed_tests(rewards: RewardSources, code: str, tests: Any, reward: float) -> None:
    assert rewards.score([_sample(code, tests)]) == [reward]
    assert rewards.failures == {}


def test_without_partial_one_failed_test_is_0() -> None:
    samples = [_sample("def double(x): return 4", ASSERTS), _sample("print(4)", PAIRS), _sample("print(2*int(input()))", PAIRS)]
    assert _rewards().score(samples) == [0.0, 0.0, 1.0]


LEAVING = [
    "print('passed'); import sys; sys.exit(0)",
    "print('passed', flush=True); import os; os._exit(0)",
    "import atexit, os\natexit.register(lambda: os.write(3, b'passed 2'))\nraise SystemExit",
    "def double(x):\n    import os; os._exit(0)",
    "import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'0' * 64 + b' 2\\n')\n    except OSError: pass\nos._exit(0)",
    "import os\nos.lseek(0, 0, 0); found = os.read(0, 9999)\ndef double(x): return 2 * x if b'token' in found else None",
]


@pytest.mark.parametrize("code", LEAVING)
def test_leaving_early_or_printing_passes_nothing(rewards: RewardSources, code: str) -> None:
    assert rewards.score([_sample(code, ASSERTS)]) == [0.0]


REFUSED = {
    "write": "open('made', 'w')",
    "write_tmp": "open('/tmp/megarl_made', 'w')",
    "append": "open(__import__('sys').executable, 'ab')",
    "mkdir": "os.mkdir('made')",
    "unlink": "os.unlink('/tmp/megarl_nothing')",
    "rename": "os.rename('/tmp/a', '/tmp/b')",
    "chmod": "os.chmod('/tmp', 0o777)",
    "symlink": "os.symlink('/tmp', 'link')",
    "memfd": "os.memfd_create('x')",
    "socket": "__import__('socket').socket()",
    "unix_socket": "__import__('socket').socketpair()",
    "fork": "os.fork()",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "exec": "os.execv('/bin/true', ['true'])",
    "kill": "os.kill(os.getppid(), 0)",
    "setsid": "os.setsid()",
    "owner_of_signals": "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "which_signal": "fcntl.fcntl(0, 10, 9)",
    "signals_on_input": "fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC if hasattr(os, 'O_ASYNC') else 0x2000)",
    "signals_by_ioctl": "fcntl.ioctl(0, 0x5452, b'\\1\\0\\0\\0')",
    "file_attributes": "fcntl.ioctl(0, 0x40086602, b'\\0' * 8)",
    "lease": "fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "lock": "fcntl.flock(0, fcntl.LOCK_SH)",
    "shared_memory": "must(libc.shmget(0x6D656761, 10, 0o600))",
    "message_queue": "must(libc.msgget(0x6D656761, 0o600))",
    "semaphore": "must(libc.semget(0x6D656761, 1, 0o600))",
    "memory_policy": "must(libc.syscall(256, os.getppid(), 8, b'\\1' + b'\\0' * 7, b'\\1' + b'\\0' * 7))",
    "affinity": "os.sched_setaffinity(os.getppid(), {0})",
    "fifo": "os.mkfifo('pipe')",
    "raise_limit": "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1))",
    "nice": "os.setpriority(os.PRIO_PROCESS, 0, 19)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_system_calls_with_effects_outside_are_refused(rewards: RewardSources, name: str) -> None:
    """The program sees the refusal itself, so that it is not another failure that is taken for one."""
    code = (
        "import ctypes, fcntl, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def must(result):\n    if result < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        f"try: {REFUSED[name]}\n"
        "except (OSError, ValueError) as error: refused = type(error).__name__, str(error)"
    )
    tests = ["assert refused[0] == 'PermissionError' or 'not allowed' in refused[1], refused"]
    assert rewards.score([_sample(code, tests)]) == [1.0]


@pytest.mark.parametrize(
    "how", ["fcntl.fcntl(r, fcntl.F_SETOWN, parent); fcntl.fcntl(r, 10, 9)", "fcntl.ioctl(r, 0x8901, b'0000')"]
)
def test_no_signal_leaves_the_sandbox_by_way_of_a_pipe(rewards: RewardSources, how: str) -> None:
    """F_SETOWN, F_SETSIG and O_ASYNC on a pipe of its own ended the process that scores."""
    code = f"""
import fcntl, os
parent = os.getppid()
r, w = os.pipe()
for attempt in ({how!r}, "fcntl.fcntl(r, fcntl.F_SETFL, 0x2000)"):
    try: exec(attempt)
    except OSError: pass
os.write(w, b"x")
def double(x): return 2 * x
"""
    assert rewards.score([_sample(code, ASSERTS)]) == [1.0], "the process that scores is alive, and so is the program"


@pytest.mark.parametrize(
    "path", ["/proc/{parent}/environ", "/proc/{parent}/mem", "/proc/{parent}/fd/0", "/etc/passwd", "/proc/net/tcp"]
)
def test_files_of_others_cannot_be_read(rewards: RewardSources, path: str) -> None:
    assert is_refused(rewards, path)


def test_data_with_its_expected_answers_cannot_be_read(rewards: RewardSources, tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"tests": ["assert double(2) == 4"]}')
    assert is_refused(rewards, str(rows))


def is_refused(rewards: RewardSources, path: str) -> bool:
    """Whether a program is not allowed to read a file."""
    if not landlock_version():
        pytest.skip("this kernel has no Landlock, which keeps programs from reading")
    code = (
        f"import os\npath = {path!r}.format(parent=os.getppid())\n"
        "try: open(path, 'rb').read(1)\nexcept OSError as error: refused = error.errno"
    )
    return rewards.score([_sample(code, ["assert refused == 13"])]) == [1.0]


def test_what_programs_need_can_be_read(rewards: RewardSources) -> None:
    code = (
        "import zoneinfo, os, numpy\ndef double(x): return numpy.array(2 * x).item()\nopen('/dev/stdin').read(); os.listdir()"
    )
    assert rewards.score([_sample(code, ASSERTS)]) == [1.0]


def test_a_python_that_is_not_shut_in_is_told_apart(tmp_path: Path) -> None:
    """The same calls do work outside: the refusals above are the sandbox's."""
    program = "import os, socket\nopen('made', 'w').close(); os.mkdir('dir'); socket.socket().close(); os.kill(os.getpid(), 0)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "made"]


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal, time\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.close(1); os.close(2)\nwhile True: pass",
        "while True: print('x' * 10000)",
        "x = bytearray(10 << 30)\nprint(4)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "10 ** 10 ** 10",
    ],
)
def test_what_does_not_end_or_grows_is_ended_in_time(rewards: RewardSources, code: str) -> None:
    started = time.monotonic()
    assert rewards.score([_sample(code, PAIRS[:1]), _sample(code, ["assert double(1)"])]) == [0.0, 0.0]
    assert time.monotonic() - started < 15
    assert not _sandboxed_processes()


def test_more_endless_programs_than_the_deadline_holds_get_0_and_end_nothing() -> None:
    rewards = _rewards(timeout_s=3)
    samples = [_sample("while True: pass", ASSERTS) for _ in range(12)]
    assert rewards.score(samples, deadline_s=6) == [0.0] * 12
    assert not _sandboxed_processes()


THREADS = "import threading\n    [threading.Thread(target=work).start() for _ in 'ab']"


@pytest.mark.parametrize("endless", ["work()", THREADS])
def test_a_program_runs_out_of_time_once_and_not_once_per_input(rewards: RewardSources, endless: str) -> None:
    """With `partial` each of many inputs could cost its time: nothing is asked of a program that has had its own."""
    code = f"def work():\n    while True: pass\nif input() == 'hang':\n    {endless}\nprint(4)"
    tests = [{"input": given, "output": "4"} for given in ("1", "hang", "1", "hang", "1")]
    assert rewards.score([_sample(code, tests)]) == [0.2]


def test_texts_that_are_no_unicode_end_nothing(rewards: RewardSources) -> None:
    """Lone surrogates, which JSON may have, in an input, an output, a program and an assert statement; NUL in a program."""
    pairs = [{"input": "\ud800", "output": "4"}]
    samples = [
        _sample("print(4)", pairs),
        _sample("print(4)", json.dumps(pairs)),
        _sample("print(4)", [{"input": "", "output": "\ud800"}]),
        _sample("x = '\ud800'\nprint(4)", pairs),
        _sample("def double(x): return 4", ["assert double('\ud800') == 4"]),
        _sample("x = 1\0\nprint(4)", pairs),
    ]
    assert rewards.score(samples) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def _sandboxed_processes() -> list[str]:
    """Descendants of this process that still run the sandbox's program."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "program_child" in command:
                found.append(command)
    return found


def test_output_beyond_its_limit_ends_the_program_at_once() -> None:
    flood = [_sample("while True: print('x' * 10000)", PAIRS[:1])]
    started = time.monotonic()
    assert _rewards(timeout_s=30, output_kb=10).score(flood) == [0.0]
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("tests", ["", "[]", [], None, "assert (", ["assert ("], [3], [{"input": "1"}], ["assert 1", {}]])
def test_tests_that_are_none_are_counted_and_never_rewarded(tests: Any) -> None:
    rewards = _rewards()
    assert rewards.score([_sample("print(1)", tests)]) == [0.0]
    assert rewards.failures == {"train-0": 1}


def test_missing_tests_are_named() -> None:
    with pytest.raises(RewardError, match=r"reward 'code_tests': row train-0 has no key 'answer'"):
        _rewards().check([Prompt("train-0", "", [1], "q", {"anser": ASSERTS})])


def test_without_the_filter_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(sandboxed_program.__file__).parent
    for name in ("program_child.py", "confinement.py", "command_calls.py"):
        (tmp_path / name).write_text((folder / name).read_text())
    filter_text = (folder / "system_calls.py").read_text()
    (tmp_path / "system_calls.py").write_text(re.sub(r"_FILTER_MODE = 22, 38, 2", "_FILTER_MODE = 22, 38, 77", filter_text))
    monkeypatch.setattr(sandboxed_program, "__file__", str(tmp_path / "program.py"))
    with pytest.raises(RewardError, match=r"reward 'code_tests': programs of a model cannot be run safely .*PR_SET_SECCOMP"):
        _rewards()


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(OSError, match="no list of system calls for riscv64 machines, only for x86_64 and aarch64"):
        system_calls.instructions("riscv64")


def test_jumps_of_the_filter_stay_inside_and_no_call_is_listed_twice() -> None:
    for column, machine in enumerate(("x86_64", "aarch64")):
        program = system_calls.instructions(machine)
        ends = [place + 1 + max(yes, no) for place, (code, yes, no, _) in enumerate(program) if code & 7 == 5]
        assert max(ends) == len(program) - 1
        numbers = [pair[column] for pair in system_calls.ALLOWED.values() if pair[column] is not None]
        assert len(set(numbers)) == len(numbers)


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_system_calls_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed (linux-libc-dev)")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in defined} | {"newfstatat": 79 if machine == "aarch64" else 262}
    _, column = system_calls.MACHINES[machine]
    listed = {name: pair[column] for name, pair in system_calls.ALLOWED.items() if pair[column] is not None}
    assert listed == {name: numbers[name] for name in listed}


def test_last_python_block_is_the_program() -> None:
    assert extract_program("```python\na\n```\ntext\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert extract_program("```\na\n```\n```sh\nb\n```") == "a\n"
    assert extract_program("x = 1") == "x = 1"
    assert extract_program("```python\nx = 1\n") == "x = 1\n"
