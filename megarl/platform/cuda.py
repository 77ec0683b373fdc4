"""The platform of a machine with NVIDIA GPUs. Every method is one call into torch.cuda; nothing is patched.
May assume that torch sees at least one CUDA device."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from megarl.platform.base import Platform, thread_env
from megarl.platform.numa import bind_to, cores_near

ENVIRONMENT = {
    # Hopper and older: megatron overlaps TP and CP communication by the order of kernel launches.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Transformer Engine's float32 products, a router's among them, would have TF32's 10 bits, whatever torch was told.
    "NVIDIA_TF32_OVERRIDE": "0",
    # SGLang sets both for its servers (0.5.23: entrypoints/engine.py), and both ends of a process group must agree.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that CUDA, NCCL and cuBLAS read as they start; where the environment has other values, they stay."""


class CudaPlatform(Platform):
    """One GPU per process, NCCL between them."""

    name: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    collective_timeout_s: ClassVar[float] = 1800.0

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device("cuda", local_rank)

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def bind_to_device(self, local_rank: int) -> frozenset[int]:
        properties: Any = torch.cuda.get_device_properties(local_rank)
        pci_address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        return bind_to(cores_near("{:04x}:{:02x}:{:02x}.0".format(*pci_address)))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "total_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        }

    def device_name(self) -> str | None:
        return torch.cuda.get_device_name()

    def start_memory_history(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python")

    def write_memory_history(self, path: str) -> bool:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        return True

    def worker_env(self, threads: int) -> dict[str, str]:
        return thread_env(threads) | {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
