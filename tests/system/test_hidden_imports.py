"""A hidden module cannot be imported meanwhile, and is as it was afterwards."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from megarl.system.hidden_imports import hidden


def test_a_hidden_module_is_as_if_it_were_not_installed_and_can_be_imported_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with hidden("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules


def test_a_module_that_is_imported_already_stays() -> None:
    with hidden("json"):
        import json as again
    assert again is json is sys.modules["json"]


def test_what_was_hidden_is_shown_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ValueError, match="of the import"), hidden("this"):
        raise ValueError("of the import")
    assert "this" not in sys.modules
