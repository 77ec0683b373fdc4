"""The maths of a step in figures: ns per token of each function of megarl/algorithms, beside a plain copy of what it reads.

    python benchmarks/algorithms.py --out benchmarks/results/algorithms.json

One process, no model. Losses and KL include their backward pass. Every round times the copy and then the function, so that
both see the same machine; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measured_code import code_of
from torch import Tensor
from workload import machine

from megarl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    Correction,
    LossSettings,
    RunningMean,
    correction,
    kl_per_token,
    masked_whiten,
    mismatch_sums,
    token_rewards,
    token_weights,
    turn_numbers,
    value_loss,
)
from megarl.algorithms.catalogue import LOSS_NEEDS

GROUP, SAMPLED, STEP_TOKENS, CHOSEN = 8, 0.8, 16, 50
"""Responses per prompt, share of tokens that the policy sampled, mean tokens per step of a process reward, and tokens of which
one is chosen for the losses that treat some apart."""

Case = tuple[str, list[Tensor], Callable[[], object]]
"""A function's name, the tensors of a value per token that it reads, and a call of it."""


def advantage_cases(mask: Tensor, noise: Tensor) -> Iterator[Case]:
    """Every estimator, on 0/1 scores in groups."""
    responses = len(mask)
    binary = (torch.arange(responses) % 3 == 0).float()
    inputs = AdvantageInputs(
        scores=binary,
        token_penalty=torch.zeros_like(noise[0]),
        mask=mask,
        groups=torch.arange(responses) // GROUP,
        values=noise[0],
        gamma=0.99,
        lam=0.95,
        baseline=RunningMean(),
        greedy_scores=binary,
        step_rewards=noise[1],
        step_ends=torch.rand(mask.shape) < 1 / STEP_TOKENS,
        rewards_by_source={"a": binary, "b": 1 - binary},
        reward_weights={"a": 1.0, "b": 0.5},
        turns=turn_numbers(mask),
        turn_rewards=noise[1],
        states=turn_numbers(mask),
        old_log_probs=-noise[0].abs(),
        collision=noise[1].abs(),
    )
    of_turns = [inputs.turns, inputs.turn_rewards]
    more = {
        "gae": [inputs.values],
        "grpo_process": [inputs.step_rewards, inputs.step_ends],
        "optimal_token_baseline": [inputs.old_log_probs, inputs.collision],
        "turn_rloo": of_turns,
        "gigpo": [*of_turns, inputs.states],
    }
    arguments: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 4}}
    for name in ADVANTAGES:
        read = [inputs.token_penalty, mask, *(x for x in more.get(name, []) if x is not None)]
        yield f"advantage/{name}", read, lambda name=name: ADVANTAGES.resolve(name)(inputs, **arguments.get(name, {}))


def batch_cases(mask: Tensor, noise: Tensor) -> Iterator[Case]:
    """What runs once over the batch besides the estimators."""
    old, rollout = noise[0], noise[0] + 0.1 * noise[1]
    scores = noise[2, :, 0]
    yield "token_rewards", [noise[0], mask], lambda: token_rewards(scores, noise[0], mask)
    yield "masked_whiten", [noise[0], mask], lambda: masked_whiten(noise[0], mask)
    yield "mismatch_sums", [old, rollout], lambda: mismatch_sums(old.flatten(), rollout.flatten())
    for mode in AGGREGATIONS:
        yield f"weights/{mode}", [mask], lambda mode=mode: token_weights(mask, mode, norm_length=mask.shape[1])
    for mode in CORRECTIONS:
        call = lambda mode=mode: correction(old, rollout, mask, [Correction(mode, 0.5, 2.0)])  # noqa: E731
        yield f"correction/{mode}", [old, rollout, mask], call


def loss_cases(mask: Tensor, noise: Tensor) -> Iterator[Case]:
    """Losses of one micro-batch of all tokens, forward and backward."""
    new, old, advantages = noise.flatten(1)
    new = (old + 0.1 * new).requires_grad_()
    response = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    columns = {"chosen": (torch.arange(len(old)) % CHOSEN == 0).float()}
    for name in POLICY_LOSSES:
        more = {column: columns[column] for column in LOSS_NEEDS[name].columns}

        def policy(name: str = name, more: dict[str, Tensor] = more) -> None:
            loss, _ = POLICY_LOSSES.resolve(name)(new, old, advantages, response=response, settings=LossSettings(), **more)
            loss.sum().backward()

        yield f"loss/{name}", [new.detach(), old, advantages, response, *more.values()], policy
    for name in KL_ESTIMATORS:
        yield f"kl/{name}", [new.detach(), old], lambda name=name: kl_per_token(new, old, name).sum().backward()

    def critic() -> None:
        value_loss(new, old, advantages, 0.2)[0].sum().backward()

    yield "loss/value", [new.detach(), old, advantages], critic


def measure(read: list[Tensor], call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median ns per token of `call` and of copying `read`, and their ratio; one round before the others does not count."""
    seconds: dict[str, list[float]] = {"function": [], "copy": []}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        copies = [x.clone() for x in read]
        copied = time.perf_counter()
        del copies
        before = time.perf_counter()
        call()
        seconds["copy"].append(copied - started)
        seconds["function"].append(time.perf_counter() - before)
    function, copy = (statistics.median(seconds[side][1:]) * 1e9 / read[0].numel() for side in ("function", "copy"))
    return {"ns_per_token": function, "copy_ns_per_token": copy, "over_copy": function / copy}


def main() -> None:
    """Measure, write the JSON file and print a line per function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("algorithms.json"), help="JSON file to write")
    parser.add_argument("--responses", type=int, default=1024, help="B, responses in the batch")
    parser.add_argument("--tokens", type=int, default=4096, help="T, tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "machine": machine(),
        "code": code_of("algorithms"),
        "setup": {
            "responses": arguments.responses,
            "tokens": arguments.tokens,
            "dtype": "float32",
            "group": GROUP,
            "sampled_share": SAMPLED,
            "tokens_per_step": STEP_TOKENS,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "functions": {},
    }
    shape = (arguments.responses, arguments.tokens)
    mask, noise = torch.rand(shape) < SAMPLED, torch.randn(3, *shape)
    for cases in (advantage_cases, batch_cases, loss_cases):
        for name, read, call in cases(mask, noise):
            figures = measure(read, call, arguments.rounds)
            result["functions"][name] = figures
            print(f"{name:42} {figures['ns_per_token']:7.2f} ns/token, {figures['over_copy']:6.1f} x a copy")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
