"""Mistakes of SGLang 0.5.23 that end a run, mended in the server's process, where prompts become what the model takes."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Replace SGLang's functions; call it before requests come."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    positions = MRotaryEmbedding.get_rope_index_glm4v

    def of_the_sent_ids(**given: Any) -> Any:
        """Without the mask, which is of the ids that SGLang makes anew of the prompt's text: they may be more or fewer than
        those that were sent. A prompt is computed alone, so that there is no padding to mask."""
        return positions(**given | {"attention_mask": None})

    MRotaryEmbedding.get_rope_index_glm4v = staticmethod(of_the_sent_ids)
