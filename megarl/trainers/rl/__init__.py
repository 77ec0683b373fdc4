"""Reinforcement learning: `loop.py` is the loop, `run.py` its verbs, and the other files what a verb needs."""
