"""A game of two: players in turn add 1, 2 or 3 to a total, and who makes it ten wins. The policy plays both sides.

Every move is a prompt of its own. Its value is 1 if its player wins, -1 if not, and -3 if it was no move, which loses at once;
its advantage is what it is worth beyond the other moves from the same total.
`make tiny-model`, then `python examples/python/race_to_ten.py`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import mean

import megarl

GOAL, MOVES, GAMES = 10, ("1", "2", "3"), 128


def play(session: megarl.Session) -> list[tuple[megarl.Sample, float, int]]:
    """Play all games at once, move by move; returns every move with its value and the total before it."""
    totals, going = [0] * GAMES, list(range(GAMES))
    moves: list[list[tuple[megarl.Sample, int]]] = [[] for _ in range(GAMES)]
    while going:
        answers = session.sample([f"Calculate {totals[game]} + 0." for game in going])
        for game, (answer,) in zip(tuple(going), answers, strict=True):
            moves[game].append((answer, totals[game]))
            move = answer.response_text.strip()
            is_legal = move in MOVES and totals[game] + int(move) <= GOAL
            totals[game] += int(move) if is_legal else 0
            if not is_legal or totals[game] == GOAL:
                going.remove(game)
    played = []
    for total, of_game in zip(totals, moves, strict=True):
        value = 1.0 if total == GOAL else -3.0
        for sample, before in reversed(of_game):
            played.append((sample, value, before))
            value = 1.0 if value < 0 else -1.0
    return played


def main(steps: int = 40) -> list[float]:
    """Train; returns the share of legal moves in each step."""
    shares = []
    with megarl.open(
        model={"path": "models/tiny-arithmetic", "dtype": "float32"},
        policy={"optimizer": {"lr": 5e-4}},
        data={"chat_template": "never"},
        rollout={"engine": "embedded", "max_new_tokens": 2},
        algorithm={"kl": {"coef": 0.0}, "entropy": {"coef": 0.02}},
    ) as session:
        for step in range(steps):
            session.sync_weights()
            played = play(session)
            of_total = defaultdict(list)
            for _, value, before in played:
                of_total[before].append(value)
            advantages = [value - mean(of_total[before]) for _, value, before in played]
            session.forward_backward(session.batch([sample for sample, _, _ in played]), "reinforce", advantages=advantages)
            session.optimizer_step()
            shares.append(mean(value > -3 for _, value, _ in played))
            print(f"step {step + 1}: {len(played) / GAMES:.1f} moves per game, {shares[-1]:.0%} of them legal")
    return shares


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
