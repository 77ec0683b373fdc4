"""Reinforcement learning from a config: its rows are read, its processes started and handed to the loop in `core`."""
