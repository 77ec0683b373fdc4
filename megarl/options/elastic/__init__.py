"""Ranks that are lost are replaced while the others keep their processes, and the step under way is computed again."""
