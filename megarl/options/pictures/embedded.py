"""What a transformers model that sees takes beside token ids: pixels, grids, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.data.media import Media
from megarl.errors import EngineError
from megarl.models.vision import Vision
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.picture_rules import load_picture_rules
from megarl.options.pictures.pixels import Pictures
from megarl.options.pictures.positions import prompt_positions
from megarl.options.pictures.sounds import Sounds, load_sound_rules
from megarl.rollout.engines.embedded_batch import SeenPrompt


class PictureInputs:
    """The pictures of a run as the model in `folder` takes them."""

    def __init__(self, vision: Vision, folder: str | Path, media_folder: Path | None) -> None:
        self.vision = vision
        self.pictures: Pictures | Sounds | None = None
        if media_folder is not None and isinstance(vision, Hearing):
            self.pictures = Sounds(media_folder, load_sound_rules(folder, vision))
        elif media_folder is not None:
            self.pictures = Pictures(media_folder, load_picture_rules(folder))

    def prompt(self, ids: Sequence[int], media: Sequence[Media]) -> SeenPrompt:
        """Raises EngineError if it shows a video as one, not by frames or pairs of them, or pictures that are in no folder."""
        if media and self.pictures is None:
            raise EngineError("a prompt shows pictures, but the engine was started without a media folder to read them from")
        if any(shown.kind == "video" and (shown.grid[0] > 1 or self.vision.tokens_per_second is not None) for shown in media):
            raise EngineError("a prompt shows a video as one; the embedded engine is shown its frames as pictures")
        return SeenPrompt(tuple(media), prompt_positions(len(ids), media, self.vision))

    def inputs(self, prompts: Sequence[SeenPrompt], responses: Sequence[int]) -> dict[str, Any]:
        """What the model takes beside ids, of prompts with so many response tokens, all padded on the left."""
        positions = [prompt.positions_with(length) for prompt, length in zip(prompts, responses, strict=True)]
        longest = max(found.shape[-1] for found in positions)
        laid = torch.zeros(*positions[0].shape[:-1], len(prompts), longest, dtype=torch.long)
        kinds = torch.zeros(len(prompts), longest, dtype=torch.int)
        for row, (prompt, row_positions) in enumerate(zip(prompts, positions, strict=True)):
            start = longest - row_positions.shape[-1]
            laid[..., row, start:] = row_positions
            for shown in prompt.media:
                kinds[row, start + shown.place : start + shown.place + shown.tokens] = 1 if shown.kind == "image" else 2
        found: dict[str, Any] = {"position_ids": laid}
        if isinstance(self.vision, Hearing):
            return found | self._heard([shown for prompt in prompts for shown in prompt.media])
        found |= {"mm_token_type_ids": kinds} if self.vision.mrope is not None else {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            media = [shown for prompt in prompts for shown in prompt.media if shown.kind == kind]
            if media and self.pictures is not None:
                found[pixels] = torch.cat([self.pictures.patches(shown) for shown in media])
                found[f"{kind}_grid_thw"] = torch.tensor([shown.grid for shown in media])
        return found

    def _heard(self, media: Sequence[Media]) -> dict[str, Any]:
        """Frames `[sounds, mel_bins, most frames]` and which of them each sound has; nothing where there is none."""
        if not media or self.pictures is None:
            return {}
        frames = [self.pictures.patches(shown) for shown in media]
        laid = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
        lengths = torch.tensor([len(of_one) for of_one in frames])
        mask = (torch.arange(laid.shape[1]) < lengths[:, None]).long()
        return {"input_features": laid.mT, "feature_attention_mask": mask}
