"""From samples to advantages, loss weights and objectives, and the figures of a step and of an evaluation."""
