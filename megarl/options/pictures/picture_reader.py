"""Pictures and videos of rows: kept in the media folder, put in their places among messages, and counted in tokens.

Two passes over a row. The first replaces every picture by the path of its kept file, so that rows are light from then on.
The second finds the places: `<image>` and `<video>` in text, parts of messages, or before the text where there are none.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from PIL import Image

from megarl.config.sections import PictureFields
from megarl.data.chat import ChatMessage
from megarl.data.media import MARKS, NOUNS, Expanded, MediaKind, kind_of, source_of
from megarl.data.row_media import MediaReader, with_parts, without_bytes
from megarl.data.rows import Origin, Row, RowPlace
from megarl.data.told import KeptPicture
from megarl.errors import DataError, PictureError
from megarl.options.pictures.images import describe_original, final_frame_size, keep_picture, original_of, upright_rgb
from megarl.options.pictures.picture_settings import PictureSettings
from megarl.options.pictures.placeholders import FramePair, Showable
from megarl.options.pictures.video import chosen_frames, timed_frames_of

READ_AHEAD = 4
"""Rows that are in memory with their pictures, per thread."""
REMEDY = "mend the row, or set data.bad_pictures to 'drop'"

ContentParts = list[dict[str, Any]]
KeptPaths = str | list[str] | dict[str, Any]
"""A picture in a light row, the frames of a video, or a native video's `frames` with the `seconds` of each."""


