"""Sounds of rows, kept once as waveforms, and what a tower that hears takes of them: frames of mel bands.

A kept file is a WAV of float32, one channel, at the model's rate, named by a hash of its samples. Every sound is computed
alone: transformers pads a chunk to the longest one beside it, and its convolutions see how much of that there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from megarl.data.media import Media
from megarl.errors import DataError, ModelError, PictureError
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.images import original_of, read_bytes
from megarl.system.atomic_files import write_bytes_atomically

Samples = npt.NDArray[np.float32]
"""A waveform of one channel, `[samples]`, from -1 to 1."""
EXTRACTOR = "WhisperFeatureExtractor"


@dataclass(frozen=True)
class SoundRules:
    """The rules of a model for its sounds: their rate in Hz, samples from frame to frame and in a frame, and the tower."""

    rate: int
    hop: int
    window: int
    hearing: Hearing
    extractor: Any

    def tokens(self, samples: int) -> int:
        """Number of tokens of a sound."""
        return self.hearing.tokens_of(samples // self.hop)


@dataclass(frozen=True)
class KeptSound:
    """A sound in the media folder, its length, and its tokens."""

    digest: str
    samples: int
    tokens: int


def load_sound_rules(folder: str | Path, hearing: Hearing) -> SoundRules:
    """Read the rules of the model in `folder`, by its feature extractor.

    Raises:
        ModelError: the folder has none, one that megarl does not know, or one for another tower.
    """
    from transformers import AutoFeatureExtractor

    try:
        extractor = AutoFeatureExtractor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"'{folder}' has no feature extractor that can be loaded: {type(error).__name__}: {reason}") from error
    if type(extractor).__name__ != EXTRACTOR:
        raise ModelError(f"'{folder}' has the feature extractor {type(extractor).__name__}; it must be {EXTRACTOR}")
    if extractor.feature_size != hearing.mel_bins:
        raise ModelError(
            f"'{folder}': its feature extractor's feature_size is {extractor.feature_size}, but config.json's audio_config has "
            f"num_mel_bins {hearing.mel_bins}; they must be equal"
        )
    if extractor.dither:
        raise ModelError(f"'{folder}': its feature extractor's dither is {extractor.dither}, which draws noise; it must be 0")
    return SoundRules(extractor.sampling_rate, extractor.hop_length, extractor.n_fft, hearing, extractor)


def keep_sound(value: Any, rules: SoundRules, folder: str | None, media_folder: Path) -> KeptSound:
    """Keep the sound that `value` of a row means: as pictures' `original_of`, or decoded, `{"array", "sampling_rate"}`.

    Raises:
        PictureError: it is missing, empty, damaged, of another rate, not finite, or shorter than one frame.
        DataError: soundfile is not installed.
        OSError: the media folder cannot be written.
    """
    samples = _decoded(value, rules.rate) if isinstance(value, dict) and value.get("array") is not None else None
    samples = _read(value, folder, rules.rate) if samples is None else samples
    if len(samples) < rules.window:
        raise PictureError(f"has {len(samples)} samples; it must have at least {rules.window}, which is one frame")
    if not np.isfinite(samples).all():
        raise PictureError("has samples that are not finite; they must be numbers from -1 to 1")
    digest = xxhash.xxh3_128_hexdigest(samples.tobytes() + str(rules.rate).encode())
    file = media_folder / f"{digest}.wav"
    if not file.exists():
        content = BytesIO()
        _soundfile().write(content, samples, rules.rate, format="WAV", subtype="FLOAT")
        write_bytes_atomically(file, content.getvalue())
    return KeptSound(digest, len(samples), rules.tokens(len(samples)))


def _read(value: Any, folder: str | None, rate: int) -> Samples:
    original = original_of(value, folder)
    if not isinstance(original, Path | bytes):
        raise PictureError("is a picture; it must be a path, bytes or a struct of them")
    content, soundfile = read_bytes(original), _soundfile()
    try:
        channels, found = soundfile.read(BytesIO(content), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise PictureError(f"cannot be decoded as a sound ({str(error).rstrip('.')}); it must be a WAV or FLAC file") from None
    return _at_rate(channels.mean(1), found, rate)


def _decoded(value: dict[str, Any], rate: int) -> Samples:
    channels = np.asarray(value["array"], dtype=np.float32)
    if channels.ndim != 1:
        raise PictureError(f"is an array of shape {list(channels.shape)}; it must be [samples], of one channel")
    return _at_rate(channels, value.get("sampling_rate"), rate)


def _at_rate(samples: Samples, found: Any, rate: int) -> Samples:
    if found != rate:
        raise PictureError(f"has a sampling rate of {found} Hz; it must be {rate} Hz, the model's: resample it first")
    return samples


def _soundfile() -> Any:
    try:
        import soundfile
    except ModuleNotFoundError:
        raise DataError("rows have sounds, but soundfile is not installed: run `pip install 'megarl[audio]'`") from None
    return soundfile


class Sounds:
    """Reads the sounds of a media folder as frames."""

    def __init__(self, folder: Path, rules: SoundRules) -> None:
        self.folder, self.rules = folder, rules
        self.patches = functools.lru_cache(maxsize=4096)(self._frames)

    def _frames(self, media: Media) -> Tensor:
        """The frames of a sound, float32 `[frames, mel_bins]`.

        Raises:
            DataError: the file is missing, or not of the length that the grid says.
        """
        [file], rules = media.files(self.folder), self.rules
        try:
            samples, _ = _soundfile().read(file, dtype="float32")
        except Exception as error:
            raise DataError(
                f"'{file}', which a prompt shows, cannot be read: {error}; the run's media folder must be seen by every rank"
            ) from error
        if rules.tokens(len(samples)) != media.tokens:
            raise DataError(f"'{file}' has {rules.tokens(len(samples))} tokens, but its prompt has {media.tokens} for it")
        return frames_of(samples, rules)


def frames_of(samples: Samples, rules: SoundRules) -> Tensor:
    """The frames of a waveform, float32 `[frames, mel_bins]`: those of transformers' processor for it alone."""
    given = rules.extractor(samples, sampling_rate=rules.rate, padding=True, truncation=False, return_tensors="pt")
    frames: Tensor = given["input_features"][0, :, : len(samples) // rules.hop].T
    return frames


def listen(tower: torch.nn.Module, sounds: Sequence[Tensor]) -> Tensor:
    """Features `[G, H]` of the tokens of sounds, each of them `[frames, mel_bins]`, one sound's behind the other's."""
    return torch.cat([_alone(tower, sound) for sound in sounds])


def _alone(tower: Callable[..., Any], sound: Tensor) -> Tensor:
    features: Tensor = tower(sound.T, feature_lens=torch.tensor([len(sound)], device=sound.device)).last_hidden_state
    return features


def hear_each_alone(model: Any) -> None:
    """Have transformers' model compute each sound of a batch as it computes it in a batch of its own."""
    whole = model.audio_tower.forward

    def forward(input_features: Tensor, feature_lens: Tensor, **given: Any) -> Any:
        parts = [
            whole(part, feature_lens=length[None], **given)
            for part, length in zip(input_features.split(feature_lens.tolist(), dim=1), feature_lens, strict=True)
        ]
        first = parts[0]
        first.last_hidden_state = torch.cat([part.last_hidden_state for part in parts])
        return first

    model.audio_tower.forward = forward
