"""Weights on their way to an engine without a server: any type arrives as it is, and asks for no megatron."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.workers.senders import SentTensor

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool]


def sent(tensor: torch.Tensor) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickle of it, and the buffers that stay out of it."""
    beside: list[pickle.PickleBuffer] = []
    return pickle.dumps(SentTensor(tensor), protocol=5, buffer_callback=beside.append), beside


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)], ids=str)
def test_a_tensor_arrives_with_its_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(15)[: torch.Size(shape).numel()].reshape(shape) % 2).to(dtype)
    data, beside = sent(tensor)
    arrived = pickle.loads(data, buffers=[bytes(buffer) for buffer in beside])  # which nobody may write to, as in Ray's store
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    arrived.zero_()


def test_only_a_view_travels_and_not_what_it_is_a_view_of() -> None:
    whole = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    data, beside = sent(whole[:, 1:3])
    assert sum(len(bytes(buffer)) for buffer in beside) == 24
    assert torch.equal(pickle.loads(data, buffers=beside), whole[:, 1:3].detach())


OF_A_RANK = """
import pickle, sys
from megarl import platform
platform.install()
import megatron.core, torch
from megarl.workers.senders import SentTensor
beside = []
data = pickle.dumps(SentTensor(torch.zeros(1000)), protocol=5, buffer_callback=beside.append)
print(b"megatron" in data, len(data) < 400, [len(bytes(values)) for values in beside])
"""


@pytest.mark.slow
def test_a_message_of_a_rank_is_read_without_megatron_core() -> None:
    """Of 0.19, it has torch's own pickles of tensors name it."""
    ran = subprocess.run([sys.executable, "-c", OF_A_RANK], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "False True [4000]\n", ran.stderr
