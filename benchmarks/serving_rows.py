"""The part `prompts` of benchmarks/serving.py: a pass over datums that begin alike, with and without asking a head once.

One rank in this process. Each datum has a log-prob at each of its positions, so that without it the common prompts go through
the output layer as often as there are datums.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from serving_parts import LAYERS, rank_of_this_process, shortened, timed

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 2, 8, 47, 32, 3


def common_prompts(work: Path) -> dict[str, Any]:
    """CPU seconds of a pass in both ways, in turns (medians), and the ratio."""
    role = rank_of_this_process(shortened(work, LAYERS))
    from megarl.megatron import asked_rows
    from megarl.megatron.gathered_updates import gather
    from megarl.options.serve.losses import ServedLoss

    loss, found, worth_it = (
        ServedLoss("importance_sampling", {}, PROMPTS * SAMPLES),
        {"once": [], "each": []},
        asked_rows.WORTH_IT,
    )
    for number in range(ROUNDS + 1):
        for name, share in (("once", worth_it), ("each", 0.0)):
            asked_rows.WORTH_IT = share
            _, cpu = timed(partial(gather, role, [units()], loss))
            found[name] += [cpu] if number else []
    asked_rows.WORTH_IT = worth_it
    torch.distributed.destroy_process_group()
    seconds = {f"{name}_cpu_s": statistics.median(took) for name, took in found.items()}
    setup = {"prompts": PROMPTS, "samples": SAMPLES, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    return {"setup": setup | {"layers": LAYERS}, **seconds, "each_over_once": seconds["each_cpu_s"] / seconds["once_cpu_s"]}


def units() -> list[Any]:
    """A micro-batch as the server lays it."""
    from megarl.data.stream import Response, Unit

    made, scored = [], PROMPT_TOKENS - 1 + NEW_TOKENS
    for prompt in range(PROMPTS):
        common, responses = torch.arange(100 + 60 * prompt, 100 + 60 * prompt + PROMPT_TOKENS), []
        for number in range(SAMPLES):
            tokens = torch.cat([common, torch.arange(500 + 40 * number, 500 + 40 * number + NEW_TOKENS)])
            advantages = torch.zeros(scored)
            advantages[PROMPT_TOKENS - 1 :] = float(number % 5) - 2.0
            columns = {"logprobs": torch.zeros(scored), "advantages": advantages}
            responses.append(Response(prompt * SAMPLES + number, tokens[1:], torch.ones(scored) > 0, columns))
        made.append(Unit(common[:1], responses))
    return made
