"""`megarl data inspect`: rows of a file as the model will see them, with what is trained on told from what is not.

On a terminal by colour; elsewhere trained spans stand between ⟦ and ⟧. Rows go through the builders that a run uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megarl.config import AnyConfig
from megarl.config.sections import DataConfig, PictureFields
from megarl.config.sources import SourceConfig
from megarl.data.chat import special_tokens
from megarl.data.media import Media
from megarl.data.prompts import load_rows, rows_of
from megarl.data.row_media import MediaReader, open_media
from megarl.data.row_template import with_prompt
from megarl.data.rows import Origin, Row, RowPlace
from megarl.data.sample import Prompt
from megarl.data.supervised import CONVERSATIONS, Kind, SupervisedBuilder, SupervisedSettings, kind_of_rows
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, counted
from megarl.system.safe_console import SafeConsole

TEMPLATE = {True: "chat template", False: "plain text"}
STYLES = {"trained": "bold green", "not trained": "dim", "special": "magenta", "trained special": "bold magenta underline"}


@dataclass(frozen=True)
class _Shown:
    """One sample as it is shown: token ids, and for each whether it is trained on."""

    title: str
    ids: list[int]
    mask: list[int]
    media: list[Media]
    note: str = ""

    @property
    def shown_ids(self) -> tuple[list[int], list[int]]:
        """Ids and mask with one placeholder for each picture."""
        hidden = {at for item in self.media for at in range(item.place + 1, item.place + item.tokens)}
        visible = [at for at in range(len(self.ids)) if at not in hidden]
        return [self.ids[at] for at in visible], [self.mask[at] for at in visible]


def inspect(
    path: str,
    tokenizer_path: str,
    settings: SupervisedSettings,
    rows: int = 3,
    console: Console | None = None,
    *,
    kind: Kind | Literal["prompts"] | None = None,
    pictures: PictureFields | None = None,
) -> None:
    """Show the first `rows` rows of a file of rows, of a folder of such files, or of a data set of the hub.

    Args:
        path: the file or folder.
        tokenizer_path: model folder that the tokenizer comes from.
        settings: keys and limits, as in a run; `max_tokens` is the longest prompt where rows are prompts.
        rows: how many rows are shown.
        console: where to; None: stdout.
        kind: what rows are; None: told from the keys of the first row.
        pictures: keys and limits of pictures, as in a run; without `media_folder` they are kept in a new temporary folder.

    Raises:
        DataError: the file cannot be read, its rows are of no known kind, or a row does not fit.
        ModelError: there is no tokenizer.
    """
    console = console or SafeConsole()
    source = SourceConfig(path=path, limit=rows)
    loaded = load_rows(source)
    if kind is None:
        first = with_prompt(loaded[0], settings.prompt, settings.prompt_key, RowPlace(Origin("", source), 0))
        kind, settings = _kind_of(first, settings, path)
    tokenizer = load_tokenizer(tokenizer_path)
    reader = open_media(pictures or PictureFields(), tokenizer_path, tokenizer, None)
    _show(path, len(loaded), kind, _build(loaded, source, tokenizer, settings, kind, reader), tokenizer, reader, console)


def inspect_config(config: AnyConfig, rows: int, console: Console, tools: Sequence[dict[str, Any]] = ()) -> None:
    """Show the first `rows` rows of a config's `data.train` exactly as its run makes them; `tools`: those of its episodes.

    Raises:
        DataError, ModelError: as a run would.
    """
    data, source = config.data, config.data.train
    tokenizer = load_tokenizer(config.model.path)
    reader = open_media(data, config.model.path, tokenizer, None)
    loaded = list(islice(rows_of(source), rows))
    kind: Kind | Literal["prompts"] = "prompts"
    if isinstance(data, DataConfig):
        prompts = PromptBuilder(tokenizer, data, tools, reader)
        shown = [_shown_prompt(prompt) for prompt in prompts.build(loaded, prefix="row", origin=Origin("data.train", source))]
        built = shown, TEMPLATE[prompts.template.is_used], prompts.dropped
    else:
        kind = kind_of_rows(config.trains_by)
        built = _build(loaded, source, tokenizer, SupervisedSettings.of(data), kind, reader)
    _show("data.train", len(loaded), kind, built, tokenizer, reader, console)


def _shown_prompt(one: Prompt) -> _Shown:
    return _Shown(one.row_id, one.prompt_ids, [0] * len(one.prompt_ids), one.media)


def _show(
    path: str,
    rows: int,
    kind: str,
    built: tuple[list[_Shown], str, dict[str, int]],
    tokenizer: Any,
    reader: MediaReader,
    console: Console,
) -> None:
    shown, template, dropped = built
    console.print(Text(f"{path}: {rows} row{'s' * (rows > 1)} as {kind}, {template}", style="bold"), soft_wrap=True)
    if console.is_terminal:
        console.print(Text.assemble(*((f"{name}  ", style) for name, style in STYLES.items())))
    for sample in shown:
        trained = f", {sum(sample.mask)} trained" if kind != "prompts" else ""
        console.print(Text(f"\n{sample.title}: {len(sample.ids)} tokens{trained}{sample.note}", style="bold"), soft_wrap=True)
        for number, media in enumerate(sample.media, 1):
            assert reader.model is not None, "only a model that takes media has some"
            console.print(Text(reader.model.describe(number, media)), soft_wrap=True)
        console.print(_text(sample, tokenizer, coloured=console.is_terminal), soft_wrap=True)
    for why, count in dropped.items():
        if count:
            console.print(Text(f"\n{count} of {counted(rows, 'row')} dropped as {why}"))


def _kind_of(row: Row, settings: SupervisedSettings, path: str) -> tuple[Kind | Literal["prompts"], SupervisedSettings]:
    """The kind of `row` by its keys, and settings that name the key of its conversation if it is one."""
    messages_key = settings.messages_key or next((key for key in CONVERSATIONS if key in row), "messages")
    if settings.prompt_key == "prompt" and "prompt" not in row and "question" in row:  # the default of `megarl train`
        settings = replace(settings, prompt_key="question")
    if {settings.chosen_key, settings.rejected_key} <= row.keys():
        return "pairs", settings
    if settings.steps_key in row:
        return "steps", settings
    if (response := next((key for key in (settings.response_key, "completion") if key in row), None)) is not None:
        kind: Kind = "kto" if isinstance(row.get(settings.label_key), bool) else "sft"
        return kind, replace(settings, messages_key=None, response_key=response)
    if messages_key in row:
        return "sft", replace(settings, messages_key=messages_key)
    if settings.prompt_key in row:
        return "prompts", settings
    accepted = (
        f"'{settings.prompt_key}' (prompts), '{settings.response_key}', 'completion' or '{messages_key}' (sft), "
        f"'{settings.chosen_key}' and '{settings.rejected_key}' (pairs), or '{settings.steps_key}' (steps)"
    )
    raise DataError(
        f"'{path}' has rows of no known kind: they have {', '.join(row)}; they must have {accepted}; "
        "--prompt-key and --messages-key name other keys, and a config in place of the file has them all"
    )


def _build(
    rows: Sequence[Row | None],
    source: SourceConfig,
    tokenizer: Any,
    settings: SupervisedSettings,
    kind: Kind | Literal["prompts"],
    media: MediaReader,
) -> tuple[list[_Shown], str, dict[str, int]]:
    """Samples to show, what their text was made by, and how many rows were dropped for which reason."""
    origin = Origin("", source)
    if kind == "prompts":
        data = DataConfig(
            train=source,
            prompt=settings.prompt,
            prompt_key=settings.prompt_key,
            system_key=settings.system_key,
            system_prompt=settings.system_prompt,
            chat_template=settings.chat_template,
            template_args=dict(settings.template_args),
            ignore_fields=tuple(settings.ignore_fields),
            max_prompt_tokens=settings.max_tokens,
            overlong_prompts=settings.overlong,
            bad_pictures=settings.bad_pictures,
        )
        prompts = PromptBuilder(tokenizer, data, media=media)
        built = prompts.build(rows, prefix="row", origin=origin)
        return [_shown_prompt(item) for item in built], TEMPLATE[prompts.template.is_used], prompts.dropped
    builder = SupervisedBuilder(tokenizer, kind, settings, media)
    shown = []
    for item in builder.build(rows, prefix="row", origin=origin):
        labels = item.labels[:1] if kind == "kto" else item.labels
        note = f", label {', '.join(f'{label:g}' for label in labels)}" if labels else ""
        mask = [0] * len(item.prompt_ids) + item.sampled_mask
        note = f" (prompt {len(item.prompt_ids)}){note}"
        shown.append(_Shown(item.sample_id, item.prompt_ids + item.response_ids, mask, item.media, note))
    template = TEMPLATE[builder.template.is_used]
    if builder.template.is_used:
        template = f"{template}; {builder.turns.ends.describe()}"
    return shown, template, builder.dropped


def _text(one: _Shown, tokenizer: Any, *, coloured: bool) -> Text:
    """The sample's text, token runs of one kind in one style, or trained runs in brackets; a placeholder for each picture."""
    special = special_tokens(tokenizer)
    ids, mask = one.shown_ids
    tokens = tokenizer.convert_ids_to_tokens(ids)
    kinds = [(bool(trained), coloured and token in special) for trained, token in zip(mask, tokens, strict=True)]
    text, end, written = Text(), 0, 0
    for (is_trained, is_special), run in groupby(kinds):
        end += sum(1 for _ in run)
        # The difference of two prefixes, since a run decoded alone may lose the space that it begins with.
        so_far = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece, written = so_far[written:], len(so_far)
        if coloured:
            style = f"{'trained ' * is_trained}special" if is_special else "trained" if is_trained else "not trained"
            text.append(piece, STYLES[style])
        else:
            text.append(f"⟦{piece}⟧" if is_trained else piece)
    return text
