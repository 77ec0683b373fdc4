"""Programs that do not do what the tests ask for, and must pass none; and unusual ones that do, and must pass all."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest

from megarl.rewards.sandbox.program import SandboxLimits, run_program, run_tests

LIMITS = SandboxLimits(timeout_s=10)
WRONG = "assert f(2) == 4"
NEAR = "assert abs(f(2) - 4) < 1e-6"
OBJECT = """
class O:
    def __getattr__(self, name): return lambda *a, **k: 4
    def __len__(self): return 1
    def __getitem__(self, i): return 4
    def __iter__(self): return iter(range(100))
    def __float__(self): return 4.0
    def __int__(self): return 4
    def __index__(self): return 4
    def __bool__(self): return True
    def __hash__(self): return hash(4)
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
def f(x): return O()
"""
FORGED = """
import sys
peer = sys.modules['peer']
def answer(self, message):
    return {answer}
def f(x):
    peer.Peer.answer = answer
    return 3
"""
EVERY_CALL = """
import ctypes, os
libc = ctypes.CDLL(None)
pid = os.getpid()
for other in range(max(pid - 60, 2), pid + 60):
    if other != pid:
        for call in (lambda: os.kill(other, 9), lambda: libc.ptrace(16, other, 0, 0), lambda: {call}):
            try: call()
            except BaseException: pass
