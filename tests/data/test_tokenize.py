"""Prompts carry exactly the ids that the tokenizer's own template gives, and refuse what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, ModelError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token per byte after `<s>` (0) and `</s>` (1); `<s>` is put first where special tokens are asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def _data(**fields: Any) -> DataConfig:
    return DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), **fields)


def _template_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    encoding = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoding["input_ids"])


def test_prompt_ids_are_those_of_the_tokenizers_own_template() -> None:
    tokenizer = _tokenizer()
    rows = [{"question": "1 + 1?", "data_source": "sums"}, {"question": [{"role": "user", "content": "ü"}]}]
    prompts = PromptBuilder(tokenizer, _data()).build(rows, prefix="train")
    assert prompts[0].prompt_ids == _template_ids(tokenizer, [{"role": "user", "content": "1 + 1?"}])
    assert prompts[1].prompt_ids == _template_ids(tokenizer, rows[1]["question"])  # type: ignore[arg-type]
    assert prompts[0].prompt_text == "[user]1 + 1?</s>[assistant]"
    assert [p.row_id for p in prompts] == ["train-0", "train-1"]
    assert prompts[0].row is rows[0]
    assert prompts[0].group_id == ""


def test_system_prompt_comes_first() -> None:
    tokenizer, row = _tokenizer(), {"question": "q"}
    prompt = PromptBuilder(tokenizer, _data(system_prompt="Be brief.")).build([row], prefix="train")[0]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    assert prompt.prompt_ids == _template_ids(tokenizer, messages)
    plain = PromptBuilder(tokenizer, _data(system_prompt="Be brief.", chat_template="never")).build([row], prefix="train")[0]
    assert plain.prompt_text == "Be brief.\n\nq"


@pytest.mark.parametrize(("template", "choice"), [(TEMPLATE, "never"), (None, "auto"), (None, "never")])
def test_plain_prompt_begins_with_the_tokenizers_bos(template: str | None, choice: str) -> None:
    tokenizer = _tokenizer(template)
    prompt = PromptBuilder(tokenizer, _data(chat_template=choice)).build([{"question": "ab"}], prefix="eval")[0]
    assert prompt.prompt_ids == [0, *tokenizer.convert_tokens_to_ids(["a", "b"])]


def test_overlong_prompts_are_dropped_and_counted_or_an_error() -> None:
    rows = [{"question": "x" * length} for length in (3, 10, 4)]
    builder = PromptBuilder(_tokenizer(None), _data(max_prompt_tokens=5, overlong_prompts="drop"))
    assert [p.row_id for p in builder.build(rows, prefix="train")] == ["train-0", "train-2"]
    assert builder.dropped == {"overlong": 1, "bad_pictures": 0, "not_kept": 0}
    with pytest.raises(DataError, match=r"data\.train \('rows\.jsonl'\) row 1 .* 11 tokens, but data\.max_prompt_tokens is 5"):
        PromptBuilder(_tokenizer(None), _data(max_prompt_tokens=5)).build(rows, prefix="train")
    with pytest.raises(DataError, match="gives no prompts: all 1 prompts are longer"):
        builder.build(rows[1:2], prefix="train")


@pytest.mark.parametrize(
    ("row", "fields", "sentence"),
    [
        ({"qestion": "q", "a": 1}, {}, r"row 0 .* has no key 'question' .*\(did you mean 'qestion'\?\); it has qestion, a"),
        ({"question": 7}, {}, "has a int under 'question'; it must be text or a list of chat messages"),
        ({"question": []}, {}, "has a list under 'question'"),
        ({"question": [{"role": "user"}]}, {}, "each with 'role' and 'content'"),
        ({"question": [{"role": "user", "content": "q"}]}, {"chat_template": "never"}, "data.chat_template is 'never'"),
        ({"question": [{"role": "tool", "content": "q"}]}, {}, "does not fit the tokenizer's chat template: no tools"),
        ({"question": [{"role": "system", "content": "s"}]}, {"system_prompt": "t"}, "has a system message of its own"),
    ],
)
def test_unusable_row_is_named(row: dict[str, Any], fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        PromptBuilder(_tokenizer(), _data(**fields)).build([row], prefix="train")


def test_unusable_row_of_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"question": "a"}\n\n  \n{"qestion": "b"}\n{"question": "c"}\n')
    data = DataConfig(train=SourceConfig(source="jsonl", path=str(file)))
    with pytest.raises(DataError, match=r"data\.train \('.*rows\.jsonl'\) line 5 has no key 'question'"):
        PromptBuilder(_tokenizer(), data).build(load_rows(data.train), prefix="train")


def test_empty_prompts_and_missing_templates_are_errors() -> None:
    bare = _tokenizer(None)
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(DataError, match="has an empty prompt under 'question'"):
        PromptBuilder(bare, _data()).build([{"question": ""}], prefix="train")
    with pytest.raises(DataError, match="gives no prompts: it has no rows"):
        PromptBuilder(bare, _data()).build([], prefix="train")
    with pytest.raises(DataError, match="'always', but the model's tokenizer has no chat template"):
        PromptBuilder(bare, _data(chat_template="always"))


def test_tokenizer_survives_its_folder_and_bad_folders_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _tokenizer().save_pretrained(folder)
    loaded = load_tokenizer(str(folder))
    assert loaded("ü")["input_ids"] == _tokenizer()("ü")["input_ids"]
    with pytest.raises(ModelError, match=r"no folder '.*modle' \(did you mean '.*model'\?\)"):
        load_tokenizer(str(tmp_path / "modle"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(folder))
