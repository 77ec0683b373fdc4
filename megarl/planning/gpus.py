"""The GPUs that plans know (gpus.yaml) or are given in a file, and what is assumed of every one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config.yaml_tree import read_yaml
from megarl.errors import ConfigError, describe_value, nearest
from megarl.planning.efficiencies import Efficiencies, is_share
from megarl.weights.cost import ClusterRates

GPUS_PER_NODE = 8
PROCESS_BYTES = 1.0e9
"""Assumed for each process on a GPU: CUDA context, libraries' workspaces, NCCL's buffers."""
FRAGMENTS = 0.05
"""Assumed share of a GPU's memory that its allocators hold without using it."""
DEFAULT = "h100"
"""The kind that plans are for where neither the config nor the command says."""


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
    nvlink_gpus: int = GPUS_PER_NODE
    """How many of them NVLink joins."""
    cuda_name: str | None = None
    """CUDA's name of it."""
    node_memory_gb: float | None = None
    """Main memory of a node. None: not known, and nothing is refused for it."""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    """Shares of these figures that it reaches."""

    @property
    def platform(self) -> str:
        """The platform that a run on it has: `cpu` or `cuda`."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def usable_bytes(self) -> float:
        """What may be planned with."""
        return self.memory_gb * 1e9 * (1 - FRAGMENTS)

    def peak_flops(self, *, fp8: bool = False) -> float:
        """Floating-point operations per second at the best."""
        return (self.fp8_tflops if fp8 and self.fp8_tflops else self.bf16_tflops) * 1e12

    def link_gb_per_s(self, ranks: int) -> float:
        """Bandwidth in a group of `ranks` next to each other: NVLink among those that it joins, the network beyond them."""
        return self.nvlink_gb_per_s if ranks <= self.nvlink_gpus else self.network_gb_per_s

    @property
    def cluster(self) -> ClusterRates:
        """Nodes of these GPUs, as reshard plans are priced."""
        return ClusterRates(self.nvlink_gpus, self.hbm_gb_per_s / 2, self.nvlink_gb_per_s, self.network_gb_per_s)

    def in_cluster(self, rates: ClusterRates) -> GpuSpec:
        """The same GPU with the links of a cluster that is described apart."""
        most = rates.host_gb_per_s or math.inf  # which every other GPU is reached through
        nvlink, network = min(rates.nvlink_gb_per_s, most), min(rates.ib_gb_per_s, most)
        hbm, nvlink_gpus = 2 * rates.copy_gb_per_s, rates.gpus_per_node
        return replace(self, hbm_gb_per_s=hbm, nvlink_gb_per_s=nvlink, network_gb_per_s=network, nvlink_gpus=nvlink_gpus)


def chosen_gpu(of_config: str | None, option: str | None) -> GpuSpec:
    """The GPU that `--gpu` names, else `resources.gpu` of the config, else `DEFAULT`.

    Raises:
        ConfigError: it is no kind of gpus.yaml, or its file cannot be used.
    """
    if option is not None:
        return gpu_named(option, "--gpu")
    return gpu_named(of_config or DEFAULT, "resources.gpu")


def gpu_named(name: str, field: str = "--gpu") -> GpuSpec:
    """A GPU of gpus.yaml, or the one that a YAML file describes; `field` is who names it.

    Raises:
        ConfigError: there is none of this name, or the file cannot be used.
    """
    known = _known()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")):
        return _of_file(name)
    raise ConfigError(f"{field} is '{name}'; it must be {', '.join(known)} or a YAML file{nearest(name, list(known))}")


def gpu_called(cuda_name: str | None) -> GpuSpec | None:
    """The GPU that CUDA calls so; None if gpus.yaml has none of this name, as for other forms of a GPU, whose peaks differ."""
    return next((gpu for gpu in _known().values() if gpu.cuda_name is not None and gpu.cuda_name == cuda_name), None)


def with_efficiency(gpu: GpuSpec, share: float | None) -> GpuSpec:
    """The GPU with another share of its peak in training, whatever is computed and however lengths differ; None: as it is.

    Raises:
        ConfigError: it is no share.
    """
    if share is None:
        return gpu
    if not 0 < share <= 1:
        raise ConfigError(f"--efficiency is {share:g}; it must be above 0 and at most 1")
    return replace(gpu, efficiencies=replace(gpu.efficiencies, products=share, fp8=share, experts=share, unequal=1.0))


def given_efficiencies(gpu: GpuSpec) -> str:
    """In words, the efficiencies that are not those assumed of every GPU; empty: all are."""
    assumed = asdict(Efficiencies())
    return ", ".join(f"{name} {value:g}" for name, value in asdict(gpu.efficiencies).items() if value != assumed[name])


@cache
def _known() -> dict[str, GpuSpec]:
    return {name: GpuSpec(name, **figures) for name, figures in read_yaml(Path(__file__).with_name("gpus.yaml")).items()}


def _of_file(path: str) -> GpuSpec:
    """A GPU of one's own: its figures, or those in which it differs from the kind that `like` names."""
    tree = read_yaml(path)
    names = [figure.name for figure in fields(GpuSpec)]
    for name in tree:
        if name not in (*names, "like"):
            raise ConfigError(f"{name} is no figure of a GPU{nearest(name, names)}; '{path}' may have like, {', '.join(names)}")
    like = tree.pop("like", None)
    base: dict[str, Any] = {}
    if like is not None:
        kinds = [name for name in _known() if name != "cpu"]
        if like not in kinds:
            raise ConfigError(f"like in '{path}' is {describe_value(like)}; it must be {', '.join(kinds)}")
        base = {name: getattr(_known()[like], name) for name in names} | {"cuda_name": None}
    base["efficiencies"] = _efficiencies(tree.pop("efficiencies", {}), base.get("efficiencies", Efficiencies()), path)
    figures = base | {"name": Path(path).stem} | tree
    optional = ("cuda_name", "nvlink_gpus", "node_memory_gb")
    if missing := [name for name in names if name not in (*figures, *optional)]:
        raise ConfigError(f"'{path}' has no {', '.join(missing)}: give all figures of the GPU, or a kind that it is like")
    _check_figures(figures, path)
    return GpuSpec(**figures)


