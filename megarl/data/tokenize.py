"""From data rows to tokenised prompts, under the tokenizer's chat template where there is one.

A prompt's ids are those of the model's own processor; nothing is truncated silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from megarl.config.sections import DataConfig
from megarl.data.chat import ChatTemplate
from megarl.data.row_media import MediaReader
from megarl.data.rows import Origin, Row, RowPlace, check_text, value_of
from megarl.data.sample import Prompt
from megarl.errors import DataError, ModelError, PictureError, nearest
from megarl.system.hidden_imports import hidden


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer in the folder `path`.

    Raises:
        ModelError: there is no such folder, or no tokenizer that can be loaded in it.
    """
    with hidden("sklearn"):  # transformers imports it, and scipy with it, for a curve of assisted generation
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(path)
    if not folder.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise ModelError(f"there is no folder '{path}'{nearest(str(folder), siblings)}; a tokenizer comes from a model folder")
    kind: Any = AutoTokenizer
    if code := _own_code(folder):
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"'{path}' has no tokenizer that can be loaded: tokenizer_config.json names code of the folder ({code}), which "
                "megarl never runs; put a tokenizer.json with the same vocabulary into the folder"
            )
        logging.getLogger(__name__).warning("%s: the tokenizer is tokenizer.json; the code '%s' is not run", folder, code)
        kind = PreTrainedTokenizerFast
    try:
        # a folder's own code is never run: without False, transformers would ask on a terminal whether it may
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"'{path}' has no tokenizer that can be loaded: {type(error).__name__}: {reason}") from error
    tokenizer.chat_template = _processor_template(folder) or tokenizer.chat_template
    return tokenizer


def _own_code(folder: Path) -> str | None:
    """The class of the folder's own that its tokenizer is, where transformers has none of that name."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = config.get("auto_map") or ()
        named = named.get("AutoTokenizer") or () if isinstance(named, dict) else named
        named = [named] if isinstance(named, str) else named
        known = tokenizer_class_from_name(str(config.get("tokenizer_class") or ""))
    except (OSError, ValueError, AttributeError):
        return None
    return None if known is not None else next((str(name) for name in named if name), None)


def _processor_template(folder: Path) -> str | None:
    """The chat template of the processor where the tokenizer's file does not hold it (`chat_template.json`), else None.

    Raises:
        ModelError: the file is no JSON object with a template.
    """
    file = folder / "chat_template.json"
    if not file.is_file() or (folder / "chat_template.jinja").is_file():
        return None
    try:
        return str(json.loads(file.read_text())["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"'{file}' holds no chat template: {type(error).__name__}: {error}") from None


class PromptBuilder:
    """Makes prompts from rows as `data` says. `dropped` counts rows left out: `overlong`, `bad_pictures`, or `not_kept`."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        tools: Sequence[dict[str, Any]] = (),
        media: MediaReader | None = None,
    ) -> None:
        """Decide once whether the chat template is used.

        Args:
            tokenizer: the model's.
            data: keys and limits.
            tools: JSON schemas of what the policy may call.
            media: reads those of rows; None: rows must have none.

        Raises:
            DataError: `data.chat_template` is `always`, and the tokenizer has none.
        """
        self.tokenizer, self.data = tokenizer, data
        self.template = ChatTemplate(
            tokenizer, data.chat_template, data.system_prompt, tools, data.template_args, data.ignore_fields
        )
        self.media = media or MediaReader(data)
        self.dropped = {"overlong": 0, "bad_pictures": 0, "not_kept": 0}

    def of_rows_like(self, data: DataConfig) -> PromptBuilder:
        """One for rows with other keys, which counts what it drops with this one."""
        other = copy(self)
        other.data = data
        return other

    def build(self, rows: Iterable[Row | None], *, prefix: str, origin: Origin | None = None) -> list[Prompt]:
        """One prompt per row, `row_id` `<prefix>-<row number>`, in the rows' order; `group_id` is left to the sampler.

        Args:
            rows: data rows; None in place of one that its source leaves out.
            prefix: what row ids begin with, such as `train` or `eval`.
            origin: where the rows are from; None: the section of `data` called `prefix`.

        Raises:
            DataError: a row has no usable prompt, a prompt is too long and `data.overlong_prompts` is `error`, a picture
                cannot be used and `data.bad_pictures` is `error`, or no row is left.
        """
        prompts = []
        read = 0
        origin = origin or Origin(f"data.{prefix}", getattr(self.data, prefix, None))
        before = dict(self.dropped)
        for place, row in self.media.light_rows(rows, origin, [self.data.prompt_key]):
            read = place.number + 1
            if row is None:
                self.dropped["not_kept"] += 1
                continue
            try:
                prompt = self._of_row(row, f"{prefix}-{place.number}", place)
            except PictureError:
                if self.data.bad_pictures == "error":
                    raise
                self.dropped["bad_pictures"] += 1
                continue
            if prompt is not None:
                prompts.append(prompt)
        if not prompts:
            dropped = {why: count - before[why] for why, count in self.dropped.items() if count > before[why]}
            raise DataError(f"{origin} gives no prompts: {self._why_none(read, dropped)}")
        return prompts

    def _why_none(self, rows: int, dropped: dict[str, int]) -> str:
        if not rows:
            return "it has no rows"
        if dropped == {"overlong": rows}:
            return f"all {rows} prompts are longer than data.max_prompt_tokens = {self.data.max_prompt_tokens}"
        return f"of {rows} rows {' and '.join(f'{count} dropped as {why}' for why, count in dropped.items())}"

    def _of_row(self, row: Row | PictureError, row_id: str, place: RowPlace) -> Prompt | None:
        """The prompt of a light row; None: it is too long, and counted."""
        if isinstance(row, PictureError):
            raise row
        text, shown = self._render(row, place)
        check_text(text, place)
        # A template writes the special tokens itself; plain text gets those that the tokenizer adds (BOS).
        ids = list(self.tokenizer(text, add_special_tokens=not self.template.is_used)["input_ids"])
        if not ids:
            raise DataError(f"{place} has an empty prompt under '{self.data.prompt_key}'")
        expanded = self.media.expand(ids, shown, place)
        ids, media = expanded.ids, expanded.media
        if len(ids) <= self.data.max_prompt_tokens:
            return Prompt(row_id, "", ids, text, row, media)
        if self.data.overlong_prompts == "error":
            of_pictures, lower = "", ""
            if media:
                of_pictures = f", {sum(item.tokens for item in media)} of them for pictures"
                lower = "lower data.max_pixels, "
            raise DataError(
                f"{place} has a prompt of {len(ids)} tokens{of_pictures}, but data.max_prompt_tokens is "
                f"{self.data.max_prompt_tokens}; raise it, {lower}or set data.overlong_prompts to 'drop'"
            )
        self.dropped["overlong"] += 1
        return None

    def _render(self, row: Row, place: RowPlace) -> tuple[str, list[Any]]:
        """The prompt of `row` as the text that is tokenised, and its media."""
        key = self.data.prompt_key
        prompt = value_of(row, key, "data.prompt_key", place)
        if isinstance(prompt, str) and not self.template.is_used:
            return self.media.arrange_text(row, self.template.plain_prompt(prompt), place)
        messages = self.template.with_system(self.template.messages(prompt, key, place), place)
        messages, shown = self.media.arrange(row, messages, place)
        args = self.template.args_of(row, place)
        return self.template.render(self.template.fitted(messages, place, args=args), place, ask=True, args=args), shown
