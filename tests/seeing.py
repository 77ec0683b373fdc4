"""One tiny random model of every family that sees, and prompts with pictures, for the tests that compare with transformers.

`SEEING` holds one entry per family; `build_seeing_folder(family, path)` writes its folder as the hub has it, and
`hugging_face(family)` is the same model as a transformers module. `pictures(family, folder)` writes a media folder, and
`units(family)` are four prompts that show its pictures: none, one, two (one of them again), and a video with a picture behind;
`units_of_turns(family)` are three with pictures between the turns of their responses.

Decoders have the sizes of tests/families. Towers have two layers or three, windows of 2 x 2 tokens where there are any, and
features added behind two layers where there is deepstack; no picture is square.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megarl.data.media import Media
from megarl.data.micro_batches import Grid
from megarl.data.stream import Response, Unit
from megarl.models.hf_folder import write_hf_folder
from megarl.models.registry import architecture_for
from megarl.models.transformers_names import with_prefix
from megarl.models.vision import Vision
from megarl.options.pictures.picture_rules import PADDING
from megarl.options.pictures.positions import prompt_positions, with_positions
from tests import families
from tests.families.family import SIZES, SPREAD
from tests.families.settings import KIMI
from tests.padded_pictures import padded_inputs

IMAGE, VIDEO, START, END = 120, 121, 122, 123
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
KIMI_TOKENS = {
    "image_token_id": "<|media_pad|>",
    "video_token_id": "<|kimi_k25_video_placeholder|>",
    "vision_start_token_id": "<|media_begin|>",
    "vision_end_token_id": "<|media_end|>",
}
"""Special tokens, from `IMAGE` on in this order, by what config.json calls their ids."""
TEXT_IDS = 120
"""Ids below this are text."""
SECONDS_PER_GRID = 1.3


@dataclass(frozen=True)
class SeeingFamily:
    """`class_prefix` of transformers' classes, what the two configs have of their own, and whether embeddings are tied."""

    class_prefix: str
    vision: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    num_experts: int | None = None
    patch: int = 14
    frames_apart: bool = False
    """Whether a video's frames are told apart by text between them."""
    videos: bool = True
    """Whether transformers computes a video beside pictures; where not, its frames are shown as pictures."""
    tokens: dict[str, str] = field(default_factory=lambda: QWEN_TOKENS)
    image_processor: str = "Qwen2VLImageProcessor"
    more: dict[str, Any] = field(default_factory=dict)
    """Fields beside the two configs."""


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections} | more}


