"""Run as a program: what transformers' Qwen3VLProcessor makes of a prompt with videos, which needs SGLang's torchvision.

Usage: python -m tests.data.torchvision_processor IN.npz OUT.npz. IN holds `messages` and `size` (JSON), of each video
`video<n>` uint8 [T, H, W, 3] with `metadata` (JSON: fps, frames_indices and total_num_frames of each), and pictures `image<n>`.
OUT holds `ids`, `grids` [V, 3], `pixels` and `image_grids`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from megarl.rollout.engines.sglang.on_cpu import stand_ins


def main(given: Path, out: Path) -> None:
    """Read, compute, write."""
    stand_ins.install(Path(sys.prefix) / "sglang-cpu")
    from PIL import Image
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    from tests.data.seeing_folders import PROCESSORS, TEMPLATE, seeing_tokenizer

    read = np.load(given)
    settings = PROCESSORS["qwen3_vl"]
    colours = {"image_mean": settings["image_mean"], "image_std": settings["image_std"]}
    videos = Qwen3VLVideoProcessor(size=json.loads(str(read["size"])), cap_pixels_per_frame=False, **colours)
    processor = Qwen3VLProcessor(Qwen2VLImageProcessorPil(**settings), seeing_tokenizer(), videos, chat_template=TEMPLATE)
    metadata = [VideoMetadata(**one) for one in json.loads(str(read["metadata"]))]
    text = processor.apply_chat_template(json.loads(str(read["messages"])), add_generation_prompt=True, tokenize=False)
    images = [Image.fromarray(read[f"image{number}"]) for number in range(sum(name.startswith("image") for name in read.files))]
    found = processor(
        text=[text], images=images or None, videos=[read[f"video{number}"] for number in range(len(metadata))],
        video_metadata=metadata, do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip
    np.savez(
        out, ids=found["input_ids"][0], grids=found["video_grid_thw"], pixels=found["pixel_values_videos"],
        image_grids=found.get("image_grid_thw", np.zeros((0, 3), int)),
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
