"""Pictures in a role's model on a rank: the model with its tower, and what its passes are told of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megarl import platform
from megarl.data.stream import MicroBatch, PackedStream, StreamShard
from megarl.errors import ConfigError, ModelError
from megarl.megatron.model_config import DTYPES, ddp_config
from megarl.megatron.options import ModelOptions
from megarl.megatron.pass_parts import PassPart
from megarl.models.hf_folder import HFFolder
from megarl.models.vision import Vision
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.picture_rules import PictureRules, load_picture_rules
from megarl.options.pictures.pixels import Pictures
from megarl.options.pictures.positions import with_positions
from megarl.options.pictures.sounds import Sounds, load_sound_rules
from megarl.options.pictures.stream_media import StreamMedia
from megarl.options.pictures.tower import SeeingModel, build_tower


def seeing_model(options: ModelOptions, folder: HFFolder, vision: Vision, **kwargs: Any) -> SeeingModel:
    """A chunk of the model in `folder`; the first one has the tower, and reads pictures. `kwargs` are GPTModel's.

    Raises:
        ModelError: the folder's image processor makes other patches than those of the tower.
        ConfigError: a GPU cannot train the tower deterministically.
    """
    tower = pictures = None
    if kwargs["pre_process"]:
        if options.media_folder is not None:
            pictures = _opened(Path(options.media_folder), folder.path, vision)
        tower = build_tower(folder.config, vision, DTYPES[options.dtype], recompute=options.recompute == "full")
        check_deterministic(tower, options)
    eager = options.trainable and ddp_config(options).overlap_grad_reduce
    return SeeingModel(vision, tower, pictures, eager=eager, **kwargs)


def check_deterministic(tower: torch.nn.Module, options: ModelOptions) -> None:
    """Refuse a tower whose positions are interpolated by `grid_sample` (GLM-4V) where training is deterministic on a GPU:
    torch has no deterministic gradient of it there.

    Raises:
        ConfigError: it is trained.
    """
    if not (options.deterministic and options.trainable and platform.cuda_present()) or "vision" in options.freeze:
        return
    if any(hasattr(module, "interpolated_method") for module in tower.modules()):
        reason = "has no gradient of this model's vision tower on a GPU, whose positions are interpolated"
        raise ConfigError.of("run.deterministic", True, reason, allowed="false, unless policy.freeze has 'vision'")


def _opened(media_folder: Path, folder: str | Path, vision: Vision) -> Pictures | Sounds:
    if isinstance(vision, Hearing):
        return Sounds(media_folder, load_sound_rules(folder, vision))
    return Pictures(media_folder, _picture_rules(folder, vision))


def _picture_rules(folder: str | Path, vision: Vision) -> PictureRules:
    """The picture rules of the model in `folder`; raises ModelError if its processor's patches are not those of the tower."""
    rules = load_picture_rules(folder)
    for field in ("patch", "temporal", "merge"):
        if getattr(rules, field) != getattr(vision, field):
            raise ModelError(
                f"'{folder}': the image processor's {field} is {getattr(rules, field)}, but config.json's vision_config says "
                f"{getattr(vision, field)}; they must be equal"
            )
    return rules


class PicturesPart(PassPart):
    """The part of pictures in all passes of a model that sees."""

    reads_ahead = False

    def __init__(self, vision: Vision) -> None:
        self._vision = vision

    def placed(self, units: MicroBatch) -> MicroBatch:
        """Prompts and responses that show pictures have positions on three axes."""
        return [with_positions(unit, self._vision) for unit in units]

    def joins(self, *, training: bool) -> bool:
        return True

    def lay(self, units: MicroBatch, stream: PackedStream, share: StreamShard, device: torch.device) -> StreamMedia | None:
        """The pictures that this rank's tokens show; None: they show none."""
        seen = stream.media.of_tokens(share.positions, len(stream.token_ids)) if stream.media is not None else None
        return seen.to(device) if seen is not None else None

    def forward(self, model: Any, given: StreamMedia | None) -> AbstractContextManager[None]:
        model.seen = given
        return nullcontext()


def take_part(chunks: Sequence[Any], options: ModelOptions) -> PicturesPart | None:
    """The part of a role whose model sees."""
    first = unwrap_model(chunks[0])
    return PicturesPart(first.vision) if isinstance(first, SeeingModel) else None


def take_tower_seconds(chunks: Sequence[Any]) -> float:
    """Seconds of the tower's forward passes in updates since the last call; 0 where this rank has none."""
    seeing = (chunk for chunk in map(unwrap_model, chunks) if isinstance(chunk, SeeingModel))
    return sum((chunk.tower_time.take() for chunk in seeing), 0.0)
