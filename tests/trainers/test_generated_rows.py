"""Rows that `megarl generate` writes are prompts of the same text again when they are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.data.sample import Sample
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder
from megarl.trainers import generate
from tests.config import smallest
from tests.data.chat_tokenizers import byte_tokenizer


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "q", "system": "Be brief."}, {}),
        ({"question": "q", "role": "Be brief."}, {"system_key": "role"}),
        ({"question": "q", "system": ""}, {}),
        ({"instruction": "Add.", "input": "1+1"}, {"prompt": "{instruction}\n{input}"}),
        ({"question": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}, {}),
    ],
)
def test_generated_rows_have_the_prompt_that_was_asked(
    row: dict[str, Any], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smallest.config(data={"train": {"path": "rows.jsonl"}} | fields)
    tokenizer = byte_tokenizer()
    (prompt,) = PromptBuilder(tokenizer, config.data).build([row], prefix="train")
    samples = [
        Sample(
            f"train-0@0/{reward}", "train-0@0", "train-0", prompt.prompt_ids, [1], [1], [], [], "stop", row=prompt.row,
            response_text=("no", "yes")[reward], rewards={"reasoning_gym": float(reward)},
        )
        for reward in (0, 1)
    ]  # fmt: skip
    monkeypatch.setattr(generate, "answer", lambda config, checkpoint, say, console: (samples, [0.0, 1.0]))
    for form, kind, answers in (("sft", "sft", ["yes"]), ("pairs", "pairs", ["yes", "no"])):
        out = tmp_path / f"{form}.jsonl"
        generate.generate(config, str(out), form, None)
        rows = load_rows(SourceConfig(path=str(out)))
        written = SupervisedBuilder(tokenizer, kind, SupervisedSettings()).build(rows, prefix="train")
        assert [sample.prompt_ids for sample in written] == [prompt.prompt_ids] * len(answers)
        assert [sample.response_text for sample in written] == [f"{answer}<|end|>" for answer in answers]
    generate.generate(config, str(tmp_path / "rated.csv.jsonl"), "pass_rates", None)
    rated = load_rows(SourceConfig(path=str(tmp_path / "rated.csv.jsonl")))
    assert rated == [{**prompt.row, "pass_rate": 0.5}]
    assert PromptBuilder(tokenizer, config.data).build(rated, prefix="train")[0].prompt_ids == prompt.prompt_ids
