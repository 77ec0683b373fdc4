"""The chat template that a run has used, with its options as defaults, in folders that are exported from it."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config.section import TEMPLATE_FILE


def carry_template(template: Path | None, folder: Path) -> None:
    """Give the model folder `folder` the template in the file `template`, in place of its own; it is kept if there is none."""
    if template is None or not template.is_file():
        return
    text = template.read_text(encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)  # a processor's copy of the old one
    settings_file = folder / "tokenizer_config.json"
    if not settings_file.is_file():
        return
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    if "chat_template" in settings:  # for readers that do not know the file
        settings["chat_template"] = text
        settings_file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def template_of_run(weights: Path) -> Path | None:
    """The file of the run whose checkpoint of a role `weights` is (`<run>/checkpoints/step_N/<role>`), if it has one."""
    parents = weights.resolve().parents
    file = parents[2] / TEMPLATE_FILE if len(parents) > 2 else None
    return file if file is not None and file.is_file() and (parents[2] / "config.yaml").is_file() else None
