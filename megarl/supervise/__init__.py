"""Watching over a run: it trains in a process of its own, is started again after a failure, and leaves nothing behind."""
