"""The process in which a row's tests judge a program that runs in another one. Run by path: it imports nothing of megarl.

A test's names are its own, those of Python's libraries as this process has them, and last the program's: what these are, and
what becomes of them, the program answers over a channel, as data or as objects that stay where they are (`peer.py`). So the
program sees the arguments of its calls and nothing else of a test, neither what is expected nor the verdict.

In: one JSON object on standard input (tests, channel, memory_bytes, cpu_s). Out: a line `ready` or `missing: reason`, then
the number of passed tests once all have run.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

_PR_SET_DUMPABLE = 4
_OWN_COPIES = {"np": "numpy", "numpy": "numpy"}
"""Libraries of which tests use this process's own copy, besides Python's."""
_FOLDING = ("sub", "rsub", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "xor", "rxor")
"""Operations by which an object of the program could make anything of what is expected: none of data."""


def main() -> None:
    """One run."""
    with open(0, "rb", closefd=False) as stdin:
        request = json.loads(stdin.read())
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    import peer  # noqa: F401 - no file of megarl can be read once the process is confined
    from confinement import confined
    from values import Channel, Closed

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))  # nobody else may read this memory
    problem = confined(request["memory_bytes"], request["cpu_s"])
    channel = Channel(*request["channel"])
    passed = 0
    try:
        _, program_problem = channel.receive()
        problem = problem or str(program_problem)
        os.write(answers, f"missing: {problem}\n".encode() if problem else b"ready\n")
        if problem:
            return
        with contextlib.suppress(Closed):  # a program that ends fails the tests that are left
            channel.receive()
            for _ in passes(request["tests"], channel):
                passed += 1
    except Closed:
        return  # it ended before it was confined
    os.write(answers, f"{passed}\n".encode())
    os._exit(0)


def passes(tests: list[str], channel: Any) -> Iterator[None]:
    """Something for each test that raises nothing, one after another in one namespace."""
    from values import Closed

    if any("np." in text or "numpy" in text for text in tests):
        with contextlib.suppress(ImportError):
            _make_careful(importlib.import_module("numpy"))
    names = ProgramNames(channel)
    for text in tests:
        tree = ast.parse(text)
        names.begin(tree)
        try:
            exec(compile(tree, "test", "exec"), names)
        except Closed:
            raise
        except BaseException:  # noqa: BLE001 - whatever a test raises, it has failed
            continue
        yield


class ProgramNames(dict[str, Any]):
    """The namespace of the tests, which asks the program for the names that nobody else has."""

    def __init__(self, channel: Any) -> None:
        from peer import Peer

        super().__init__(__name__="tests")
        peer = Peer(channel, _stand_in, _may, library=_library)
        self._program = peer.stand_in(0, calls=False)
        self._defined: dict[str, str] = peer.stand_in(1, calls=True)()
        self._libraries: set[str] = set()
        self._own_builtins: set[str] = set()
        module = _Response("response")
        module.names = self
        sys.modules["response"] = module

    def begin(self, tree: ast.Module) -> None:
        """Find out what the names of the next test mean."""
        loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        called = {node.id for node in loaded if id(node) not in owners}
        libraries = {*sys.stdlib_module_names, *_OWN_COPIES}
        self._libraries = ({node.id for node in loaded} - called) & libraries
        self._own_builtins = {name for name in _builtins_alone(tree) if name in self._defined and name not in self}

    def __missing__(self, name: str) -> Any:
        if name in self._libraries:
            return importlib.import_module(_OWN_COPIES.get(name, name))
        if name in self._own_builtins or not hasattr(builtins, name):
            return self.of_program(name)
        raise KeyError(name)

    def of_program(self, name: str) -> Any:
        """The program's object of this name; of a library's functions and classes this process's own."""
        module = self._defined.get(name, "")
        if module.partition(".")[0] in {*sys.stdlib_module_names, *_OWN_COPIES.values()}:
            return getattr(importlib.import_module(module), name)
        try:
            return getattr(self._program, name)
        except AttributeError:
            raise KeyError(name) from None


def _builtins_alone(tree: ast.Module) -> set[str]:
    """Names of builtins that are all that a test asks of the program, which may have its own; empty if it asks for more.

    Else a program could have its own `abs` or `len` judge what it gave, in this test or, under a name, in one before.
    """
    nodes = list(ast.walk(tree))
    named = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in named if not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.name for alias in node.names}
            made |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    asked = {node.id for node in named if isinstance(node.ctx, ast.Load)} - made
    builtin = {name for name in asked if hasattr(builtins, name)}
    is_more = "response" in imported or asked - builtin - set(sys.stdlib_module_names) - set(_OWN_COPIES)
    return set() if is_more else builtin


class _Response(types.ModuleType):
    """`import response` in a test."""

    names: ProgramNames

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.names.of_program(name)
        except KeyError:
            raise AttributeError(name) from None


def _make_careful(numpy: Any) -> None:
    """Let `allclose` be false of an array without elements and anything with some: numpy compares no two of these."""
    of_any = numpy.allclose

    def allclose(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(numpy.size(a)) == bool(numpy.size(b)) and bool(of_any(a, b, *args, **kwargs))

    allclose.__module__ = "numpy"
    numpy.allclose = allclose


def _stand_in(peer: Any, number: int, calls: bool) -> Any:  # noqa: FBT001
    """For an object of the program, which decides nothing about what is expected: it never equals data, nor is it compared."""
    from peer import Far, FarCallable, number_of

    def equal(one: Any, other: object) -> bool:
        return one is other or (number_of(other) is not None and bool(peer.ask("eq", one, other)))

    def only_with_another(name: str) -> Any:
        above = getattr(Far, f"__{name}__")
        return lambda one, other: NotImplemented if number_of(other) is None else above(one, other)

    namespace: dict[str, Any] = {"__slots__": (), "__eq__": equal, "__hash__": Far.__hash__}
    namespace |= {f"__{name}__": only_with_another(name) for name in ("lt", "le", "gt", "ge", *_FOLDING)}
    namespace["__contains__"] = lambda one, item: any(part == item for part in one)
    return type("ProgramObject", (FarCallable if calls else Far,), namespace)(peer, number)


def _may(thing: Any, name: str) -> None:
    """The program may use functions, and classes and objects of the tests' own, whose names it reads without underscores."""
    kind = thing if isinstance(thing, type) else type(thing)
    is_of_tests = kind.__module__ == "tests"
    is_function = isinstance(thing, types.FunctionType | types.MethodType) or hasattr(kind, "__next__")
    if name.startswith("_") or not (is_of_tests or (is_function and not name)):
        raise TypeError(f"a {kind.__name__} cannot be given to a program{' with its ' + name if name else ''}")


def _library(value: Any) -> list[str] | None:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
        module = getattr(value, "__module__", None) or getattr(value, "__objclass__", value).__module__
        if module.partition(".")[0] in {*sys.stdlib_module_names, *_OWN_COPIES.values()}:
            return [module, value.__qualname__]
    return None


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves the program's own folder out
    main()
