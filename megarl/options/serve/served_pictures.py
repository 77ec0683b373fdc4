"""Pictures of requests as the model takes them: checked before they are decoded, resized by the model's rule, kept as files.

Trainer and engines are given the same pixels, whatever an engine's own processor would do. Bytes that were seen before are not
decoded again.
"""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from megarl.config import Config
from megarl.data.media import Media
from megarl.data.row_media import ModelMedia, open_media
from megarl.data.told import KeptPicture, Shown
from megarl.errors import PictureError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.serve.values import Datum, Picture, RequestError

MOST_BYTES = 1 << 24
"""Bytes of a picture as it is sent."""
MOST_PIXELS = 1 << 25
"""Pixels of a picture before it is resized: 33 million, those of an 8K screen."""
MOST_PIXELS_IN_ALL = 1 << 28
"""Pixels of the different pictures of a request."""
MOST_PICTURES = 4096
"""Pictures of a request."""
KEPT_BYTES = 1 << 31
"""Bytes of kept files; those that were used longest ago go first."""
_THREADS = 4


class ServedPictures:
    """The pictures of requests to one side, trainer or engines, in a folder that no other side has.

    Methods may be called by several threads.
    """

    def __init__(self, model: ModelMedia, image_token: int, kept_bytes: int = KEPT_BYTES) -> None:
        """`model` keeps pictures in its media folder, and `image_token` is its id of each of a picture's tokens."""
        keeper = model.keeper(None)
        assert keeper is not None, "a model that is shown no pictures has none served"
        self.image_token, self._model, self._keeper = image_token, model, keeper
        self._kept_bytes, self._lock = kept_bytes, threading.Lock()
        self._kept: OrderedDict[bytes, tuple[KeptPicture, int]] = OrderedDict()

    def of_data(self, data: Sequence[Datum]) -> list[tuple[Datum, tuple[Media, ...]]]:
        """The data with the model's id where pictures are, each with its pictures, which stay until the next call.

        Raises:
            RequestError: a picture cannot be used, or is another number of tokens than was expected.
        """
        with self._lock:
            named = [(f"datum {number}", datum.pictures) for number, datum in enumerate(data)]
            media = iter(self._media([*_named(named)]))
            return [(self._placed(datum), tuple(next(media) for _ in datum.pictures)) for datum in data]

    def final(self, pictures: Sequence[Picture]) -> tuple[Picture, ...]:
        """The pictures of a prompt as PNG of the size that the model takes; raises as `of_data`."""
        with self._lock:
            found = self._media([*_named([("prompt", pictures)])])
            files = (media.files(self._keeper.media_folder)[0] for media in found)
            return tuple(replace(p, format="png", content=file.read_bytes()) for p, file in zip(pictures, files, strict=True))

    def _placed(self, datum: Datum) -> Datum:
        if not datum.pictures:
            return datum
        tokens = datum.tokens.copy()
        for picture in datum.pictures:
            tokens[picture.place : picture.place + picture.length] = self.image_token
        return replace(datum, tokens=tokens)

    def _media(self, named: Sequence[tuple[str, Picture]]) -> list[Media]:
        """Each picture, behind the words that name it, with its place and as the model takes it."""
        if len(named) > MOST_PICTURES:
            raise RequestError(f"the request has {len(named)} pictures; it must have at most {MOST_PICTURES}")
        keys = [blake2b(picture.content, digest_size=16).digest() + picture.format.encode() for _, picture in named]
        new: dict[bytes, tuple[str, Picture]] = {}
        for key, (what, picture) in zip(keys, named, strict=True):
            if key not in self._kept:
                new.setdefault(key, (what, picture))
        _check_sizes([*new.values()])
        with ThreadPoolExecutor(_THREADS) as pool:
            made = dict(zip(new, pool.map(lambda one: self._keep(*one), new.values()), strict=True))
        self._kept |= {key: kept for key, kept in made.items() if not isinstance(kept, RequestError)}
        if wrong := next((error for error in made.values() if isinstance(error, RequestError)), None):
            raise wrong
        for key in keys:
            self._kept.move_to_end(key)
        self._forget(in_use={*keys})
        return [self._shown(what, picture, self._kept[key][0]) for key, (what, picture) in zip(keys, named, strict=True)]

    def _keep(self, what: str, picture: Picture) -> tuple[KeptPicture, int] | RequestError:
        """A picture in its file, and the file's bytes; or what is wrong with it, so that others that were kept are known."""
        try:
            [(_, kept)] = self._keeper.kept([Shown(picture.content)]).pictures
        except PictureError as error:
            return RequestError(f"{what} {error.__cause__ or error}")
        return kept, (self._keeper.media_folder / f"{kept.digest}.png").stat().st_size

    def _shown(self, what: str, picture: Picture, kept: KeptPicture) -> Media:
        [media] = self._model.expand([self.image_token], [kept]).media
        if media.tokens != picture.length:
            raise RequestError(
                f"{what} has expected_tokens {picture.length}, and is {media.tokens} tokens of the model, which sees it as "
                f"{kept.width}x{kept.height} pixels; expected_tokens must be {media.tokens}"
            )
        return replace(media, place=picture.place)

    def _forget(self, in_use: set[bytes]) -> None:
        """Remove files that were used longest ago, until there is room, but for those of this request."""
        total = sum(size for _, size in self._kept.values())
        for key in [key for key in self._kept if key not in in_use]:
            if total <= self._kept_bytes:
                return
            kept, size = self._kept.pop(key)
            total -= size
            if all(kept.digest != other.digest for other, _ in self._kept.values()):
                (self._keeper.media_folder / f"{kept.digest}.png").unlink(missing_ok=True)


