"""Drawing of tokens in the SGLang server on a CPU: one random number a row, instead of one for each token of the vocabulary.

SGLang draws by a race of exponential variables: 64 x 49,152 of them for 64 requests of SmolLM2, made by one thread in 60 ms.
By the inverse of the cumulative distribution it takes 8 ms. The distribution is the same.
"""

from __future__ import annotations

import torch

from megarl.rollout.engines.drawing import draw


def draw_rows(probs: torch.Tensor) -> torch.Tensor:
    """One token, int32 [B], for each row of `probs` [B, V], with numbers of torch's own generator."""
    return draw(probs, torch.rand(len(probs), dtype=torch.float64)).to(torch.int32)


def install() -> None:
    """Have SGLang 0.5.23 draw so where no request has a seed of its own."""
    from sglang.srt.layers import sampler

    with_seeds = sampler.sampling_from_probs_torch

    def sampling_from_probs(
        probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if sampling_seed is None:
            return draw_rows(probs)
        return with_seeds(probs, sampling_seed, positions)  # type: ignore[no-any-return]

    sampler.sampling_from_probs_torch = sampling_from_probs
