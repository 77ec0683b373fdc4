"""The training loops and what they share."""
