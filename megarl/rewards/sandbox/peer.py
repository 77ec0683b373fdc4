"""Objects of one process as another one sees them: what is done to them is asked for, and data comes back.

The two ends, a program and the tests that judge it, work in turns; a question may be asked before another one is answered
(a test's function that is given to the program). Imported by path from the children: nothing of megarl.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from values import Channel, Closed, decode, encode, take_over

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "index", "neg", "pos", "invert", "abs")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "and_", "or_", "xor", "eq", "lt", "le", "gt", "ge")},
    **{"len": len, "iter": iter, "next": next, "bool": bool, "str": str, "repr": repr, "int": int, "float": float},
    **{"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
    "isinstance": lambda kind, value: isinstance(value, kind),
}
"""What may be done to the other side's object besides calling it and reading or setting an attribute; its first argument."""


_OF_NO_MESSAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""Errors over a message that the other side cannot have meant."""


class Peer:
    """This process's end: its own objects by number, and stand-ins for the other one's."""

    def __init__(
        self,
        channel: Channel,
        far: Callable[[Peer, int, bool], Any],
        may: Callable[[Any, str], None],
        *,
        library: Callable[[Any], list[str] | None] | None = None,
        import_as: Callable[[str, str], Any] | None = None,
    ) -> None:
        """`far` makes the stand-in of (this end, a number, whether it can be called); `may` raises TypeError unless the other
        side may read or set this attribute of this object.

        `library` gives the module and name by which an object is sent, if both sides import it; `import_as` imports what the
        other side sends so. None: nothing is sent, or taken, by its name.
        """
        self._channel, self._far, self._may, self._library, self._import = channel, far, may, library, import_as
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._fars: dict[int, Any] = {}
        self._errors: dict[int, type[BaseException]] = {}

    def give(self, value: Any) -> int:
        """The number of an object of this side, by which the other one may ask for it."""
        number = self._numbers.setdefault(id(value), len(self._own))
        if number == len(self._own):
            self._own.append(value)  # kept, so that no other object gets its id
        return number

    def stand_in(self, number: int, *, calls: bool) -> Any:
        """For an object of the other side."""
        if number not in self._fars:
            self._fars[number] = self._far(self, number, calls)
        return self._fars[number]

    def ask(self, kind: str, *of: Any) -> Any:
        """What the other side answers; what it raises is raised here. Its changes to `of` are made here too."""
        arguments = list(of)
        self._channel.send([kind, self._encoded(arguments)])
        while True:
            message = self._channel.receive()
            try:
                if message[0] == "value":
                    if message[2] is not None:
                        take_over(arguments, self._decoded(message[2]))
                    return self._decoded(message[1])
                if message[0] == "error":
                    raised = self._error(message[1])
                    break
                answer = self.answer(message)
            except _OF_NO_MESSAGE:
                raise Closed from None
            self._channel.send(answer)
        if isinstance(raised, StopIteration) and kind == "call":  # `all(map(f, xs))` would take it for the end of `xs`
            raise RuntimeError("a function raised StopIteration")
        raise raised

    def answer(self, message: Sequence[Any]) -> list[Any]:
        """To a question of the other side."""
        try:
            arguments = self._decoded(message[1])
            result = self._done(message[0], *arguments)
            answer = ["value", self._encoded(result), None]
            after = self._encoded(arguments)
            if after != message[1]:
                answer[2] = after
            return answer
        except Closed:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the object raises is the answer
            return ["error", self._described(error)]

    def _done(self, kind: str, thing: Any, *of: Any) -> Any:
        if kind == "call":
            positional, named = of
            return thing(*positional, **named)
        if kind == "attribute":
            self._may(thing, of[0])
            return getattr(thing, of[0])
        if kind == "set":
            self._may(thing, of[0])
            if isinstance(thing, type):
                raise TypeError("a class of the other side stays as it is")
            return setattr(thing, *of)
        return OPERATIONS[kind](thing, *of)

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decoded(self, given: Any) -> Any:
        return decode(given, self._resolve)

    def _refer(self, value: Any) -> Any:
        number = number_of(value)
        if number is None:
            number = next((number for number, error in self._errors.items() if error is value), None)
        if number is not None:
            return {"yours": number}
        in_library = self._library(value) if self._library is not None else None
        if in_library is not None:
            return {"library": in_library}
        self._may(value, "")
        about: dict[str, Any] = {"mine": self.give(value), "calls": callable(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            about["raises"] = [value.__name__, _builtin_base(value).__name__]
        return {"object": about}

    def _resolve(self, given: Any) -> Any:
        ((kind, about),) = given.items()
        if kind == "yours":
            return self._own[about]
        if kind == "library" and self._import is not None:
            return self._import(*about)
        if kind != "object" or type(about["mine"]) is not int:
            raise ValueError(kind)
        number = about["mine"]
        if "raises" in about:
            return self._error_class(number, *about["raises"])
        return self.stand_in(number, calls=bool(about["calls"]))

    def _described(self, error: BaseException) -> dict[str, Any]:
        try:
            of = self._encoded(list(error.args))
        except Exception:  # noqa: BLE001 - arguments that cannot be told
            of = {"list": []}
        kind = type(error)
        is_known = getattr(builtins, kind.__name__, None) is kind
        try:
            return {"kind": kind.__name__ if is_known else self._encoded(kind), "of": of}
        except TypeError:
            return {"kind": _builtin_base(kind).__name__, "of": of}

    def _error(self, given: dict[str, Any]) -> BaseException:
        kind = given["kind"]
        error_class = getattr(builtins, kind) if isinstance(kind, str) else self._decoded(kind)
        if not (isinstance(error_class, type) and issubclass(error_class, BaseException)):
            raise ValueError(kind)
        try:
            return error_class(*self._decoded(given["of"]))
        except TypeError:
            return error_class.__new__(error_class)

    def _error_class(self, number: int, name: str, base: str) -> type[BaseException]:
        if number not in self._errors:
            above = getattr(builtins, base)
            if not (isinstance(above, type) and issubclass(above, BaseException)):
                raise ValueError(base)
            self._errors[number] = type(str(name), (above,), {})
        return self._errors[number]


class Far:
    """The other side's object; whatever is done to it is done there."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return _do(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _do(self, "set", name, value)

    def __hash__(self) -> int:
        return hash(("far", number_of(self)))

    def __eq__(self, other: object) -> bool:
        return self is other or bool(_do(self, "eq", other))


