"""The GPUs that plans know (gpus.yaml), and what is assumed of every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megarl.config.yaml_tree import read_yaml
from megarl.errors import ConfigError, nearest
from megarl.planning.efficiencies import Efficiencies
from megarl.reshard.cost import ClusterRates

GPUS_PER_NODE = 8
PROCESS_BYTES = 1.0e9
"""Assumed for each process on a GPU: CUDA context, libraries' workspaces, NCCL's buffers."""
FRAGMENTS = 0.05
"""Assumed share of a GPU's memory that its allocators hold without using it."""


@dataclass(frozen=True)
class GpuSpec:
    """One kind of GPU, in a node of `GPUS_PER_NODE`. Peaks are dense; `fp8_tflops` None: it has no FP8."""

    name: str
    memory_gb: float
    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    nvlink_gb_per_s: float
    network_gb_per_s: float
    host_gb_per_s: float
    cuda_name: str | None = None
    """What CUDA calls it."""
    efficiencies: Efficiencies = Efficiencies()
    """What it reaches of these figures."""

    @property
    def usable_bytes(self) -> float:
        """What may be planned with."""
        return self.memory_gb * 1e9 * (1 - FRAGMENTS)

    def peak_flops(self, *, fp8: bool = False) -> float:
        """Floating-point operations per second at the best."""
        return (self.fp8_tflops if fp8 and self.fp8_tflops else self.bf16_tflops) * 1e12

    def link_gb_per_s(self, ranks: int) -> float:
        """Of a group of `ranks` next to each other: NVLink within a node, the network beyond it."""
        return self.nvlink_gb_per_s if ranks <= GPUS_PER_NODE else self.network_gb_per_s

    @property
    def cluster(self) -> ClusterRates:
        """Nodes of these GPUs, as reshard plans are priced."""
        return ClusterRates(GPUS_PER_NODE, self.hbm_gb_per_s / 2, self.nvlink_gb_per_s, self.network_gb_per_s)


def gpu_named(name: str) -> GpuSpec:
    """A GPU of gpus.yaml.

    Raises:
        ConfigError: there is none of this name.
    """
    known = _known()
    if name not in known:
        raise ConfigError(f"--gpu is '{name}'; it must be {', '.join(known)}{nearest(name, list(known))}")
    return known[name]


def gpu_called(cuda_name: str | None) -> GpuSpec | None:
    """The GPU that CUDA calls so; None if gpus.yaml has none of this name, as for other forms of a GPU, whose peaks differ."""
    return next((gpu for gpu in _known().values() if gpu.cuda_name is not None and gpu.cuda_name == cuda_name), None)


@cache
def _known() -> dict[str, GpuSpec]:
    return {name: GpuSpec(name, **figures) for name, figures in read_yaml(Path(__file__).with_name("gpus.yaml")).items()}
