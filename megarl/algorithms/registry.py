"""Functions by name: what the config calls `clip` or `grpo`, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, cast

from megarl.errors import ConfigError, nearest
from megarl.system.user_code import FORMS

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Named functions of one kind; `kind` ("policy loss") is how errors call them."""

    def __init__(self, kind: str, load: Callable[[str, tuple[str, ...]], Callable[..., object]] | None = None) -> None:
        """`load` imports a user's own function of this kind, which must take further arguments of the given names; None: there
        can be none."""
        self.kind = kind
        self._load = load
        self._functions: dict[str, F] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that files a function under `name`.

        Raises:
            ValueError: the name is taken.
        """

        def file(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"a {self.kind} named '{name}' is registered already")
            self._functions[name] = function
            return function

        return file

    def resolve(self, name: str, arguments: Iterable[str] = ()) -> F:
        """The function registered as `name`, or the user's own, `package.module:function` or `path/to/file.py:function`.

        `arguments` are the names that a user's function gets from the config beside those of its kind.

        Raises:
            ConfigError: there is no such name, or the user's function cannot be used; the sentence has the nearest name.
        """
        if name in self._functions:
            return self._functions[name]
        if self._load is not None and ":" in name:
            return cast(F, self._load(name, tuple(arguments)))
        hint = "" if self._load is None else f" or your own as {FORMS}"
        raise ConfigError(f"{self.kind} is '{name}'; it must be one of {', '.join(self)}{hint}{nearest(name, self)}")
