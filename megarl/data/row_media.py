"""Pictures, videos and sounds of rows, as a run's prompts need them: refused, or read by an option for a model that takes some.

An option that reads media has the file `row_media.py` with `open_media`, of the form of this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from PIL import Image

from megarl.config.sections import PictureFields
from megarl.data.chat import ChatMessage
from megarl.data.media import NOUNS, Expanded, Media, MediaKind, kind_of
from megarl.data.rows import Origin, Row, RowPlace
from megarl.data.told import MediaKeeper
from megarl.errors import DataError, PictureError
from megarl.option_list import functions, part


class ModelMedia(Protocol):
    """The way in which a run's model takes media, and the folder that keeps them."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for media, which nothing else may contain."""
        ...

    def keeper(self, image_folder: str | None) -> MediaKeeper | None:
        """A keeper of the pictures that an episode shows; relative paths are taken in `image_folder`. None: it shows none."""
        ...

    def expand(self, ids: Sequence[int], shown: Sequence[Any]) -> Expanded:
        """`ids`, which hold one placeholder for each of `shown`, with one for each of its tokens.

        Raises:
            ValueError: they hold more placeholders, or less, or one of another kind.
        """
        ...

    def describe(self, number: int, media: Media) -> str:
        """A line for people about picture `number` of a prompt."""
        ...


class MediaReader:
    """Reads the media of rows; this one is for a model that takes none, and refuses rows that have some."""

    model: ModelMedia | None = None
    """None: the model takes none."""
    kinds: tuple[MediaKind, ...] = ()
    """Kinds of media that the model takes."""

    def __init__(self, settings: PictureFields) -> None:
        """`settings`: keys and limits of pictures, videos and sounds in rows."""
        self.settings = settings
        every = {"image": settings.image_key, "video": settings.video_key, "audio": settings.audio_key}
        self.keys = {kind: key for kind, key in every.items() if key and kind in self.kinds}
        """Keys of a row that have media, by kind, of the kinds that the model takes."""
        self.refused = {kind: key for kind, key in every.items() if key and kind not in self.kinds}
        """The same of those that it does not take."""

    def light_rows(
        self, rows: Iterable[Row | None], origin: Origin, message_keys: Sequence[str]
    ) -> Iterator[tuple[RowPlace, Row | PictureError | None]]:
        """Every row without bytes or decoded pictures, in order; kept files are named in their place, or it is the row's error.

        None for a row that is left out. `message_keys`: where chat messages may be.

        Raises:
            DataError: the model takes no media and a row has some, or no row can be used as it says.
            ConfigError: a row has media, and this installation has no option that reads them.
        """
        for number, row in enumerate(rows):
            place = RowPlace(origin, number)
            if row is not None:
                self.refuse_media(row, message_keys, place)
            yield place, cast(Row | None, without_bytes(row))

    def refuse_media(self, row: Row, message_keys: Sequence[str], place: RowPlace) -> None:
        """Raise DataError if the row has media of a kind that the model does not take."""
        kinds = {kind: f"under '{key}' (data.{kind}_key)" for kind, key in self.refused.items() if row.get(key)}

        def see(part: dict[str, Any]) -> dict[str, Any]:
            if (kind := kind_of(part)) is not None and kind not in self.kinds:
                kinds.setdefault(kind, "in its messages")
            return part

        for key in message_keys:
            for message in row[key] if isinstance(row.get(key), list) else []:
                with_parts(message, see)
        for kind, where in kinds.items():
            what, other = f"{NOUNS[kind]}s", "model that hears (docs/audio.md)" if kind == "audio" else "vision-language model"
            part("pictures", "row_media", f"{place} has {what} {where}, which")
            raise DataError(
                f"{place} has {what} {where}, but the model takes none; train a {other}, or leave them out "
                f"(data.{kind}_key: null leaves out those of a column)"
            )

    def arrange(self, row: Row, messages: list[ChatMessage], place: RowPlace) -> tuple[list[ChatMessage], list[Any]]:
        """`messages` of a light row with a part for each of its media, and these in their order, as `expand` takes them.

        Raises:
            PictureError: messages and media do not go together.
        """
        return messages, []

    def arrange_text(self, row: Row, text: str, place: RowPlace) -> tuple[str, list[Any]]:
        """`arrange` for a prompt without a chat template."""
        return text, []

    def expand(self, ids: Sequence[int], shown: Sequence[Any], place: RowPlace) -> Expanded:
        """`ids` with the placeholder of each of `shown` repeated once for each of its tokens, and where they are.

        Raises:
            DataError: the chat template wrote another number of placeholders.
        """
        return Expanded([*ids], [], [1] * len(ids))

    def check_texts(self, messages: Sequence[ChatMessage], place: RowPlace) -> None:
        """Refuse texts with tokens that stand for media, media in assistant turns, and parts that are neither text nor media.

        Raises:
            DataError: `messages` have one of them; a PictureError but for the last.
        """


def open_media(settings: PictureFields, model_folder: str, tokenizer: Any, run_folder: str | Path | None) -> MediaReader:
    """The reader of rows for the model in `model_folder`; one that refuses media where the model takes none.

    Media are kept in the media folder of the run in `run_folder`, or if that is None, and `settings` name no folder, in a new
    temporary folder.

    Raises:
        ModelError: the model takes media, and its folder does not say how.
        DataError: the limits leave no size.
    """
    opened = (
        open_reader(settings, model_folder, tokenizer, run_folder) for open_reader in functions("row_media", "open_media")
    )
    return next((reader for reader in opened if reader is not None), MediaReader(settings))


def with_parts(message: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A chat message with `change` made to every part of its content, if it has parts."""
    content = message.get("content", message.get("value")) if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [change(part) if isinstance(part, dict) else part for part in content]
    return {**message, "content" if "content" in message else "value": parts}


def without_bytes(value: Any) -> Any:
    """`value` with null for what is bytes or a decoded picture; the same object if there are none."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview | Image.Image):
        return None
    if isinstance(value, dict):
        light = {key: without_bytes(inner) for key, inner in value.items()}
        return light if any(light[key] is not value[key] for key in value) else value
    if isinstance(value, list | tuple):
        items = [without_bytes(inner) for inner in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
