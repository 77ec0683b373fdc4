"""A hidden module cannot be imported meanwhile, and is as it was afterwards."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.system.hidden_imports import hidden
from tests.data.chat_tokenizers import byte_tokenizer


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


FROM_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from megarl.data.tokenize import load_tokenizer
with ThreadPoolExecutor(16) as threads:
    sizes = {len(tokenizer) for tokenizer in threads.map(load_tokenizer, [sys.argv[1]] * 16)}
print(len(sizes), "sklearn" in sys.modules)
"""


def test_threads_that_load_a_tokenizer_at_once_wait_for_each_others_imports(tmp_path: Path) -> None:
    """Where each hid a module from the same import at the same time, all but one found transformers half imported."""
    byte_tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-c", FROM_THREADS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["1", "False"]
