"""GRPO by hand: groups of answers, rewards, advantages, one update per step; the same numbers as examples/tiny/grpo.yaml.

`make tiny-model`, then `python examples/python/grpo.py`.
"""

from __future__ import annotations

import statistics
import sys

import megarl


def right(sample: megarl.Sample) -> float:
    """1 for the sum, 0 for anything else."""
    return float(sample.response_text.strip() == sample.row["answer"])


def main(steps: int = 20) -> list[float]:
    """Train; returns the mean reward of each step."""
    means = []
    with megarl.open("examples/tiny/grpo.yaml", rewards=[right]) as session:
        for step in range(steps):
            session.sync_weights()
            groups = session.sample(session.prompts(64), n=8)
            rewards = [[right(sample) for sample in group] for group in groups]
            advantages = []
            for group in rewards:
                mean, spread = statistics.mean(group), statistics.stdev(group)
                advantages += [(reward - mean) / (spread + 1e-6) for reward in group]
            batch = session.batch(groups)
            loss = session.forward_backward(batch, "clip", advantages=advantages)
            update = session.optimizer_step()
            means.append(statistics.mean(map(statistics.mean, rewards)))
            print(f"step {step + 1}: reward {means[-1]:.3f}, loss {loss['policy/loss']:+.4f}, norm {update['grad_norm']:.3f}")
        print(f"held out: {session.evaluate()['accuracy']:.0%}")
    return means


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
