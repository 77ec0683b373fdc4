"""The trainer's GPUs lent to further engines while the trainer would wait: `rollout.schedule.lent_engines`."""
