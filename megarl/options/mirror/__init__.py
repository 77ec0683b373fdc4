"""Second copies of checkpoints and records: `run.mirror`."""