class FarCallable(Far):
    """One that can be called."""

    __slots__ = ()

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return _do(self, "call", list(positional), named)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(_do(self, "isinstance", value))


def number_of(value: Any) -> int | None:
    """The number of a stand-in; None for everything else."""
    return object.__getattribute__(value, "_number") if issubclass(type(value), Far) else None


def _do(far: Far, kind: str, *of: Any) -> Any:
    return object.__getattribute__(far, "_peer").ask(kind, far, *of)


def _forward(kind: str) -> Callable[..., Any]:
    return lambda far, *of: _do(far, kind, *of)


def _forward_swapped(kind: str) -> Callable[..., Any]:
    """Forward `other <operation> far`: the object on the other side is the second operand."""
    return lambda far, other: object.__getattribute__(far, "_peer").ask(kind, other, far)


def _builtin_base(kind: type) -> type:
    return next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


UNARY = ("neg", "pos", "invert", "abs", "index", "int", "float", "round", "trunc", "floor", "ceil", "len", "iter", "next")
BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor")
for _name in (*UNARY, "bool", "str", "repr", "getitem", "setitem", "delitem", "lt", "le", "gt", "ge", *BINARY):
    setattr(Far, f"__{_name.rstrip('_')}__", _forward(_name))
for _name in BINARY:
    setattr(Far, f"__r{_name.rstrip('_')}__", _forward_swapped(_name))
