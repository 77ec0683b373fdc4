"""The program of one sandboxed run: confines itself, then runs what a model wrote. Run by path, with nothing of megarl.

In: one JSON object on standard input (code, channel, input, memory_bytes, cpu_s). Without a channel, out: a line `ready` or
`missing: reason`, then what the program prints. With one (two file descriptors to the process that tests the program) the
same is said there, what the program prints is dropped, and its objects are there for the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from typing import Any


def main() -> None:
    """One run."""
    from confinement import confined

    with open(0, "rb", closefd=False) as stdin:
        request = json.loads(stdin.read())
    _replace_input((request["input"] or "").encode(errors="surrogatepass"))
    if request["channel"] is not None:
        import peer  # noqa: F401 - no file of megarl can be read once the process is confined

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    problem = confined(request["memory_bytes"], request["cpu_s"])
    if request["channel"] is not None:
        _be_tested(request["code"], request["channel"], problem)
        os._exit(0)
    os.write(1, f"missing: {problem}\n".encode() if problem else b"ready\n")
    if not problem:
        run_program(request["code"])


def _replace_input(text: bytes) -> None:
    """Standard input becomes `text`: the program reads that, and not what was asked of this process."""
    memory = os.memfd_create("input")
    view = memoryview(text)
    while view:
        view = view[os.write(memory, view) :]
    os.lseek(memory, 0, os.SEEK_SET)
    os.dup2(memory, 0)
    os.close(memory)


def run_program(code: str) -> None:
    """Run `code` as a main program; its own exit code or traceback ends this process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "response", "exec"), vars(module))


def _be_tested(code: str, ends: list[int], problem: str) -> None:
    """Run `code`, then do with its objects what the tests in the other process ask for, as long as they ask."""
    from peer import Far, FarCallable, Peer
    from values import Channel, Closed

    channel = Channel(*ends)
    channel.send(["confined", problem])
    module = types.ModuleType("response")
    sys.modules["response"] = module
    run = exec  # the program may put another one into builtins
    try:
        run(compile(code, "response", "exec"), vars(module))
    except BaseException:  # noqa: BLE001 - SystemExit too: a program that leaves before the tests passes none
        return
    peer = Peer(
        channel,
        lambda peer, number, calls: (FarCallable if calls else Far)(peer, number),
        lambda thing, name: None,
        import_as=_imported,
    )
    peer.give(module)
    peer.give(lambda: _defined(vars(module)))
    channel.send(["began"])
    with contextlib.suppress(Closed):
        while True:
            channel.send(peer.answer(channel.receive()))


def _defined(namespace: dict[str, Any]) -> dict[str, str]:
    """The names of the program; with each that stands for something of a library under its own name, the library's module."""
    modules = {}
    for name, value in namespace.items():
        is_named = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and value.__name__ == name
        modules[name] = str(value.__module__) if is_named and value.__module__ != "builtins" else ""
        if modules[name] == "response":
            modules[name] = ""
    return modules


def _imported(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves the program's own folder out
    main()
