"""Functions of the user's: a file is run once, whole, whoever asks; where one cannot be found, those of the file are named."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.errors import RewardError
from megarl.system.user_code import load_user_function


def test_only_what_a_file_defines_is_named_where_a_function_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom math import sqrt\nfrom pathlib import Path\n\n\n"
        "def score(sample):\n    return sqrt(1)\n\n\ndef zebra(sample):\n    return Path\n"
    )
    with pytest.raises(RewardError, match=r"has no function 'scor' \(did you mean 'score'\?\); it has score, zebra$"):
        load_user_function(f"{file}:scor", RewardError)


def test_a_module_that_only_gathers_functions_of_others_names_these(tmp_path: Path) -> None:
    file = tmp_path / "gathered.py"
    file.write_text("from math import sqrt\n")
    with pytest.raises(RewardError, match=r"it has sqrt$"):
        load_user_function(f"{file}:square", RewardError)


def test_threads_that_ask_at_once_get_the_same_whole_module(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ntime.sleep(0.3)\n\n\ndef score(sample):\n    return 1.0\n")
    threads = 4
    ready = threading.Barrier(threads)

    def load() -> object:
        ready.wait()
        return load_user_function(f"{file}:score", RewardError)

    with ThreadPoolExecutor(threads) as pool:
        loaded = [pool.submit(load) for _ in range(threads)]
    assert len({id(one.result()) for one in loaded}) == 1
