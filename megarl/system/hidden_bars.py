"""Progress bars of libraries that megarl calls: it has its own."""

from __future__ import annotations


def hide_bars() -> None:
    """Have transformers draw no bars in this process, such as \"Loading weights\" and \"Writing model shards\"."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
