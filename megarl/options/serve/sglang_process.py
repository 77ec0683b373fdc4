"""Parts that SGLang's servers (0.5.23) lack for `megarl serve`, installed in each of a server's processes: seeds of requests
without deterministic inference, and on a CPU adapters of the output layer for the rows that it is computed for.

Of SGLang nothing is imported before `install` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    if "torch_native" in arguments and "--enable-lora" in arguments:
        _route_rows_of_output_layer()


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


def _route_rows_of_output_layer() -> None:
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.lora.utils import get_lm_head_pruned_lens, merge_and_chunk_segments

    backend = torch_backend.TorchNativeLoRABackend
    prepare = backend.prepare_lora_batch

    def prepare_with_rows(self: Any, forward_batch: Any, weight_indices: list[int], *args: Any, **given: Any) -> None:
        """The output layer is given some of a batch's rows, and perhaps these in several passes; SGLang's PyTorch backend
        takes them for the batch's first ones."""
        prepare(self, forward_batch, weight_indices, *args, **given)
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        rows = get_lm_head_pruned_lens(forward_batch)
        if rows is None:
            return
        whole = merge_and_chunk_segments(weight_indices, rows, max(1, sum(rows)))
        self.lm_head_batch_info = _of_segments(self.batch_info, *whole)
        passes = self._get_lm_head_pass_segments(weight_indices, rows)
        if passes is not None:
            self.lm_head_pass_batch_infos = [_of_segments(self.batch_info, *segments) for segments in passes]

    def run_a(self: Any, x: Tensor, weights: Tensor, stack_num: int = 1, *, pruned_batch_info: Any = None, **_: Any) -> Tensor:
        info = pruned_batch_info or self.batch_info
        return torch_backend.sgemm_lora_a_fwd(inputs=x, weights=weights, batch_info=info, num_slices=stack_num)

    def run_b(
        self: Any,
        x: Tensor,
        weights: Tensor,
        output_offset_cpu: Tensor,
        base_output: Tensor | None = None,
        *,
        pruned_batch_info: Any = None,
        **_: Any,
    ) -> Tensor:
        return torch_backend.sgemm_lora_b_fwd(
            inputs=x,
            weights=weights,
            batch_info=pruned_batch_info or self.batch_info,
            slice_offsets=output_offset_cpu,
            base_output=base_output,
        )

    backend.prepare_lora_batch, backend.run_lora_a_sgemm, backend.run_lora_b_sgemm = prepare_with_rows, run_a, run_b


def _of_segments(info: Any, weight_indices: list[int], lengths: list[int]) -> Any:
    """A batch's information for other rows: by segment which adapters they have, and how many there are."""
    return replace(
        info,
        weight_indices_cpu=torch.tensor(weight_indices, dtype=torch.int32),
        seg_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        expected_tokens=sum(lengths),
    )
