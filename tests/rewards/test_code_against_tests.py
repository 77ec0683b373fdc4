"""A program's assert statements are judged where the program is not: what it may do to pass, and what tests may do to it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megarl.rewards.sandbox.program import SandboxLimits, run_tests

LIMITS = SandboxLimits(timeout_s=8)


def passed(code: str, *tests: str) -> int:
    return run_tests(code, tests, LIMITS, time.monotonic() + 60)


EVIL = """
class Evil:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return self if other.__class__ is Evil else 0.0
    __rsub__ = __mod__ = __truediv__ = __sub__
    def __abs__(self): return 0.0
    def __hash__(self): return 0
    def __instancecheck__(self, other): return True
"""
WRONG = "assert f(2) == 4"
EVIL_F = EVIL + "def f(x): return Evil()"
LIST = """
class L(list):
    def __eq__(self, other): return True
def f(x): return L()
"""
NUMBER = """
class I(int):
    def __eq__(self, other): return True
def f(x): return I(1)
"""
BUILTINS = """
import builtins
for name in ('abs', 'sorted', 'all', 'any', 'len', 'isinstance', 'round'):
    setattr(builtins, name, lambda *a, **k: True)
    globals()[name] = lambda *a, **k: True
def f(x): return 3
"""
LIBRARIES = """
import math
math.isclose = lambda *a, **k: True
class np: allclose = math.isclose
from builtins import max as isclose
def f(x): return 3.0
"""
FRAMES = """
import gc, re, sys
secret = re.compile('secret-[0-9]+')
def f(x):
    found = gc.get_objects()
    frame = sys._getframe()
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for value in found:
        if isinstance(value, (str, list, dict)) and len(value) < 99:
            match = secret.search(repr(value))
            if match: return match[0]
"""
MEMORY = """
import re
secret = re.compile(b'secret-[0-9]+')
def f(x):
    with open('/proc/self/mem', 'rb', 0) as memory:
        for line in open('/proc/self/maps'):
            start, end = (int(part, 16) for part in line.split()[0].split('-'))
            try:
                memory.seek(start)
                match = secret.search(memory.read(end - start))
                if match: return match[0].decode()
            except OSError: pass
"""
VERDICT = r"""
import os
for end in range(1, 4096):
    for text in (b'1\n', b'\x03\0\0\0[1]', b'ready\n500000000\n'):
        try: os.write(end, text)
        except OSError: pass
def f(x): return 3
"""
MESSAGES = """
import os, struct
TEXTS = '["value",true,null]', '["call",{"list":[]}]', '["error",{"kind":"exit","of":{"list":[]}}]', '{}', '[]'
def f(x):
    for text in TEXTS:
        for end in range(1, 4096):
            try: os.write(end, struct.pack('<I', len(text)) + text.encode())
            except OSError: pass
    return 3
"""
CALLBACK = """
def f(g):
    for name in ('__globals__', '__code__', '__closure__', 'gi_frame', '__self__', 'secret'):
        try:
            if getattr(g, name) is not None: return 4
        except Exception: pass
    return 3
"""
ATTACKS: dict[str, tuple[str, list[str]]] = {
    "equals everything": (EVIL_F, [WRONG, "assert 4 == f(2)", "assert [f(2)] == [4]"]),
    "is below everything": (EVIL_F, ["assert abs(f(2) - 4) < 1e-6", "assert f(2) < 5"]),
    "contains everything": (EVIL_F, ["assert 4 in f(2)", "assert {4: 1}[f(2)]"]),
    "a list that equals everything": (LIST, ["assert f(2) == [4]"]),
    "a number that equals everything": (NUMBER, [WRONG]),
    "replaces builtins": (
        BUILTINS,
        [
            "assert abs(f(2) - 4) < 1e-6",
            "assert sorted([f(2)]) == [4]",
            "assert all([f(2) == 4])",
            "assert isinstance(f(2), str)",
        ],
    ),
    "replaces libraries": (
        LIBRARIES,
        [
            "import math\nassert math.isclose(f(2), 4)",
            "assert math.isclose(f(2), 4)",
            "assert isclose(f(2), 4) is True",
            "from math import isclose\nassert isclose(f(2), 4)",
            "import numpy as np\nassert np.allclose(f(2), 4)",
            "assert np.allclose(f(2), 4)",
        ],
    ),
    "looks for the tests": (FRAMES, ["assert f(2) == 'secret-4711'"]),
    "looks into memory": (MEMORY, ["assert f(2) == 'secret-4711'"]),
    "writes a verdict": (VERDICT, [WRONG]),
    "answers what was not asked": (MESSAGES, [WRONG]),
    "reaches the tests through a callback": (CALLBACK, ["g = lambda x: x\ng.secret = 1\nassert f(g) == 4"]),
    "an answer like mock's ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", [WRONG]),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_but_the_right_answer_passes(name: str) -> None:
    code, tests = ATTACKS[name]
    assert passed(code, *tests) == 0


POINT = """
class P:
    total = 0
    def __init__(self, x): self.x = x
    def __add__(self, o): return P(self.x + o.x)
    def __eq__(self, o): return self.x == o.x
    def __mul__(self, n): return P(self.x * n)
    def __len__(self): return self.x
    def __getitem__(self, i): return [self.x][i]
    def __lt__(self, o): return self.x < o.x
    def __repr__(self): return f'P({self.x})'
    def double(self): self.x *= 2; return self
