"""From data rows to tokenised prompts, under the tokenizer's chat template where there is one.

A prompt's ids are exactly what the engine is given; nothing is truncated silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from megarl.config.schema import DataConfig
from megarl.data.prompts import Row, Source, describe_source, line_of_row
from megarl.data.sample import Prompt
from megarl.errors import DataError, ModelError, nearest


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer in the folder `path`.

    Raises:
        ModelError: there is no such folder, or no tokenizer that can be loaded in it.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise ModelError(f"there is no folder '{path}'{nearest(str(folder), siblings)}; a tokenizer comes from a model folder")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"'{path}' has no tokenizer that can be loaded: {type(error).__name__}: {reason}") from error


@dataclass(frozen=True)
class _Place:
    """Where a row is, as error messages name it; a file is searched for its line only when the message is written."""

    section: str
    source: Source | None
    number: int

    def __str__(self) -> str:
        path = self.source.path if self.source is not None and self.source.source == "jsonl" else None
        line = line_of_row(path, self.number) if path is not None else None
        return f"{self.section} row {self.number} (counted from 0)" if line is None else f"{self.section} line {line}"


class PromptBuilder:
    """Makes prompts from rows as `data` says. `dropped` counts the rows left out because they were too long."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        """Decide once whether the chat template is used.

        Raises:
            DataError: `data.chat_template` is `always`, and the tokenizer has none.
        """
        has_template = bool(tokenizer.chat_template)
        if data.chat_template == "always" and not has_template:
            raise DataError(
                "data.chat_template is 'always', but the model's tokenizer has no chat template; it may be 'auto' or 'never'"
            )
        self.tokenizer, self.data = tokenizer, data
        self.uses_template = has_template and data.chat_template != "never"
        self.dropped = 0

    def build(self, rows: Sequence[Row], *, prefix: str) -> list[Prompt]:
        """One prompt per row, `row_id` `<prefix>-<row number>`, in the rows' order; `group_id` is left to the sampler.

        Args:
            rows: data rows.
            prefix: `train` or `eval`, the section of `data` that the rows are from.

        Raises:
            DataError: a row has no usable prompt, a prompt is too long and `data.overlong_prompts` is `error`, or no
                row is left.
        """
        prompts = []
        longest = self.data.max_prompt_tokens
        for number, row in enumerate(rows):
            place = _Place(self._section(prefix), getattr(self.data, prefix, None), number)
            text = self._render(row, place)
            # A template writes the special tokens itself; plain text gets those that the tokenizer adds (BOS).
            ids = list(self.tokenizer(text, add_special_tokens=not self.uses_template)["input_ids"])
            if not ids:
                raise DataError(f"{place} has an empty prompt under '{self.data.prompt_key}'")
            if len(ids) > longest:
                if self.data.overlong_prompts == "error":
                    raise DataError(
                        f"{place} has a prompt of {len(ids)} tokens, but data.max_prompt_tokens is {longest}; "
                        "raise it, or set data.overlong_prompts to 'drop'"
                    )
                self.dropped += 1
                continue
            prompts.append(Prompt(f"{prefix}-{number}", "", ids, text, row, str(row.get("data_source", ""))))
        if not prompts:
            why = f"all {len(rows)} prompts are longer than data.max_prompt_tokens = {longest}" if rows else "it has no rows"
            raise DataError(f"{self._section(prefix)} gives no prompts: {why}")
        return prompts

    def _section(self, prefix: str) -> str:
        source = getattr(self.data, prefix, None)
        return f"data.{prefix} ({describe_source(source)})" if source is not None else f"data.{prefix}"

    def _render(self, row: Row, place: _Place) -> str:
        """The prompt of `row` as the text that is tokenised."""
        key, system = self.data.prompt_key, self.data.system_prompt
        if key not in row:
            raise DataError(f"{place} has no key '{key}' (data.prompt_key){nearest(key, row)}; it has {', '.join(row)}")
        prompt = row[key]
        if isinstance(prompt, str):
            if not self.uses_template:
                return prompt if system is None else f"{system}\n\n{prompt}"
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = self._messages(prompt, place)
        if system is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{place} has a system message of its own, but data.system_prompt is set; it may be null")
            messages = [{"role": "system", "content": system}, *messages]
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except jinja2.TemplateError as error:
            raise DataError(f"{place} does not fit the tokenizer's chat template: {error}") from None

    def _messages(self, prompt: Any, place: _Place) -> list[dict[str, Any]]:
        key = self.data.prompt_key
        messages = prompt if isinstance(prompt, list) else []
        if not messages or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
            raise DataError(
                f"{place} has a {type(prompt).__name__} under '{key}', but it may be text or a list of chat messages, each "
                "with 'role' and 'content'"
            )
        if not self.uses_template:
            never = self.data.chat_template == "never"
            why = "data.chat_template is 'never'" if never else "the tokenizer has no chat template"
            raise DataError(f"{place} has chat messages under '{key}', but {why}; it may be text")
        return messages
