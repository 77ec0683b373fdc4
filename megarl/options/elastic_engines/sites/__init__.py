"""Engines of another site: `megarl node join`, the run's side of it, and the weights that go there."""
