"""Folders of tiny vision-language models for tests of rows: a config, a byte tokenizer, an image processor and a chat template.

No weights: what rows become needs none. The template writes what those of Qwen2-VL to Qwen3-VL write for text and pictures;
that of GLM has other words in their place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm4vProcessor, PreTrainedTokenizerFast, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.options.pictures.picture_rules import PADDING
from tests.padded_pictures import padded_inputs

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
OF_GLM = {
    "<|vision_start|>": "<|begin_of_image|>",
    "<|vision_end|>": "<|end_of_image|>",
    "<|image_pad|>": "<|image|>",
    "<|video_pad|>": "<|video|>",
}
"""What GLM calls the special tokens; it has two more."""
VIDEOS_OF_GLM = ["<|begin_of_video|>", "<|end_of_video|>"]
OF_KIMI = {
    "<|vision_start|>": "<|media_begin|>",
    "<|vision_end|>": "<|media_end|>",
    "<|image_pad|>": "<|media_pad|>",
    "<|video_pad|>": "<|media_content|>",
}
"""What Kimi calls them; its tokenizer has none for videos, and a word and a further token inside of a picture."""
NO_TOKEN = 9999
MERGES = [("<", "|"), ("Ġ", "t"), ("Ġt", "h"), (">", "?"), ("Ċ", "Ċ"), ("H", "o"), ("Ho", "w")]
"""Some of which would join text with what stands beside a picture, were that text, too."""
TEMPLATE = """
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}},
    "qwen3_vl": {
        "patch_size": 16,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "glm4v_moe": {"patch_size": 14, "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64}},
    "kimi_k25": {"max_patches": 400, "size": {"max_height": 24, "max_width": 24}},
}


class PaddingProcessor(BaseImageProcessor):
    """Kimi's image processor as `tests/padded_pictures.py` computes it; transformers' own needs torchvision."""

    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012 - as transformers has it
    merge_size = 2

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = {"image_processor_type": PADDING} | settings

    def __call__(self, images: Any, **unused: Any) -> Any:
        """Pixels and grids of a list of pictures."""
        limits = {"max_patches": self.settings["max_patches"], "longest": self.settings["size"]["max_height"]}
        return BatchFeature(padded_inputs([*images], **limits))

    def save_pretrained(self, folder: Any, **unused: Any) -> None:
        """Write the settings as transformers does."""
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.settings))


def spoken(family: str, text: str) -> str:
    """`text` with the family's special tokens in place of Qwen's."""
    for qwen, own in {"glm4v_moe": OF_GLM, "kimi_k25": OF_KIMI}.get(family, {}).items():
        text = text.replace(qwen, own)
    return text


def image_processor(family: str, **more: Any) -> Any:
    """transformers' own, with the settings of `PROCESSORS`."""
    if family == "kimi_k25":
        return PaddingProcessor(**PROCESSORS[family] | more)
    kind = Glm4vImageProcessorPil if family == "glm4v_moe" else Qwen2VLImageProcessorPil
    return kind(**PROCESSORS[family] | more)


def seeing_tokenizer(template: str | None = TEMPLATE, family: str = "qwen2_vl") -> Any:
    """The tokens of `SPECIAL`, one per byte, and `MERGES`."""
    special = [spoken(family, token) for token in SPECIAL] + (VIDEOS_OF_GLM if family == "glm4v_moe" else [])
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(words)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    template = None if template is None else spoken(family, template)
    if template is not None and family == "kimi_k25":
        template = template.replace("<|media_begin|>", "<|media_begin|>image<|media_content|>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def seeing_folder(folder: Path, family: str = "qwen2_vl", *, template: str | None = TEMPLATE, **processor: Any) -> Path:
    """A model folder of `family`; `processor` changes its image processor."""
    seeing_tokenizer(template, family).save_pretrained(folder)
    image_processor(family, **processor).save_pretrained(folder)
    of_glm = family == "glm4v_moe"
    marks = "image" if of_glm else "vision"
    config = {
        "model_type": family,
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        f"{marks}_start_token_id": SPECIAL.index("<|vision_start|>"),
        f"{marks}_end_token_id": SPECIAL.index("<|vision_end|>"),
        **({"video_start_token_id": len(SPECIAL), "video_end_token_id": len(SPECIAL) + 1} if of_glm else {}),
        "vision_config": {},
    }
    config |= {"video_token_id": NO_TOKEN} if family == "kimi_k25" else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def processor_of(family: str) -> Any:
    """transformers' own processor for the same model; without a video processor, which needs torchvision."""
    kinds = {"qwen2_vl": Qwen2VLProcessor, "qwen3_vl": Qwen3VLProcessor, "glm4v_moe": Glm4vProcessor}
    kind = (kinds | {"kimi_k25": Kimi_K25Processor})[family]
    tokenizer = seeing_tokenizer(family=family)
    return _without_video(kind)(image_processor(family), tokenizer, chat_template=tokenizer.chat_template)


def _without_video(kind: type) -> type:
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})


def processed(family: str, messages: Sequence[dict[str, Any]], pictures: Sequence[Image.Image], *, ask: bool = True) -> Any:
    """What transformers' processor makes of a conversation with `pictures` at its parts of type image."""
    processor = processor_of(family)
    text = processor.apply_chat_template(list(messages), add_generation_prompt=ask, tokenize=False)
    return processor(text=[text], images=list(pictures) or None, return_tensors="pt")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Colours that differ from pixel to pixel."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file with `image`."""
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
