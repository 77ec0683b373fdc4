"""Parts of every kind of run: its folder, phases, checkpoints, guards and profile, its models on the ranks, and their start."""
