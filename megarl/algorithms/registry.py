"""Functions by name: what the config calls `clip` or `grpo`, or a function of the user's own as `package.module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megarl.errors import ConfigError, nearest

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Named functions of one kind; `kind` ("policy loss") is how errors call them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
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

    def resolve(self, name: str) -> F:
        """The function registered as `name`, or the one at the import path `package.module:function`.

        Raises:
            ConfigError: no such name, module or function; the message has the nearest name.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return self._imported(name)
        raise ConfigError(
            f"{self.kind} is '{name}', but it may be one of {', '.join(self)} or an import path "
            f"'package.module:function'{nearest(name, self)}"
        )

    def _imported(self, path: str) -> F:
        module_name, _, function_name = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.kind} is '{path}', but module '{module_name}' cannot be imported: {error}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            hint = nearest(function_name, vars(module))
            raise ConfigError(f"{self.kind} is '{path}', but module '{module_name}' has no function '{function_name}'{hint}")
        return function
