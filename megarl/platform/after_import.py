"""Runs an action when a named module is imported for the first time, without importing it now.
Used for the few redirects whose target is a name inside megatron (importing megatron takes seconds)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder for one module: finds it as usual, and has its loader call the action at the end."""

    def __init__(self, module_name: str, action: Callable[[ModuleType], None]) -> None:
        self._module_name = module_name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module_name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


def act_after_import(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` as soon as `module_name` has been imported, before its importer sees it.

    Raises:
        RuntimeError: the module is already imported; whoever imported it holds the names the action would change.
    """
    if module_name in sys.modules:
        raise RuntimeError(f"{module_name} is already imported")
    sys.meta_path.insert(0, _AfterImport(module_name, action))
