"""What every kind of run has: its folder, phases, checkpoints, guards and profile, its models on the ranks, and their start."""