SEEING: dict[str, SeeingFamily] = {
    "qwen2_vl": SeeingFamily(
        "Qwen2VL",
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32},
        _rope([1, 2, 1]),
    ),
    "qwen2_5_vl": SeeingFamily(
        "Qwen2_5_VL",
        {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 20,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "tokens_per_second": 2,
        },
        _rope([2, 1, 1]),
        tied=True,
    ),
    "qwen3_vl": SeeingFamily(
        "Qwen3VL",
        {
            "depth": 3,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 20,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        _rope([2, 2, 2], mrope_interleaved=True) | {"head_dim": 12, "num_key_value_heads": 1},
        patch=16,
        frames_apart=True,
    ),
    "qwen3_vl_moe": SeeingFamily(
        "Qwen3VLMoe",
        {
            "depth": 3,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 20,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        _rope([2, 2, 2], mrope_interleaved=True)
        | {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
        num_experts=4,
        patch=16,
        frames_apart=True,
    ),
    "glm4v_moe": SeeingFamily(
        "Glm4vMoe",
        {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 20,
            "out_hidden_size": 32,
            "image_size": 70,
        },
        _rope([2, 1, 1], partial_rotary_factor=0.5, rope_theta=10.0)  # of four pairs the last ones turn, too
        | {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
        | {"routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0},
        num_experts=8,
        videos=False,
        tokens=GLM_TOKENS,
        image_processor="Glm4vImageProcessor",
    ),
    "kimi_k25": SeeingFamily(
        "Kimi_K25",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "pos_emb_height": 5,  # no picture's grid
            "pos_emb_width": 5,
        },
        KIMI | {"model_type": "kimi_k2"},
        num_experts=8,
        videos=False,
        tokens=KIMI_TOKENS,
        image_processor=PADDING,
        more={"projection_hidden_size": 16},
    ),
}


def tower_grids(family: str, grids: Sequence[Grid]) -> list[Grid]:
    """The grids that a tower is given for these: GLM's takes the frames of a video one after the other."""
    return [part for grid in grids for part in ([grid] if SEEING[family].videos else [(1, *grid[1:])] * grid[0])]


def hf_config(family: str) -> Any:
    """transformers' config of `family`."""
    import transformers

    entry = SEEING[family]
    text = {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}
    return getattr(transformers, f"{entry.class_prefix}Config")(
        text_config=text | {"bos_token_id": None, "eos_token_id": None} | entry.text,
        vision_config={"patch_size": entry.patch} | entry.vision,
        **{name: IMAGE + number for number, name in enumerate(entry.tokens)},
        tie_word_embeddings=entry.tied,
        **entry.more,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def hugging_face(family: str) -> Any:
    """The model of `family` in float32, in evaluation mode, with seeded random values everywhere."""
    import transformers

    model_class = getattr(transformers, f"{SEEING[family].class_prefix}ForConditionalGeneration")
    model = model_class(hf_config(family)).float().eval()
    generator = torch.Generator().manual_seed(7)
    picks = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, value in (dict(model.named_parameters()) | picks).items():
            centre = 1.0 if ("norm" in name or "ln_q" in name) and name.endswith("weight") else 0.0
            spread = SPREAD / 5 if name in picks else SPREAD  # tokens must still matter
            value.copy_(centre + spread * torch.randn(value.shape, generator=generator))
    return model


SAVED_OTHERWISE = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.", "mm_projector."),
)
"""Beginnings of names that transformers 5.19 saves Kimi-K2.5 with, and those of the hub, which it also loads."""


def by_hub_name(family: str, model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named as the module's parameters (values or gradients), as a hub checkpoint has them."""
    if family == "kimi_k25":
        saved = revert_weight_conversion(model, dict(named))
        return {with_prefix(name, SAVED_OTHERWISE): tensor.clone() for name, tensor in saved.items()}
    if family == "glm4v_moe":
        return families.by_hub_name(model, iter(named.items()))
    if family in ("qwen2_vl", "qwen2_5_vl"):
        short = {"model.visual.": "visual.", "model.language_model.": "model."}
        for long, hub in short.items():
            named = {hub + n.removeprefix(long) if n.startswith(long) else n: tensor for n, tensor in named.items()}
    # transformers has the experts' matrices transposed
    return {name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in named.items()}


def hub_tensors(family: str, model: Any) -> dict[str, Tensor]:
    """What the model's safetensors file holds."""
    left_out = {"lm_head.weight"} if SEEING[family].tied else set()
    return by_hub_name(family, model, {name: value for name, value in model.state_dict().items() if name not in left_out})


def hub_gradients(family: str, model: Any) -> dict[str, Tensor]:
    """Gradients of every parameter after a backward pass, by hub name."""
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return by_hub_name(family, model, gradients)


def build_seeing_folder(family: str, path: Path) -> None:
    """Write the model of `family` to the new folder `path`, with the settings of its processor."""
    model = hugging_face(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    write_hf_folder(path, hub_tensors(family, model).items(), config)
    patch, kind = SEEING[family].patch, SEEING[family].image_processor
    settings: dict[str, Any] = {"image_processor_type": kind, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    settings["size"] = {"shortest_edge": patch**2 * 4, "longest_edge": 10**6}
    if kind == PADDING:
        settings |= {"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))


def vision_of(family: str) -> Vision:
    """What megarl reads of the family's config."""
    config = hf_config(family).to_dict()
    found = architecture_for(config).vision(config)
    assert found is not None
    return found


def tower_modules(model: Any) -> list[Any]:
    """The tower of transformers' model, and its projector where that is a module of its own."""
    own = model.model
    return [own.visual] if hasattr(own, "visual") else [own.vision_tower, own.mm_projector]


def seen_by(model: Any, patches: Tensor, grids: Tensor) -> Any:
    """What transformers' tower and projector make of pictures."""
    if hasattr(model.model, "visual"):
        return model.model.visual(patches, grid_thw=grids)
    return model.model.get_image_features(patches, image_grid_thw=grids, return_dict=True)


GRIDS = {"wide": (4, 6), "high": (8, 4), "flat": (2, 4), **{f"frame{number}": (4, 6) for number in range(4)}}
"""Height and width in patches of the pictures in a media folder."""


def pictures(family: str, folder: Path) -> None:
    """Noise, so that no two patches are alike."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(5)
    for name, (height, width) in GRIDS.items():
        size = (height * SEEING[family].patch, width * SEEING[family].patch, 3)
        Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{name}.png")


def _shown(family: str, name: str) -> list[dict[str, Any]]:
    """What a picture or the video is in a prompt, but for its place: one of the media, or one for each two frames."""
    if name == "video" and not SEEING[family].videos:
        return [shown for number in range(4) for shown in _shown(family, f"frame{number}")]
    if name != "video":
        return [{"kind": "image", "digests": (name,), "grid": (1, *GRIDS[name])}]
    frames = tuple(f"frame{number}" for number in range(4))
    if SEEING[family].frames_apart:
        return [{"kind": "video", "digests": frames[at : at + 2], "grid": (1, *GRIDS["frame0"])} for at in (0, 2)]
    return [{"kind": "video", "digests": frames, "grid": (2, *GRIDS["frame0"]), "seconds_per_grid": SECONDS_PER_GRID}]


def units(family: str) -> list[Unit]:
    """Four prompts with two responses each; single-token responses, and masks with holes, are among them."""
    generator = torch.Generator().manual_seed(11)

    def text(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, TEXT_IDS, (length,), generator=generator).tolist()

    vision, found, index = vision_of(family), [], 0
    for shown in ((), ("wide",), ("high", "wide"), ("video", "flat")):
        ids, media = text(2, 6), []
        for of_one in (part for name in shown for part in _shown(family, name)):
            tokens = prod(of_one["grid"]) // vision.merge**2
            media.append(Media(**of_one, place=len(ids) + 1, tokens=tokens))
            ids += [START, *[VIDEO if of_one["kind"] == "video" else IMAGE] * tokens, END, *text(1, 4)]
        responses = []
        for _ in range(2):
            answer = torch.tensor(text(1, 12))
            mask = torch.rand(len(answer), generator=generator) < 0.8
            responses.append(Response(index, answer, mask, {"weights": torch.randn(len(answer), generator=generator) / 20}))
            index += 1
        positions = prompt_positions(len(ids), media, vision) if media else None
        found.append(Unit(torch.tensor(ids), responses, tuple(media), positions))
    return found


def units_of_turns(family: str) -> list[Unit]:
    """Three prompts, of text, with one picture and with two; each response is told pictures once, twice or never."""
    generator = torch.Generator().manual_seed(13)

    def text(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, TEXT_IDS, (length,), generator=generator).tolist()

    def show(ids: list[int], media: list[Media], name: str) -> None:
        for of_one in _shown(family, name):
            tokens = prod(of_one["grid"]) // vision.merge**2
            media.append(Media(**of_one, place=len(ids) + 1, tokens=tokens))
            ids += [START, *[VIDEO if of_one["kind"] == "video" else IMAGE] * tokens, END]

    vision, found, index = vision_of(family), [], 0
    told = [[("flat",), ("wide", "high")], [("high", "wide"), ()], [("flat",), ("high",)]]
    for shown, of_responses in zip(((), ("wide",), ("high", "wide")), told, strict=True):
        ids, media = text(2, 6), list[Media]()
        for name in shown:
            show(ids, media, name)
        ids += text(1, 4)
        responses = []
        for names in of_responses:
            answer, answer_media = text(2, 6), list[Media]()
            mask = [True] * len(answer)
            for name in names:
                answer += text(1, 3)
                show(answer, answer_media, name)
                answer += text(1, 3)
                mask += [False] * (len(answer) - len(mask))
                answer += text(1, 6)
                mask += [True] * (len(answer) - len(mask))
            weights = {"weights": torch.randn(len(answer), generator=generator) / 20}
            responses.append(Response(index, torch.tensor(answer), torch.tensor(mask), weights, tuple(answer_media)))
            index += 1
        found.append(with_positions(Unit(torch.tensor(ids), responses, tuple(media)), vision))
    return found


def conversations(family: str) -> list[Unit]:
    """The conversations of `units_of_turns` in which pictures were told, as prompts of their next turn."""
    found = []
    for unit in units_of_turns(family):
        for response in (response for response in unit.responses if response.media):
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            media = (*unit.media, *(shown.moved(len(unit.prompt_ids)) for shown in response.media))
            found.append(with_positions(Unit(ids, [], media), vision_of(family)))
    return found


def inputs(family: str, folder: Path, shown: Sequence[Media]) -> dict[str, Any]:
    """What transformers takes beside ids: pixels by its own processor, and grids."""
    patch, processor = SEEING[family].patch, image_processor(family) if SEEING[family].image_processor != PADDING else None
    found: dict[str, Any] = {}
    images = [media for media in shown if media.kind == "image"]
    videos = [media for media in shown if media.kind == "video"]
    if SEEING[family].image_processor == PADDING:
        return padded_inputs([Image.open(file) for media in images for file in media.files(folder)])
    if images:
        read = processor([Image.open(file) for media in images for file in media.files(folder)], return_tensors="pt")
        found |= {"pixel_values": read["pixel_values"], "image_grid_thw": read["image_grid_thw"]}
    if videos:
        files = [file for media in videos for file in media.files(folder)]
        # a picture is two equal frames: of two frames the first one's first half and the second one's second half
        halves = processor([Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
        halves = halves.view(len(files) // 2, 2, -1, 3, 2, patch**2)  # [grids, frames, patches, colours, frames, pixels]
        both = torch.stack([halves[:, frame, :, :, frame] for frame in (0, 1)], dim=3)
        found |= {"pixel_values_videos": both.reshape(-1, 6 * patch**2)}
        found["video_grid_thw"] = torch.tensor([[len(files) // 2, *GRIDS["frame0"]]])
    return found


def image_processor(family: str) -> Any:
    """transformers' own, which leaves pictures of `GRIDS` as they are."""
    import transformers

    kind = getattr(transformers, f"{SEEING[family].image_processor}Pil")
    return kind(patch_size=SEEING[family].patch, size={"shortest_edge": 1, "longest_edge": 10**7})


def positions_with(unit: Unit, response: Tensor) -> Tensor | None:
    """int64 `[3, 1, P + L]`: those of a prompt and of a response behind it."""
    if unit.positions is None:
        return None
    behind = int(unit.positions.max()) + 1 + torch.arange(len(response))
    return torch.cat([unit.positions, behind.expand(3, -1)], dim=1)[:, None]


def by_hugging_face(family: str, folder: Path, temperature: float, given: Sequence[Unit] | None = None) -> dict[str, Any]:
    """Tensors, values by response and gradients: each response alone behind its prompt; log-softmax in float64.

    Positions are transformers' own but for videos, which it places otherwise than the models were trained (transformers#45381).
    """
    model = hugging_face(family)
    values: dict[int, Tensor] = {}
    for unit in units(family) if given is None else given:
        for response in unit.responses:
            start = len(unit.prompt_ids)
            media = [*unit.media, *(shown.moved(start) for shown in response.media)]
            read = inputs(family, folder, media)
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            kinds = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
            more = kinds if media and vision_of(family).mrope is not None else {}
            if "video_grid_thw" in read:
                more["position_ids"] = positions_with(unit, response.token_ids)
            logits = model(ids, **read, **more).logits[0, len(unit.prompt_ids) - 1 : -1].double() / temperature
            log_p = logits.log_softmax(-1)
            both = torch.stack([log_p.gather(1, response.token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], -1)
            loss = -(response.columns["weights"] * (both[:, 0] + 0.3 * both[:, 1]))[response.mask].sum()
            loss.backward()
            values[response.index] = both.detach() * response.mask[:, None]
    return {"tensors": hub_tensors(family, model), "values": values, "gradients": hub_gradients(family, model)}
