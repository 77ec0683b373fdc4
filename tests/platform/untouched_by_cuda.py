"""A program: on a machine that claims to have CUDA, installing the platform must leave torch and megatron's import alone.
Prints the attributes that changed, one a line; nothing when the promise holds."""

from __future__ import annotations

import sys
from inspect import getattr_static

import torch
import torch.distributed


def snapshot() -> dict[str, object]:
    """Return every attribute of the objects that the CPU platform redirects, by its dotted name."""
    gloo = torch.distributed.ProcessGroupGloo
    owners = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.distributed, gloo)
    attributes = {f"{owner.__name__}.{name}": getattr_static(owner, name, None) for owner in owners for name in dir(owner)}
    for kind in (torch.optim.Optimizer, torch.optim.Adam, torch.optim.SGD):  # which inherit from each other
        attributes |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    return attributes | {f"sys.meta_path[{i}]": finder for i, finder in enumerate(sys.meta_path)}


def main(cuda_is_present: bool) -> None:
    """Install once and print what became another object."""
    before = snapshot()
    import megarl
    from megarl import platform

    assert megarl.__name__ == "megarl"
    platform.cuda_present = lambda: cuda_is_present
    installed = platform.install()
    assert installed is platform.current()
    assert (installed.name, installed.collective_backend) == (("cuda", "nccl") if cuda_is_present else ("cpu", "gloo"))
    after = snapshot()
    assert before.keys() <= after.keys()
    print("\n".join(sorted(name for name, value in before.items() if after[name] is not value)))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1] == "cuda")