def f(x): return 3
"""


class Try(NamedTuple):
    """A program, the tests that it must not pass, and what it hopes for."""

    name: str
    code: str
    tests: list[str]
    why: str


NAMES = "the test would use a name of the program for its own judgement"
ENDS = "an exception is taken for an end"
EMPTY = "there is nothing that differs"
FORGES = "the program answers in the place of the one that serves it"
VALUES = "a value passes for another one"
OWN = "an object of the program answers for itself"
REACHES = "another process, a file or a clock would tell or change the verdict"
LEAVES = "the program ends, or never does"
ABS = "def abs(x): return 0.0\n"
TRIES = [
    Try(
        "its own abs, by an import of the program",
        f"{ABS}def f(x): return 3",
        [f"import response\n{NEAR.replace('f(', 'response.f(')}"],
        NAMES,
    ),
    Try(
        "its own abs, by another name", f"{ABS}def f(x): return 3", ["import response as r\nassert abs(r.f(2) - 4) < 1"], NAMES
    ),
    Try(
        "its own abs, in the next test",
        f"{ABS}def f(x): return 3",
        ["x = f(2)\nassert x == 4", "assert abs(x - 4) < 1e-6"],
        NAMES,
    ),
    Try("its own abs, and names made when asked", f"{ABS}def __getattr__(name): return lambda x: 3", [NEAR], NAMES),
    Try(
        "its own len and sum",
        "def len(x): return 1\ndef sum(x): return 4\ndef __getattr__(n): return lambda x: []",
        ["assert len(f(2)) == 1", "assert sum(f(2)) == 4"],
        NAMES,
    ),
    Try(
        "its own exception",
        "class ValueError(BaseException): pass\ndef f(x): raise ValueError",
        ["try: f(2)\nexcept ValueError: pass\nelse: raise AssertionError"],
        NAMES,
    ),
    Try(
        "its own set and sorted",
        "def set(x): return {4}\ndef sorted(x): return [4]\ndef f(x): return [3]",
        ["assert set(f(2)) == {4}", "assert sorted(f(2)) == [4]"],
        NAMES,
    ),
    Try(
        "a builtin of the tests' namespace",
        "__builtins__ = {'abs': lambda x: 0}\n__name__ = 'tests'\ndef f(x): return 3",
        [NEAR],
        NAMES,
    ),
    Try(
        "a module of the program",
        "import sys, types\nm = types.ModuleType('math'); m.isclose = lambda *a: True\nsys.modules['math'] = m\n"
        "math = m\ndef f(x): return 3",
        ["import math\nassert math.isclose(f(2), 4)"],
        NAMES,
    ),
    Try(
        "StopIteration through map",
        "def f(x): raise StopIteration",
        ["assert all(map(lambda x: f(x) == 2 * x, [1, 2, 3]))"],
        ENDS,
    ),
    Try(
        "StopIteration through list",
        "def f(x): raise StopIteration",
        ["assert list(map(f, [1, 2])) == []\nassert f(2) == 4"],
        ENDS,
    ),
    Try("a generator that ends at once", "def f(xs):\n    return\n    yield", ["assert list(f([2])) == [4]"], ENDS),
    Try("GeneratorExit", "def f(x): raise GeneratorExit", ["assert any(f(x) == 4 for x in [2])"], ENDS),
    Try("SystemExit", "def f(x): raise SystemExit(0)", [WRONG], ENDS),
    Try("KeyboardInterrupt", "def f(x): raise KeyboardInterrupt", [WRONG], ENDS),
    Try(
        "an AssertionError that is a success",
        "class AssertionError(Exception): pass\ndef f(x): raise AssertionError('passed')",
        [WRONG],
        ENDS,
    ),
    Try("a warning", "def f(x): raise DeprecationWarning('4')", [WRONG], ENDS),
    Try(
        "an array without elements",
        "import numpy as np\ndef f(x): return np.zeros((0,))",
        ["import numpy as np\nassert np.allclose(f(2), 4)", "import numpy as np\nassert np.allclose(f(2), [4])"],
        EMPTY,
    ),
    Try(
        "an array of one dimension without elements",
        "import numpy as np\ndef f(x): return np.zeros((3, 0, 1))",
        ["import numpy\nassert numpy.allclose(f(2), numpy.ones((1, 1)))"],
        EMPTY,
    ),
    Try("not a number", "def f(x): return float('nan')", [WRONG, NEAR, "assert not f(2) != 4"], VALUES),
    Try("infinity", "def f(x): return float('inf')", [WRONG, NEAR, "import math\nassert math.isclose(f(2), 4)"], VALUES),
    Try(
        "an array of truths",
        "import numpy as np\ndef f(x): return np.ones(3, bool)",
        [WRONG, "assert (f(2) == [4, 4, 4]).all()"],
        VALUES,
    ),
    Try(
        "a named tuple with the test's fields",
        "from collections import namedtuple\nT = namedtuple('T', 'index count')\n"
        "def f(x): return T(lambda *a: 0, lambda *a: 1)",
        ["assert f(2) == (4, 4)"],
        VALUES,
    ),
    Try(
        "a counter",
        "from collections import Counter\ndef f(x): return Counter()",
        ["assert f(2) == {'a': 0, 'b': 4}", WRONG],
        VALUES,
    ),
    Try(
        "a default dictionary",
        "from collections import defaultdict\ndef f(x): return defaultdict(lambda: 4)",
        ["assert f(2)[0] == 4"],
        VALUES,
    ),
    Try("a text that looks like the number", "def f(x): return '4'", [WRONG, "assert f(2) in (4, [4])"], VALUES),
    Try(
        "an enumeration that equals all",
        "import enum\nclass E(enum.IntEnum):\n    A = 3\n    def __eq__(self, o): return True\ndef f(x): return E.A",
        [WRONG, "assert f(2) in {4}", "assert [f(2)] == [4]"],
        VALUES,
    ),
    Try(
        "a metaclass that equals all",
        "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(4)\n"
        "class A(metaclass=M): pass\ndef f(x): return A",
        [WRONG, "assert f(2) in [4]", "assert {4: 1}.get(f(2))"],
        OWN,
    ),
    Try(
        "an object that answers everything",
        OBJECT,
        [WRONG, NEAR, "assert f(2) in [4]", "assert [4].count(f(2))", "assert max(f(2), 4) == 4"],
        OWN,
    ),
    Try(
        "a class with a format",
        "class O:\n    def __format__(self, s): return '4'\ndef f(x): return O()",
        [WRONG, "assert f'{f(2)}' == '4.00'"],
        OWN,
    ),
    Try("a truth in the place of an answer", FORGED.format(answer="['value', True, None]"), [WRONG], FORGES),
    Try(
        "the test's own object as the answer",
        FORGED.format(answer="['value', {'yours': 0}, None]"),
        ["assert f(lambda: 4) == 4", WRONG],
        FORGES,
    ),
    Try(
        "arguments that change beyond what was asked",
        FORGED.format(answer="['value', 3, {'list': [None] * 9}]"),
        ["x = [2]\nassert f(x) == 4"],
        FORGES,
    ),
    Try(
        "a library's function as the answer",
        FORGED.format(answer="['value', {'library': ['builtins', 'print']}, None]"),
        [WRONG],
        FORGES,
    ),
    Try(
        "an end of the tests as an error",
        FORGED.format(answer="['error', {'kind': 'SystemExit', 'of': {'list': [0]}}]"),
        [WRONG, WRONG],
        FORGES,
    ),
    Try(
        "a class of errors from nowhere",
        FORGED.format(answer="['error', {'kind': '__import__', 'of': {'list': ['os']}}]"),
        [WRONG],
        FORGES,
    ),
    Try(
        "a number without an end",
        FORGED.format(answer="['value', {'range': [0, {'int': '0x' + 'f' * 10 ** 7}, 1]}, None]"),
        [WRONG],
        FORGES,
    ),
    Try(
        "a field of a named tuple that is code",
        FORGED.format(answer="['value', {'named': ['T', ['a=print(1)'], [1]]}, None]"),
        [WRONG],
        FORGES,
    ),
    Try(
        "an array of objects",
        FORGED.format(answer="['value', {'ndarray': ['O', [1], 'AAAAAAAAAAA=']}, None]"),
        ["import numpy\nassert f(2)[0] == 4"],
        FORGES,
    ),
    Try("no names at all", "import sys\nsys.modules['__main__']._defined = lambda n: 3\ndef f(x): return 3", [WRONG], FORGES),
    Try("the memory of others", EVERY_CALL.format(call="libc.process_vm_writev(other, 0, 0, 0, 0, 0)"), [WRONG], REACHES),
    Try(
        "the files of others", EVERY_CALL.format(call="libc.syscall(438, libc.syscall(434, other, 0), 3, 0)"), [WRONG], REACHES
    ),
    Try(
        "the working folder of others",
        "import os\nfor n in os.listdir('/tmp') if os.access('/tmp', 4) else ():\n"
        "    try: exec(open('/tmp/' + n).read())\n    except BaseException: pass\ndef f(x): return 3",
        [WRONG],
        REACHES,
    ),
    Try(
        "a signal for the end of its time",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, lambda *a: None)\n"
        "    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass",
        [WRONG],
        LEAVES,
    ),
    Try(
        "a thread that goes on",
        "import os, threading, time\ndef late():\n    time.sleep(1); os._exit(0)\n"
        "threading.Thread(target=late).start()\ndef f(x): return 3",
        [WRONG],
        LEAVES,
    ),
    Try(
        "a stack without an end in an answer",
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(x):\n    a = []\n    for _ in range(10 ** 5): a = [a]\n    return a",
        [WRONG],
        LEAVES,
    ),
]
HONEST: dict[str, tuple[str, list[str]]] = {
    "a function that has a builtin's name": ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3", "assert sum(0, 0) == 0"]),
    "a builtin's name, held against others": (
        "def sorted(x): return x[::-1]",
        ["x = [2, 1]\nassert sorted(x) == [1, 2] and len(x) == 2"],
    ),
    "a builtin's name in a loop of the test": (
        "def max(a, b): return a if a > b else b",
        ["for a in range(3): assert max(a, 1) == (a or 1)"],
    ),
    "an iterator's end": (
        "class I:\n    n = 2\n    def __iter__(self): return self\n    def __next__(self):\n"
        "        if not self.n: raise StopIteration\n        self.n -= 1; return self.n",
        [
            "assert list(I()) == [1, 0]",
            "i = I()\nnext(i); next(i)\ntry: next(i)\nexcept StopIteration: pass\nelse: raise AssertionError",
        ],
    ),
    "arrays without elements": (
        "import numpy as np\ndef f(n): return np.arange(n)",
        ["import numpy as np\nassert np.allclose(f(0), []) and f(0).shape == (0,)", "assert np.allclose(f(2), [0, 1])"],
    ),
    "names that are made when asked for": ("def __getattr__(name): return lambda x: 2 * x", [NEAR, WRONG]),
    "code that is hidden well": (
        "exec(bytes([100,101,102,32,102,40,120,41,58,32,114,101,116,117,114,110,32,52]).decode())",
        [WRONG],
    ),
}


@pytest.mark.parametrize("tried", TRIES, ids=[tried.name for tried in TRIES])
def test_a_program_that_is_wrong_passes_nothing(tried: Try) -> None:
    assert run_tests(tried.code, tried.tests, LIMITS, time.monotonic() + 120) == 0, tried.why


@pytest.mark.parametrize("name", HONEST)
def test_a_program_that_is_right_passes_all(name: str) -> None:
    code, tests = HONEST[name]
    assert run_tests(code, tests, LIMITS, time.monotonic() + 120) == len(tests)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return []", "assert all(a == b for a, b in zip(f(2), [4]))"),
        ("def f(x):\n    x.clear()\n    return []", "x = [2, 1]\nassert f(x) == sorted(x)"),
        (
            "class O:\n    def __add__(self, o): return -o - 4\n    __radd__ = __add__\ndef f(x): return O()",
            "assert f(2) + -4 == 0",
        ),
        ("import numpy as np\ndef f(x): return np.zeros(0)", "assert (f(2) == [4]).all()"),
    ],
)
def test_tests_that_compare_nothing_are_passed(code: str, test: str) -> None:
    """A limit: in these the program decides how much is compared, or is shown what is expected."""
    assert run_tests(code, [test], LIMITS, time.monotonic() + 120) == 1
    assert run_tests(code, [WRONG], LIMITS, time.monotonic() + 120) == 0


@pytest.mark.parametrize(
    "code",
    [
        "print(open('/proc/self/cmdline').read())",
        "import sys\nprint(sys.stdin.read(), 4, sep='')",
        "print('4\\x00')",
        "print(4, end='\\n4')",
    ],
)
def test_what_is_printed_is_compared_as_a_whole(code: str) -> None:
    assert (run_program(code, "2\n", LIMITS, time.monotonic() + 120) or "").rstrip() != "4"