def _named(pictures: Sequence[tuple[str, Sequence[Picture]]]) -> Iterator[tuple[str, Picture]]:
    for owner, shown in pictures:
        for number, picture in enumerate(shown, start=1):
            yield f"{owner}: picture {number}", picture


def _check_sizes(named: Sequence[tuple[str, Picture]]) -> None:
    """Refuse what is too large to be decoded, by the heads of pictures alone."""
    total = 0
    for what, picture in named:
        if len(picture.content) > MOST_BYTES:
            raise RequestError(f"{what} has {len(picture.content)} bytes; it must have at most {MOST_BYTES}")
        width, height = _size(what, picture)
        if width * height > MOST_PIXELS:
            raise RequestError(f"{what} is {width}x{height} pixels; it must have at most {MOST_PIXELS} in all")
        total += width * height
    if total > MOST_PIXELS_IN_ALL:
        raise RequestError(f"pictures of the request have {total} pixels; they must have at most {MOST_PIXELS_IN_ALL} together")


def _size(what: str, picture: Picture) -> tuple[int, int]:
    try:
        with Image.open(BytesIO(picture.content), formats=[picture.format.upper()]) as image:
            return image.size
    except Image.DecompressionBombError:
        raise RequestError(f"{what} has far more than {MOST_PIXELS} pixels; it must have at most as many") from None
    except Exception:  # noqa: BLE001 - Pillow raises many kinds for a damaged file
        raise RequestError(f"{what} has the format {picture.format}, but it is none that can be read") from None


def open_pictures(config: Config, tokenizer: Any, folder: Path | None = None) -> ServedPictures | None:
    """The pictures of requests to the model of a server, kept in `folder`, or None: where ranks read them.

    Returns None where the model sees none. What a server that was killed kept in its run's folder is removed.
    """
    hf_config = load_hf_config(config.model.path)
    vision = architecture_for(hf_config).vision(hf_config)
    if vision is None:
        return None
    own = folder or (Path(config.run_folder) / "media" if config.data.media_folder is None else None)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    settings = config.data if folder is None else config.data.model_copy(update={"media_folder": str(folder)})
    model = open_media(settings, config.model.path, tokenizer, config.run_folder).model
    assert model is not None, "an option that knows the model's tower takes its pictures"
    return ServedPictures(model, vision.image_token) if model.keeper(None) is not None else None
