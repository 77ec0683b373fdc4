"""From data rows to tokenised prompts, under the tokenizer's chat template where there is one.

A prompt's ids are exactly what the engine is given; nothing is truncated silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.sections import DataConfig
from megarl.data.chat import ChatTemplate
from megarl.data.rows import Origin, Row, RowPlace, value_of
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
        # a folder's own code is never run: without False, transformers would ask on a terminal whether it may
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"'{path}' has no tokenizer that can be loaded: {type(error).__name__}: {reason}") from error


class PromptBuilder:
    """Makes prompts from rows as `data` says. `dropped` counts the rows left out because they were too long."""

    def __init__(self, tokenizer: Any, data: DataConfig, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Decide once whether the chat template is used. `tools`: JSON schemas of what the policy may call.

        Raises:
            DataError: `data.chat_template` is `always`, and the tokenizer has none.
        """
        self.tokenizer, self.data = tokenizer, data
        self.template = ChatTemplate(tokenizer, data.chat_template, data.system_prompt, tools)
        self.dropped = 0

    def build(self, rows: Sequence[Row], *, prefix: str, origin: Origin | None = None) -> list[Prompt]:
        """One prompt per row, `row_id` `<prefix>-<row number>`, in the rows' order; `group_id` is left to the sampler.

        Args:
            rows: data rows.
            prefix: what row ids begin with, such as `train` or `eval`.
            origin: where the rows are from; None: the section of `data` called `prefix`.

        Raises:
            DataError: a row has no usable prompt, a prompt is too long and `data.overlong_prompts` is `error`, or no
                row is left.
        """
        prompts = []
        longest = self.data.max_prompt_tokens
        origin = origin or Origin(f"data.{prefix}", getattr(self.data, prefix, None))
        for number, row in enumerate(rows):
            place = RowPlace(origin, number)
            text = self._render(row, place)
            # A template writes the special tokens itself; plain text gets those that the tokenizer adds (BOS).
            ids = list(self.tokenizer(text, add_special_tokens=not self.template.is_used)["input_ids"])
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
            prompts.append(Prompt(f"{prefix}-{number}", "", ids, text, row))
        if not prompts:
            why = f"all {len(rows)} prompts are longer than data.max_prompt_tokens = {longest}" if rows else "it has no rows"
            raise DataError(f"{origin} gives no prompts: {why}")
        return prompts

    def _render(self, row: Row, place: RowPlace) -> str:
        """The prompt of `row` as the text that is tokenised."""
        key = self.data.prompt_key
        prompt = value_of(row, key, "data.prompt_key", place)
        if isinstance(prompt, str) and not self.template.is_used:
            return self.template.plain_prompt(prompt)
        messages = self.template.with_system(self.template.messages(prompt, key, place), place)
        return self.template.render(messages, place, ask=True)
