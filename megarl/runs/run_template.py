"""The chat template that a run uses, kept in its folder, so that what is exported from it carries the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.section import TEMPLATE_FILE
from megarl.config.sections import PromptFields
from megarl.config.supervised import SupervisedFields
from megarl.system.atomic_files import write_text_atomically


def keep_template(folder: Path, tokenizer: Any, data: PromptFields | SupervisedFields) -> None:
    """Write the template into the run's folder, with `data.template_args` as defaults; nothing where both are the model's own.

    `tokenizer` has the template that `data.chat_template` names.
    """
    if not data.template_args and not data.chat_template.endswith(".jinja"):
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)
        return
    from megarl.data.template_args import with_defaults

    write_text_atomically(folder / TEMPLATE_FILE, with_defaults(tokenizer.get_chat_template(), data.template_args))