class PictureReader(MediaReader):
    """Reads the pictures of rows as `settings` say, as `model` takes them."""

    model: PictureSettings
    kinds: tuple[MediaKind, ...] = ("image", "video")
    usual_keys: tuple[str, ...] = ("image", "images", "video", "videos")
    noun, allowed = "picture", "text, a picture or a video"
    """What sentences call one of the media, and what a part of a message may be."""

    def __init__(self, settings: PictureFields, model: PictureSettings) -> None:
        super().__init__(settings)
        self.model = model
        self._kept: dict[str, KeptPicture] = {}
        marks = "|".join(MARKS[kind] for kind in self.keys)
        self._mark = re.compile(f"({marks})" if marks else r"(?!)")

    # the first pass -----------------------------------------------------------------------------------------------

    def light_rows(
        self, rows: Iterable[Row | None], origin: Origin, message_keys: Sequence[str]
    ) -> Iterator[tuple[RowPlace, Row | PictureError | None]]:
        """Every row without bytes or decoded pictures, in order; paths of kept files are in their place, or the row's error.

        None for a row that is left out.

        Few rows are read ahead, so that bytes of pictures are not in memory all at once.
        `message_keys`: where chat messages may be, also as JSON in a text.

        Raises:
            DataError: videos cannot be decoded here, or no row has the key of the pictures, but they have others that look
                like it.
        """
        keys = set[str]()

        def light(row: Row | None, place: RowPlace) -> Row | PictureError | None:
            try:
                return None if row is None else self._light(row, message_keys, place)
            except PictureError as error:
                return error

        threads = os.cpu_count() or 1
        ahead: deque[tuple[RowPlace, Future[Row | PictureError | None]]] = deque()
        pool = ThreadPoolExecutor(threads, "pictures")  # Pillow decodes and resizes without the interpreter's lock
        try:
            for number, row in enumerate(rows):
                keys.update(key for key, value in (row or {}).items() if value)
                ahead.append((RowPlace(origin, number), pool.submit(light, row, RowPlace(origin, number))))
                if len(ahead) > READ_AHEAD * threads:
                    place, done = ahead.popleft()
                    yield place, done.result()
            while ahead:
                place, done = ahead.popleft()
                yield place, done.result()
        finally:
            pool.shutdown(cancel_futures=True)
        self._check_keys(keys, origin)

    def _check_keys(self, keys: set[str], origin: Origin) -> None:
        """`keys`: those under which any row has something."""
        main = next((kind for kind in self.keys if kind != "video"), None)
        others = [name for name in self.usual_keys if name in keys]
        if main is not None and others and not keys & {*self.keys.values()}:
            field = f"data.{main}_key"
            raise DataError(
                f"{origin} has nothing under '{self.keys[main]}' ({field}), but under '{others[0]}'; set {field} to "
                f"'{others[0]}', or to null to train on the text alone"
            )

    def _light(self, row: Row, message_keys: Sequence[str], place: RowPlace) -> Row:
        self.refuse_media(row, message_keys, place)
        row = {**row, **{key: parsed_messages(row[key]) for key in message_keys if isinstance(row.get(key), str)}}
        for kind, key in self.keys.items():
            if row.get(key) is None:
                continue
            many = isinstance(row[key], list | tuple)
            values = list(row[key]) if many else [row[key]]
            paths = [self._keep(kind, value, f"{n} of {len(values)}", place) for n, value in enumerate(values, 1)]
            row[key] = paths if many else paths[0]
        found = 0

        def without(part: dict[str, Any]) -> dict[str, Any]:
            nonlocal found
            kind = kind_of(part)
            source = source_of(part)
            if kind is None or source is None:
                return part
            found += 1
            return {"type": kind, kind: self._keep(kind, source, f"{found} of its messages", place)}

        lists = {key: row[key] for key in message_keys if isinstance(row.get(key), list)}
        row.update({key: [with_parts(message, without) for message in messages] for key, messages in lists.items()})
        return cast(Row, without_bytes(row))

    def _keep(self, kind: str, value: Any, which: str, place: RowPlace) -> KeptPaths:
        """The path of the kept picture, or those of the frames of a video; of a native one with the `seconds` of each."""
        settings, model = self.settings, self.model
        sizes: list[tuple[int, int]] = []

        def keep(frame: Image.Image, frames: int) -> str:
            sizes.append(frame.size)
            if model.videos is not None and frame.size != sizes[0]:
                first, other = (f"{width}x{height}" for width, height in (sizes[0], frame.size))
                raise PictureError(f"has frames of {first} and of {other} pixels; those of a native video must be of one size")
            return self._frame(frame, frames)

        try:
            if kind == "image":
                return self._file(upright_rgb(original_of(value, settings.image_folder)))
            if isinstance(value, list | tuple):
                chosen = chosen_frames(len(value), settings.fps, settings.fps, settings.max_frames)
                if not chosen:
                    raise PictureError("has no frames")
                frames = [keep(upright_rgb(original_of(value[n], settings.image_folder)), len(chosen)) for n in chosen]
                return frames if model.videos is None else {"frames": frames, "seconds": [n / settings.fps for n in chosen]}
            original = original_of(value, settings.image_folder)
            if isinstance(original, Image.Image):
                raise PictureError("is a picture; it must be a path, bytes or a list of frames")
            timed = timed_frames_of(original, settings.fps, settings.max_frames, keep)
            return timed.kept if model.videos is None else {"frames": timed.kept, "seconds": timed.seconds}
        except PictureError as error:
            raise PictureError(f"{place}: {NOUNS[kind]} {which} ({describe_original(value)}) {error}; {REMEDY}") from error
        except OSError as error:
            raise DataError(f"the media folder '{model.media_folder}' cannot be written: {error}") from error

    def _frame(self, image: Image.Image, frames: int) -> str:
        """The path of a kept frame of a video that has so many `frames`."""
        limits, settings = self.model.videos, self.settings
        if limits is None:
            return self._file(image)
        frames += frames % self.model.rules.temporal  # the last one is shown twice
        rules = replace(
            limits,
            min_pixels=max(limits.min_pixels, (settings.min_pixels or 0) * frames),
            max_pixels=min(limits.max_pixels, (settings.max_pixels or limits.max_pixels) * frames),
        )
        return self._file(image, final_frame_size(*image.size, frames, rules))

    def _file(self, image: Image.Image, size: tuple[int, int] | None = None) -> str:
        picture = keep_picture(image, self.model.rules, self.model.media_folder, size)
        path = str(self.model.media_folder / f"{picture.digest}.png")
        self._kept[path] = picture
        return path

    # the second pass ----------------------------------------------------------------------------------------------

    def arrange(self, row: Row, messages: list[ChatMessage], place: RowPlace) -> tuple[list[ChatMessage], list[Showable]]:
        """`messages` of a light row with a part `{"type": "image"}` for each picture or frame, and these in their order.

        A native video has a part `{"type": "video"}` for each pair of frames, behind its time as text, as Qwen3-VL's processor
        writes it (transformers 5.10 and later): the whole stands between the tokens that begin and end a picture, too.

        Messages without pictures stay as they are. Pictures without any mark or part stand before the first user turn's
        text, and so do videos.

        Raises:
            PictureError: marks and pictures do not go together, an assistant's turn has some, or a text has a token that
                stands for a picture.
        """
        self.check_texts(messages, place)
        waiting = self._of_columns(row)
        numbers: dict[str, int] = {kind: len(items) for kind, items in waiting.items()}
        mark_counts: dict[str, int] = dict.fromkeys(MARKS, 0)
        pictures: list[Showable] = []

        def parts_for(kind: str, part: dict[str, Any]) -> ContentParts:
            paths = part.get(kind)
            if paths is None:
                mark_counts[kind] += 1
                paths = waiting[kind].pop(0) if waiting[kind] else []
            content_parts, shown = self._parts_of(paths)
            pictures.extend(shown)
            return content_parts

        def placed(content: str | ContentParts) -> str | ContentParts:
            """`content` with its pictures' parts, taken in passing."""
            parts: ContentParts = []
            for part in _split(content, self._mark):
                kind = kind_of(part)
                parts += parts_for(kind, part) if kind else [part]
            return content if isinstance(content, str) and not any(map(kind_of, parts)) else parts

        arranged = [
            {**message, "content": placed(message["content"])}
            if message["role"] != "assistant" and isinstance(message["content"], str | list)
            else message
            for message in messages
        ]
        if not any(mark_counts.values()) and any(waiting.values()):
            if pictures:
                raise self._error(place, f"has {self.noun}s both in its messages and in a column; one of them must go")
            first = [self._parts_of(item) for kind in MARKS for item in waiting[kind]]
            pictures = [item for _, shown in first for item in shown]
            return _before_user_text(arranged, [part for parts, _ in first for part in parts], place), pictures
        for kind, mark in MARKS.items():
            if mark_counts[kind] != numbers[kind]:
                what = _several(numbers[kind], NOUNS[kind])
                places = f"{_several(mark_counts[kind], 'place')} for them ({mark})"
                key = f"under '{self.keys[kind]}'" if kind in self.keys else f"as data.{kind}_key is null"
                raise self._error(place, f"has {what} {key}, but {places}")
        return arranged, pictures

    def _parts_of(self, kept: KeptPaths) -> tuple[ContentParts, list[Showable]]:
        """The parts of a message that show a picture or video of a light row, and what its placeholders stand for."""
        if not isinstance(kept, dict):
            frames = [self._kept[path] for path in ([kept] if isinstance(kept, str) else kept)]
            return [{"type": "image"}] * len(frames), [*frames]
        files, seconds = [self._kept[path] for path in kept["frames"]], list(kept["seconds"])
        if len(files) % 2:
            files, seconds = [*files, files[-1]], [*seconds, seconds[-1]]
        pairs = [FramePair(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
        times = [(earlier + later) / 2 for earlier, later in zip(seconds[::2], seconds[1::2], strict=True)]
        parts: ContentParts = [{"type": "text", "text": self.model.tokens.start}]
        for time in times:
            parts += [{"type": "text", "text": f"<{time:.1f} seconds>"}, {"type": "video"}]
        return [*parts, {"type": "text", "text": self.model.tokens.end}], [*pairs]

    def arrange_text(self, row: Row, text: str, place: RowPlace) -> tuple[str, list[Showable]]:
        """`arrange` for a prompt without a chat template: the model's own tokens stand for each picture."""
        [message], pictures = self.arrange(row, [{"role": "user", "content": text}], place)
        if isinstance(message["content"], str):
            return message["content"], pictures
        tokens = self.model.tokens
        marks = {"image": tokens.mark, "video": tokens.video_mark, "audio": tokens.mark}
        return "".join(part["text"] if part["type"] == "text" else marks[part["type"]] for part in message["content"]), pictures

    def expand(self, ids: Sequence[int], shown: Sequence[Showable], place: RowPlace) -> Expanded:
        """`ids` with the placeholder of each picture repeated once for each of its tokens, and where they are.

        Raises:
            DataError: the chat template wrote another number of placeholders than there are pictures.
        """
        try:
            return self.model.expand(ids, shown)
        except ValueError:
            tokens = self.model.tokens
            placeholders = sum(token in (tokens.image_id, tokens.video_id) for token in ids)
            raise DataError(
                f"{place} has {_several(len(shown), self.noun)}, but the chat template makes "
                f"{_several(placeholders, 'placeholder')}; the model's folder must have the template of its processor"
            ) from None

    def _of_columns(self, row: Row) -> dict[str, list[KeptPaths]]:
        """The row's pictures and its videos, in the shapes that `_keep` gives them."""
        by_kind: dict[str, list[KeptPaths]] = {kind: [] for kind in MARKS}
        for kind, key in self.keys.items():
            value = row.get(key) or []
            is_one = isinstance(value, str | dict) or (kind == "video" and isinstance(value[0] if value else [], str))
            by_kind[kind] += [value] if is_one else value
        return by_kind

    def check_texts(self, messages: Sequence[ChatMessage], place: RowPlace) -> None:
        """Refuse texts with tokens that stand for pictures, pictures in assistant turns, and parts that are neither.

        Raises:
            DataError: `messages` have one of them; a PictureError but for the last.
        """
        for message in messages:
            content, role = message["content"], message["role"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts if isinstance(parts, list) else []:
                text = part.get("text") if isinstance(part, dict) else None
                is_picture = isinstance(part, dict) and kind_of(part) is not None
                if is_picture and role == "assistant":
                    raise self._error(place, f"has a {self.noun} in an assistant turn; it must be in another turn")
                if not is_picture and not isinstance(text, str):
                    raise DataError(f"{place} has {part!r:.80} in the {role}'s turn; it must be {self.allowed}")
                for token in self.model.tokens.reserved:
                    if text is not None and token in text:
                        raise self._error(place, f"has the text '{token}' in the {role}'s turn, which stands for a {self.noun}")

    def _error(self, place: RowPlace, why: str) -> PictureError:
        return PictureError(f"{place} {why}; {REMEDY}")


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _split(content: str | ContentParts, mark: re.Pattern[str]) -> ContentParts:
    """`content` as parts; a mark in a text is a part of its own."""
    kinds = {text: kind for kind, text in MARKS.items()}
    parts: ContentParts = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if kind_of(part) is not None:
            parts.append(part)
            continue
        pieces = [piece for piece in mark.split(part["text"]) if piece]
        is_mark = [mark.fullmatch(piece) is not None for piece in pieces]
        parts += [
            {"type": kinds[piece]} if stands else {"type": "text", "text": piece}
            for piece, stands in zip(pieces, is_mark, strict=True)
        ]
    return parts


def _before_user_text(messages: list[ChatMessage], parts: ContentParts, place: RowPlace) -> list[ChatMessage]:
    """`messages` with `parts`, which show pictures, at the beginning of the first user turn."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        count = _several(sum(kind_of(part) is not None for part in parts), "picture")
        raise PictureError(f"{place} has {count}, but no user turn that they could be in; {REMEDY}")
    content = messages[first]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    turn = {**messages[first], "content": [*parts, *text]}
    return [*messages[:first], turn, *messages[first + 1 :]]


def parsed_messages(text: str) -> Any:
    """The chat messages of a JSON text (lmm-r1), or `text` itself if it holds none."""
    if not text.lstrip().startswith("["):
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_chat = bool(messages) and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in messages)
    return messages if is_chat else text
