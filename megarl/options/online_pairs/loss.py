"""A preference loss on sampled responses, as a value that the driver sends to the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.preference import PreferenceSettings, share_above
from megarl.data.stream import PackedStream
from megarl.experience.pairs import first_of_each, pair_losses, per_response, sides


@dataclass(frozen=True)
class PairLoss:
    """The preference loss `name`. It reads the columns `pair` and `is_chosen`; both sides of a pair are in the stream."""

    name: str
    settings: PreferenceSettings

    def __call__(self, log_probs: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probs `[N]` → a number per token `[N]`, and sums: with the weight 1/(2P) of every token the mean over P pairs.

        Each token of a pair has the pair's loss, over the mean number of tokens of its sides. A pair of weight 0 counts in no
        sum.
        """
        chosen, rejected = sides(stream)
        policy, reference = (per_response(values, stream) for values in (log_probs, stream.columns["reference_log_probs"]))
        tokens, weights = stream.lengths, 2 * first_of_each(stream.columns["weights"], stream)
        losses, _ = pair_losses(self.name, (chosen, rejected), policy, reference, tokens, self.settings)
        share = 2 * losses / (tokens[chosen] + tokens[rejected])
        of_response = torch.zeros_like(policy).index_add(0, chosen, share).index_add(0, rejected, share)
        rewards = self.settings.beta * (policy.detach() - reference)
        margins = rewards[chosen] - rewards[rejected]
        return of_response[stream.response], {
            "pair_accuracy": (weights[chosen] * share_above(rewards[chosen], rewards[rejected])).sum(),
            "pair_margin": (weights[chosen] * margins).sum(),
        }