def make(n): return [P(i) for i in range(n)]
"""
KINDS = """
import collections, dataclasses, enum
N = collections.namedtuple('N', 'x y')
@dataclasses.dataclass
class D:
    x: int
class E(enum.Enum):
    A = 1
    B = 2
def f(): return N(1, 2)
def g(): return D(3)
def h(): return E.A
"""
RIGHT: dict[str, tuple[str, list[str]]] = {
    "plain values": (
        "def f(x): return x",
        [
            f"assert f({value}) == {value} and type(f({value})) is type({value})"
            for value in (
                "1",
                "10 ** 400",
                "-2.5",
                "'a\\ud800'",
                "[1, (2, {3: {4}})]",
                "b'x'",
                "1 + 2j",
                "None",
                "True",
                "range(3)",
            )
        ],
    ),
    "library values": (
        "def f(x): return x",
        [
            "from collections import Counter, deque\nassert f(Counter('aab'))['a'] == 2 and f(deque([1])) == deque([1])",
            "from fractions import Fraction\nassert f(Fraction(1, 3)) * 3 == 1",
            "from decimal import Decimal\nassert f(Decimal('1.1')) + f(Decimal('2.2')) == Decimal('3.3')",
            "import datetime\nassert f(datetime.date(2024, 2, 28)) + datetime.timedelta(2) == datetime.date(2024, 3, 1)",
            "import numpy as np\nassert np.allclose(f(np.eye(2)), [[1, 0], [0, 1]])",
        ],
    ),
    "numpy's answers": (
        "import numpy as np\ndef f(n): return np.arange(n)\ndef g(n): return np.float64(n)",
        ["assert (f(3) == [0, 1, 2]).all()", "assert g(2) == 2.0"],
    ),
    "arguments that change": (
        "def f(x):\n    x[0].reverse(); x.append(5); return None",
        ["a = [3, 1]\nb = [a, 4]\nf(b)\nassert a == [1, 3] and b == [[1, 3], 4, 5] and b[0] is a"],
    ),
    "named arguments": ("def f(a, *, b=1, **c): return a, b, c", ["assert f(1, b=2, d=3) == (1, 2, {'d': 3})"]),
    "errors": (
        "class Own(ValueError): pass\ndef f(x):\n    if x: raise Own('no', x)\n    raise KeyError(3)",
        [
            "try: f(1)\nexcept Own as error: assert error.args == ('no', 1)\nelse: raise AssertionError",
            "try: f(1)\nexcept ValueError: pass\nelse: raise AssertionError",
            "try: f(0)\nexcept KeyError as error: assert error.args == (3,)\nelse: raise AssertionError",
        ],
    ),
    "classes of the program": (
        POINT,
        [
            "p = P(3)\nassert (p + P(4)).x == 7 and p == P(3) and p != P(4) and isinstance(p, P) and not isinstance(3, P)",
            "p = P(3)\np.double().double()\nassert p.x == len(p) == p[0] == 12 and str([p]) == '[P(12)]'",
            "p = P(1)\np.x = 9\nassert p.x == 9 and (p * 2).x == 18",
            "assert [q.x for q in sorted(make(3), reverse=True)] == [2, 1, 0]",
        ],
    ),
    "classes of the tests": (
        "def reverse(head):\n    last = None\n    while head: head.next, last, head = last, head, head.next\n    return last",
        [
            "class Node:\n    def __init__(self, v, n=None): self.v, self.next = v, n\n"
            "def values(n):\n    while n:\n        yield n.v\n        n = n.next\n"
            "assert list(values(reverse(Node(1, Node(2, Node(3)))))) == [3, 2, 1]",
        ],
    ),
    "functions of the tests": (
        "def f(g, xs): return [g(x) for x in xs]\ndef h(key, xs): return sorted(xs, key=key)",
        [
            "assert f(lambda x: x + 1, [1, 2]) == [2, 3]",
            "assert f(str.upper, ['a']) == ['A'] and f(len, ['ab']) == [2] and h(abs, [-3, 2]) == [2, -3]",
            "def no(x): raise LookupError(x)\ntry: f(no, [1])\nexcept LookupError as e: assert e.args == (1,)\nelse: assert 0",
        ],
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i * i\ndef count():\n    n = 0\n    while True: yield n; n += 1",
        [
            "assert list(f(4)) == [0, 1, 4, 9]",
            "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2]",
            "assert 9 in f(4)",
        ],
    ),
    "functions of functions": ("def adder(n): return lambda x: x + n", ["assert adder(2)(3) == 5"]),
    "names of builtins and modules": (
        "def sum(a, b): return a + b\ndef calendar(x): return x\nfrom math import isclose\ndef f(x): return 2.0 * x",
        ["assert sum(10, 15) == 25", "assert calendar(3) == 3", "assert math.floor(f(1)) == 2 and isclose(f(1), 2)"],
    ),
    "state of the program": (
        "calls = 0\ndef f():\n    global calls\n    calls += 1",
        ["f()\nassert calls == 1\nf()\nassert calls == 2"],
    ),
    "named tuples, enumerations, data classes": (
        KINDS,
        [
            "assert f() == (1, 2) and f().y == 2",
            "assert g() == D(3) and g().x == 3",
            "assert h() == E.A and h() is not E.B and h().value == 1",
        ],
    ),
    "imports of the program": (
        "def f(): return 1",
        ["import response\nassert response.f() == 1", "from response import f as own\nassert own() == 1"],
    ),
    "tests share names": ("def f(): return 1", ["x = f()", "assert x == 1"]),
    "printing": ("def f(): print('noise' * 10 ** 6); return 1", ["print('more' * 10 ** 6)\nassert f() == 1"]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str) -> None:
    code, tests = RIGHT[name]
    assert passed(code, *tests) == len(tests)


def test_a_wrong_program_fails_each_of_them() -> None:
    assert (
        passed(
            "def f(x): return 4",
            "assert f(2) == 4",
            "assert f(3) == 6",
            "assert f(0) == 4",
            "import response\nassert response.g()",
        )
        == 2
    )


@pytest.mark.parametrize("test", ["assert f(2) == P(3)", "assert f(2).equals(4)", "assert f(2).is_right"])
def test_what_a_test_asks_the_programs_own_objects_they_answer_as_they_like(test: str) -> None:
    """A limit: such a test passes for a wrong program, as both sides of what it compares are the program's."""
    own = "class P:\n    is_right = True\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\n"
    own += "    def equals(self, other): return True\ndef f(x): return P(x)"
    assert passed(own, test) == 1
    assert passed(own, WRONG, "assert not f(2) != 4", "assert f(2) in [4]") == 0, "held against data they answer nothing"


@pytest.mark.parametrize("how", ["import os; os._exit(0)", "raise SystemExit", "f(x)", "x = []; x.append(x); return x"])
def test_a_call_that_does_not_come_back_fails_its_test(how: str) -> None:
    assert passed(f"def f(x):\n    {how}", "try: f(2)\nexcept Exception: assert f(2) == 4", "assert f(2) == 4") == 0


@pytest.mark.parametrize("value", ["'x' * (100 << 20)", "[[]] * 10 ** 8", "list(range(10 ** 9))"])
def test_an_answer_that_is_too_large_is_none(value: Any) -> None:
    assert passed(f"def f(x): return {value}", WRONG) == 0
