"""Best-of-n distillation: the best of n sampled answers to each question is what the policy learns, by cross-entropy.

`make tiny-model`, then `python examples/python/best_of_n.py`.
"""

import sys

import megarl


def main(rounds: int = 10) -> list[float]:
    """Train; returns the share of right answers in each round."""
    shares = []
    with megarl.open("examples/tiny/grpo.yaml") as session:
        for number in range(rounds):
            session.sync_weights()
            best = []
            groups = session.sample(session.prompts(64), n=8)
            rewards = [session.reward(group) for group in groups]
            for group, judged in zip(groups, rewards, strict=True):
                if max(judged) > 0:
                    best.append(group[judged.index(max(judged))])
            loss = session.forward_backward(session.batch(best), "cross_entropy")
            session.optimizer_step()
            shares.append(sum(map(sum, rewards)) / sum(map(len, rewards)))
            print(f"round {number + 1}: {shares[-1]:.0%} right, {len(best)} learnt, loss {loss['policy/loss']:.3f}")
        session.export("runs/best-of-n/model")
    return shares


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
