"""Pair losses on sampled responses: of every group the best response and the worst."""
