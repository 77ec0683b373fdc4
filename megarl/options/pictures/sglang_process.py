"""Native videos of SGLang's servers (0.5.23): they compute with the patches of the trainer's own frames, pair by pair.

SGLang opens files of videos, chooses frames and resizes them itself. Here a request names the kept frames, and has every
placeholder and time among its ids already; patches are made of the frames as the trainer makes them. Of SGLang nothing is
imported before `install` is called.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch

from megarl.options.pictures.picture_rules import TIMED_VIDEOS, PictureRules, load_picture_rules
from megarl.options.pictures.pixels import patches_of


def install(arguments: Sequence[str]) -> None:
    """Replace SGLang's functions in a process of a server that was started with `arguments`, if its model has such videos."""
    folder = arguments[arguments.index("--model-path") + 1]
    try:
        model_type = json.loads((Path(folder) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        return  # SGLang says what is wrong with the folder
    if model_type in TIMED_VIDEOS:
        _take_pairs_of_frames(load_picture_rules(folder))


def _take_pairs_of_frames(rules: PictureRules) -> None:
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    process = QwenVLImageProcessor.process_mm_data_async

    async def with_kept_frames(self: Any, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **given: Any) -> Any:
        """The processor's own of a request that shows no video; else its pictures come as it makes them, too: as patches."""
        if not request_obj.video_data:
            return await process(self, image_data, input_text, request_obj, *args, **given)
        request = copy(request_obj)
        pictures = [[file] for file in image_data or []]
        image_data = [await asyncio.to_thread(processed, pictures, "image", rules)] if pictures else None
        request.image_data = image_data
        request.video_data = [await asyncio.to_thread(processed, request_obj.video_data, "video", rules)]
        return await process(self, image_data, input_text, request, *args, **given)

    QwenVLImageProcessor.process_mm_data_async = with_kept_frames


def processed(shown: Sequence[Sequence[str]], kind: str, rules: PictureRules) -> dict[str, Any]:
    """Items for SGLang in place of files: the patches of the kept pictures or pairs of frames `shown`, and the grid of each.

    Raises:
        DataError: as `patches_of`.
    """
    patches = [patches_of([Path(file) for file in files], rules) for files in shown]
    sizes = [_grid(Path(files[0]), rules) for files in shown]
    name = "pixel_values" if kind == "image" else "pixel_values_videos"
    return {"format": "processor_output", name: torch.cat(patches), f"{kind}_grid_thw": torch.tensor(sizes)}


def _grid(file: Path, rules: PictureRules) -> tuple[int, int, int]:
    from PIL import Image

    with Image.open(file, formats=["PNG"]) as picture:
        return 1, picture.height // rules.patch, picture.width // rules.patch
