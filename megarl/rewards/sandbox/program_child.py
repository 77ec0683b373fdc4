"""The program of one sandboxed run: confines itself, then runs what a model wrote. Run by path, with nothing of megarl.

In: one JSON object on standard input (code, tests, token, input, memory_bytes, cpu_s). Out: a line `ready` or
`missing: reason`, then what the program prints; or, with tests, what it prints is dropped and the secret token and the
number of passed tests follow once all have run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from typing import Any


def main() -> None:
    """One run."""
    with open(0, "rb", closefd=False) as stdin:
        request = json.loads(stdin.read())
    answers = os.dup(1)
    _replace_input((request["input"] or "").encode(errors="surrogatepass"))
    if request["tests"] is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    problem = _confine(request["memory_bytes"], request["cpu_s"])
    os.write(answers, f"missing: {problem}\n".encode() if problem else b"ready\n")
    if problem:
        return
    if request["tests"] is None:
        os.close(answers)
        run_program(request["code"])
    else:
        passed = run_tests(request["code"], request["tests"])
        os.write(answers, f"{request['token']} {passed}\n".encode())
        os._exit(0)  # nothing that the program left for the end may follow


def _replace_input(text: bytes) -> None:
    """Standard input becomes `text`, so that what was asked of this process (the token) cannot be read again."""
    memory = os.memfd_create("input")
    view = memoryview(text)
    while view:
        view = view[os.write(memory, view) :]
    os.lseek(memory, 0, os.SEEK_SET)
    os.dup2(memory, 0)
    os.close(memory)


def _confine(memory_bytes: int, cpu_s: int) -> str:
    """Confine this process; what is missing on this machine, or an empty text."""
    try:
        import confinement

        confinement.confine(memory_bytes, cpu_s, [os.getcwd()])
    except (OSError, ValueError, ImportError, AttributeError) as error:
        return str(error).replace("\n", " ")
    return ""


def run_program(code: str) -> None:
    """Run `code` as a main program; its own exit code or traceback ends this process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "response", "exec"), vars(module))


def run_tests(code: str, tests: list[str]) -> int:
    """Run `code`, then every test in its namespace; how many tests raised nothing. 0 if the code itself raises."""
    module = types.ModuleType("response")
    sys.modules["response"] = module
    namespace: dict[str, Any] = vars(module)
    compiled = [compile(test, "test", "exec") for test in tests]
    run = exec  # the program may put another one into builtins
    try:
        run(compile(code, "response", "exec"), namespace)
    except BaseException:  # noqa: BLE001 - SystemExit too: a program that leaves before the tests passes none
        return 0
    passed = 0
    for test in compiled:
        with contextlib.suppress(BaseException):
            run(test, namespace)
            passed += 1
    return passed


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves the program's own folder out
    main()
