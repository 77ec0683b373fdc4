"""Part that SGLang's servers (0.5.23) lack for `megarl serve`, installed in each of a server's processes: seeds of requests
without deterministic inference.

Of SGLang nothing is imported before `install` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

SERVED_NAME = "megarl-serve"
"""The name that servers of `megarl serve` call their model by (`--served-model-name`)."""
_GOLDEN, _MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)
"""Constants of splitmix64 as signed integers (Steele, Lea and Flood 2014)."""


def install(arguments: Sequence[str]) -> None:
    """Replace SGLang's functions in a process of a server that was started with `arguments`, if it is of `megarl serve`."""
    if SERVED_NAME not in arguments:
        return
    _obey_seeds()


def _obey_seeds() -> None:
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
        """SGLang reads seeds in deterministic inference alone, whose kernels are slower."""
        made = make(cls, batch, vocab_size)
        if made.sampling_seed is None:
            seeds = [seed_of(request.sampling_params.sampling_seed, request.rid) for request in batch.reqs]
            made.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device)
        return made

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)
    sampler.multinomial_with_seed = draw_with_seeds


def seed_of(seed: int | None, name: str) -> int:
    """A request's own seed, or one by its name: the same in every rank, which must all draw the same token."""
    if seed is not None:
        return seed
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def draw_with_seeds(log_weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One column for each row, int64 `[N, 1]`, by exp(`log_weights`) `[N, V]`; the same for the same seed at the same position,
    whichever rows are beside it. `seeds` and `positions` int64 `[N]`."""
    from megarl.rollout.engines.drawing import draw  # servers of other runs import this file, too

    return draw(log_weights.double().exp(), uniform(seeds, positions))[:, None]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 `[N]` from 0 up to 1, of 53 bits, by a hash of `seeds` and `positions` int64 `[N]`."""
    mixed = _hashed(seeds.long()) + positions.long() * _GOLDEN
    return (_shifted(_hashed(mixed), 11)).double() * 2.0**-53


def _hashed(values: Tensor) -> Tensor:
    """splitmix64 of each value; products wrap."""
    values = values + _GOLDEN
    values = (values ^ _shifted(values, 30)) * _MIX[0]
    values = (values ^ _shifted(values, 27)) * _MIX[1]
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """The 64 bits of each value moved right, with zeros in front."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
