"""How fast the policy is trained: operations that its model needs for the tokens of a step, over the ranks' time in updates."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.plan import FlopsModel
from megarl.data.stream import MicroBatch
from megarl.observe.trace import Span

PASSES = 3
"""A backward pass takes twice the operations of a forward pass. What is recomputed in it is not counted."""


def update_flops(
    flops: FlopsModel, micro_batches: Sequence[MicroBatch], *, shared_prompts: bool, score_at: bool, logits: bool
) -> int:
    """Floating-point operations of an update on `micro_batches`, whoever computes them.

    Counted are the tokens that are fed (a response's last token only with `score_at`), the pairs of a token and one it attends
    to, and, with `logits`, the output rows of scored tokens. Without `shared_prompts` each response has its prompt to itself.
    """
    total = 0
    for unit in (unit for micro_batch in micro_batches for unit in micro_batch):
        fed = [len(response.token_ids) - (not score_at) for response in unit.responses]
        prompt = len(unit.prompt_ids)
        own = [fed] if shared_prompts else [[length] for length in fed]
        total += sum(flops.cost(prompt, lengths) - flops.per_logit_row * sum(lengths) for lengths in own)
        if logits:
            total += flops.per_logit_row * sum(int(response.mask.sum()) for response in unit.responses)
    return PASSES * total


def throughput(operations: int, ranks: Sequence[Sequence[Span]], peak_flops: float | None) -> dict[str, float]:
    """`policy/tflops_per_gpu`, and `policy/mfu` where the peak of a GPU is known; nothing for a step without an update.

    `ranks` are the policy's spans by rank: the rank that was longest in updates says how long they took.
    """
    seconds = max(sum(end - begin for name, begin, end in spans if name == "update") for spans in ranks)
    if not operations or not seconds:
        return {}
    per_gpu = operations / len(ranks) / seconds
    return {"policy/tflops_per_gpu": per_gpu / 1e12} | ({"policy/mfu": per_gpu / peak_flops} if peak_flops else {})
