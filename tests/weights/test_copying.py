"""Every tensor is dealt with once, in threads where that helps, and what fails in one is raised."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest
import torch

from megarl.weights import copying
from megarl.weights.copying import copy, in_threads


def test_every_tensor_is_dealt_with_once_the_largest_first() -> None:
    tensors = [torch.zeros(size) for size in (3, 9, 1, 7, 5)]
    done: list[int] = []
    with mock.patch.object(os, "sched_getaffinity", return_value={0}):
        in_threads(done.append, tensors)
    assert done == [1, 3, 4, 0, 2]
    in_threads(done.append, [])
    assert len(done) == 5


def test_threads_are_used_where_there_is_much_to_do() -> None:
    both, names = threading.Barrier(2, timeout=20), set()

    def meet(_: int) -> None:
        both.wait()  # which one thread alone would not pass
        names.add(threading.current_thread().name)

    with mock.patch.object(os, "sched_getaffinity", return_value={0, 1}), mock.patch.object(copying, "FEW_BYTES", 16):
        in_threads(meet, [torch.zeros(4)] * 2)
    assert len(names) == 2
    with mock.patch.object(os, "sched_getaffinity", return_value={0, 1}):
        in_threads(lambda _: names.add(threading.current_thread().name), [torch.zeros(4)] * 2)
    assert threading.current_thread().name in names


@pytest.mark.parametrize("few", [0, 2**30])
def test_what_fails_is_raised(few: int) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("number 2")

    with mock.patch.object(copying, "FEW_BYTES", few), pytest.raises(ValueError, match="number 2"):
        in_threads(fail, [torch.zeros(4)] * 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64"])
def test_a_copy_has_the_same_bits_also_of_columns(dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    values = torch.randint(0, 2**7, (6, 10, kind.itemsize), dtype=torch.uint8).view(kind)[..., 0]
    to = torch.zeros(8, 9, dtype=values.dtype)
    copy(to[1:7, 2:8], values[:, 3:9])
    expected = torch.zeros(8, 9, dtype=values.dtype)
    expected[1:7, 2:8] = values[:, 3:9]
    assert torch.equal(to.view(torch.uint8), expected.view(torch.uint8))