def _check_figures(figures: Mapping[str, Any], path: str) -> None:
    for name, value in figures.items():
        if name in ("name", "cuda_name"):
            if not isinstance(value, str) and not (name == "cuda_name" and value is None):
                raise ConfigError(f"{name} in '{path}' is {describe_value(value)}; it must be text")
        elif name == "efficiencies" or (name in ("fp8_tflops", "node_memory_gb") and value is None):
            continue
        elif name == "nvlink_gpus" and not (type(value) is int and value >= 1):
            raise ConfigError(f"{name} in '{path}' is {describe_value(value)}; it must be a whole number above 0")
        elif not _is_number(value) or not 0 < value < float("inf"):
            raise ConfigError(f"{name} in '{path}' is {describe_value(value)}; it must be a number above 0")


def _efficiencies(given: Any, base: Efficiencies, path: str) -> Efficiencies:
    """`base` with what a file's section `efficiencies` gives: shares, fixed seconds, and rates."""
    names = [figure.name for figure in fields(Efficiencies)]
    if not isinstance(given, dict):
        raise ConfigError(f"efficiencies in '{path}' is {describe_value(given)}; it must be a mapping of {', '.join(names)}")
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"efficiencies.{name} in '{path}' is unknown{nearest(name, names)}; it may be {', '.join(names)}")
        if is_share(name):
            allowed, fits = "above 0 and at most 1", lambda number: 0 < number <= 1
        elif name.endswith("_per_s"):
            allowed, fits = "a number above 0", lambda number: 0 < number < float("inf")
        else:
            allowed, fits = "a number of seconds, 0 or more", lambda number: 0 <= number < float("inf")
        if not _is_number(value) or not fits(value):
            raise ConfigError(f"efficiencies.{name} in '{path}' is {describe_value(value)}; it must be {allowed}")
    return Efficiencies(**(asdict(base) | given))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
