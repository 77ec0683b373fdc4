"""One prompt as SGLang is asked for it, and whether it computed with that prompt.

SGLang (0.5.23) takes a prompt with one placeholder for each picture, and puts in as many as the picture has tokens. A prompt
that shows a video is sent whole, with the two frames of each part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.data.media import Media
from megarl.errors import EngineError


class AskedPrompt:
    """A prompt of token ids: what a request says of it."""

    def __init__(self, ids: Sequence[int], body: Mapping[str, Any] | None = None) -> None:
        """`body`: None where the ids are all there is to say."""
        self.ids = list(ids)
        self.shows_pictures = body is not None
        self.body: dict[str, Any] = {"input_ids": self.ids} if body is None else dict(body)

    @classmethod
    def seeing(cls, ids: Sequence[int], media: Sequence[Media], folder: Path | None) -> AskedPrompt:
        """A prompt that shows `media`, whose pictures the server reads in `folder`.

        Raises:
            EngineError: there is no such folder, or a video among them that is more than two frames.
        """
        if not media:
            return cls(ids)
        if folder is None:
            raise EngineError("a prompt shows pictures, but the engine was started without a media folder to read them from")
        if any(item.grid[0] > 1 for item in media):
            raise EngineError("a prompt shows a video as one; SGLang's servers are shown its frames, as pictures or in pairs")
        pictures = [str(file) for item in media if item.kind == "image" for file in item.files(folder)]
        pairs = [[str(file) for file in item.files(folder)] for item in media if item.kind == "video"]
        if pairs:
            body = {"input_ids": list(ids), "image_data": pictures or None, "video_data": pairs}
            return cls(ids, body | {"return_prompt_token_ids": True})
        dropped = {at for item in media for at in range(item.place + 1, item.place + item.tokens)}
        short = [token for at, token in enumerate(ids) if at not in dropped]
        return cls(ids, {"input_ids": short, "image_data": pictures, "return_prompt_token_ids": True})

    def followed_by(self, ids: Sequence[int]) -> AskedPrompt:
        """This prompt and, behind it, what was sampled of a response: it shows no further pictures."""
        whole = AskedPrompt([*self.ids, *ids], {**self.body, "input_ids": [*self.body["input_ids"], *ids]})
        whole.shows_pictures = self.shows_pictures
        return whole

    def check(self, answer: Mapping[str, Any], url: str) -> None:
        """Raise EngineError if pictures came out as other tokens than the trainer computes with."""
        if not self.shows_pictures:
            return
        computed = answer.get("prompt_token_ids")
        if computed != self.ids:
            seen = f"{len(computed)} tokens" if isinstance(computed, list) else "none"
            raise EngineError(
                f"{url} computed with another prompt than it was asked: {seen} instead of {len(self.ids)}, of which pictures "
                "have a part; its image processor must be that of the model folder"
            )
