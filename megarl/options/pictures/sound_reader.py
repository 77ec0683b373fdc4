"""Sounds of rows for a model that hears: kept in the media folder, put in their places and counted in tokens, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.sections import PictureFields
from megarl.data.media import Expanded, Media, MediaKind
from megarl.data.rows import RowPlace
from megarl.errors import DataError, ModelError, PictureError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.images import describe_original
from megarl.options.pictures.picture_reader import REMEDY, ContentParts, PictureReader
from megarl.options.pictures.picture_rules import PictureTokens
from megarl.options.pictures.sounds import KeptSound, SoundRules, keep_sound, load_sound_rules

TOKENS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")
"""config.json's names of the token that is repeated for a sound, and of those around it."""


@dataclass(frozen=True)
class SoundSettings:
    """Facts of a model that hears, and the folder that keeps its sounds; a `ModelMedia` of `data/row_media.py`."""

    rules: SoundRules
    tokens: PictureTokens
    media_folder: Path
    videos: None = None

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for sounds."""
        return self.tokens.reserved

    def keeper(self, image_folder: str | None) -> None:
        """Nothing: episodes show this model no pictures."""
        return

    def expand(self, ids: Sequence[int], shown: Sequence[KeptSound]) -> Expanded:
        """`ids`, which hold one placeholder for each sound, with one for each of its tokens.

        Raises:
            ValueError: they hold more placeholders, or less.
        """
        placeholders = sum(token == self.tokens.image_id for token in ids)
        if placeholders != len(shown):
            raise ValueError(f"there are {placeholders} placeholders for {len(shown)} sounds")
        expanded, media, counts, waiting = list[int](), list[Media](), list[int](), iter(shown)
        for token in ids:
            counts.append(1)
            if token == self.tokens.image_id:
                sound = next(waiting)
                media.append(Media("audio", (sound.digest,), (1, 1, sound.tokens), len(expanded), sound.tokens))
                counts[-1] = sound.tokens
            expanded += [token] * counts[-1]
        return Expanded(expanded, media, counts)

    def describe(self, number: int, media: Media) -> str:
        """`sound 1: 8 tokens from 5 on, /media/9b….wav`."""
        return f"sound {number}: {media.tokens} tokens from {media.place} on, {media.files(self.media_folder)[0]}"


class SoundReader(PictureReader):
    """Reads the sounds of rows as a model takes them."""

    model: SoundSettings  # type: ignore[assignment]
    kinds: tuple[MediaKind, ...] = ("audio",)
    usual_keys = ("audio", "audios")
    noun, allowed = "sound", "text or a sound"

    def __init__(self, settings: PictureFields, model: SoundSettings) -> None:
        super().__init__(settings, model)  # type: ignore[arg-type]
        self._sounds: dict[str, KeptSound] = {}

    def _keep(self, kind: str, value: Any, which: str, place: RowPlace) -> str:
        model = self.model
        try:
            kept = keep_sound(value, model.rules, self.settings.image_folder, model.media_folder)
        except PictureError as error:
            raise PictureError(f"{place}: sound {which} ({describe_original(value)}) {error}; {REMEDY}") from error
        except OSError as error:
            raise DataError(f"the media folder '{model.media_folder}' cannot be written: {error}") from error
        path = str(model.media_folder / f"{kept.digest}.wav")
        self._sounds[path] = kept
        return path

    def _parts_of(self, kept: Any) -> tuple[ContentParts, list[Any]]:
        return ([{"type": "audio"}], [self._sounds[kept]]) if kept else ([], [])


def open_sounds(
    settings: PictureFields, model_folder: str, hearing: Hearing, tokenizer: Any, media_folder: Path
) -> SoundReader:
    """The reader of rows for the model in `model_folder`, which hears.

    Raises:
        ModelError: its folder does not say how, or names tokens that the tokenizer does not have.
    """
    config, texts = load_hf_config(model_folder), list[str]()
    for name in TOKENS:
        if not isinstance(config.get(name), int):
            raise ModelError(f"'{model_folder}/config.json' has no {name}, but a model that hears must have one")
        token = tokenizer.convert_ids_to_tokens(config[name])
        if token is None or token not in tokenizer.get_added_vocab():
            raise ModelError(
                f"'{model_folder}/config.json' has {name} {config[name]}, which is no special token of the tokenizer"
            )
        texts.append(str(token))
    sound, start, end = texts
    tokens = PictureTokens(config[TOKENS[0]], config[TOKENS[0]], sound, sound, start, end, ())
    return SoundReader(settings, SoundSettings(load_sound_rules(model_folder, hearing), tokens, media_folder))


def hearing_of(model_folder: str | Path) -> Hearing | None:
    """The tower of a model that hears; None: it sees."""
    config = load_hf_config(model_folder)
    vision = architecture_for(config).vision(config) if "audio_config" in config else None
    return vision if isinstance(vision, Hearing) else None
