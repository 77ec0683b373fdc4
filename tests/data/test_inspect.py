"""What is shown is what a run trains on: the marked spans are the assistant's turns, on a terminal and in plain text."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from megarl.cli import main
from megarl.config import Config, SupervisedConfig, parse_config, parse_supervised_config
from megarl.config.sections import PictureFields
from megarl.data.inspect import STYLES, inspect, inspect_config
from megarl.data.supervised import SupervisedSettings
from megarl.errors import DataError
from megarl.option_list import OPTIONS
from tests.data.chat_tokenizers import CHATML, byte_tokenizer
from tests.data.family_templates import QWEN3
from tests.data.seeing_folders import SPECIAL, picture, processed, seeing_folder

SETTINGS = SupervisedSettings()


def _shown(folder: Path, written: list[dict[str, Any]], settings: SupervisedSettings = SETTINGS, **options: Any) -> str:
    model = folder / "model"
    byte_tokenizer(options.pop("template", CHATML)).save_pretrained(model)
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in written))
    stream = io.StringIO()
    terminal = options.pop("terminal", False)
    console = Console(file=stream, force_terminal=terminal, color_system="standard" if terminal else None, width=60)
    inspect(str(file), str(model), settings, console=console, **options)
    return stream.getvalue()


def test_prompts_are_shown_with_nothing_marked(tmp_path: Path) -> None:
    out = _shown(tmp_path, [{"prompt": "1+1? [b]ü[/b]"}])
    assert "1 row as prompts, chat template" in out
    assert "\nrow-0: 33 tokens\n<|start|>user\n1+1? [b]ü[/b]<|end|>\n<|start|>assistant\n" in out
    assert "⟦" not in out


def test_a_config_shows_its_own_rows_as_its_run_makes_them(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    rows = [{"q": "1+1?", "a": "2", "level": 1}, {"q": "2+2?", "a": "4", "level": 9}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "keep": {"level": [5, None]}}
    tree: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "rewards": [{"name": "exact_number"}]}
    tree["data"] = {"train": source, "prompt_key": "q", "system_prompt": "Short."}

    def shown(config: Config | SupervisedConfig, rows: int = 3) -> str:
        stream = io.StringIO()
        inspect_config(config, rows, Console(file=stream, width=60))
        return stream.getvalue()

    said = shown(parse_config(tree))
    assert "data.train: 2 rows as prompts, chat template\n" in said
    assert "\n<|start|>system\nShort.<|end|>\n<|start|>user\n2+2?<|end|>\n<|start|>assistant\n" in said
    assert "1+1?" not in said
    assert "1 of 2 rows dropped as not_kept" in said
    del tree["rewards"]
    tree |= {"objective": {"name": "sft"}, "data": tree["data"] | {"response_key": "a"}}
    assert "<|start|>assistant\n⟦4<|end|>⟧\n" in shown(parse_supervised_config(tree))


def test_a_file_of_questions_is_read_as_megarl_train_reads_it(tmp_path: Path) -> None:
    assert "1 row as prompts" in _shown(tmp_path, [{"question": "1+1?", "answer": "2"}])


def test_a_conversation_marks_exactly_its_assistant_turns(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b ü"), ("user", "c" * 80), ("assistant", "d")]
    out = _shown(tmp_path, [{"messages": [{"role": role, "content": content} for role, content in turns]}])
    assert out.endswith(
        "<|start|>system\ns<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n⟦b ü<|end|>⟧\n"
        f"<|start|>user\n{'c' * 80}<|end|>\n<|start|>assistant\n⟦d<|end|>⟧\n"
    )
    assert "1 row as sft" in out
    assert ", 7 trained (prompt " in out


@pytest.mark.parametrize(
    ("row", "kind", "lines"),
    [
        ({"prompt": "q", "response": "r"}, "sft", ["q⟦r</s>⟧"]),
        ({"prompt": "q", "chosen": "x", "rejected": "y"}, "pairs", ["row-0/chosen: 4 tokens", "q⟦x</s>⟧", "q⟦y</s>⟧"]),
        ({"prompt": "q", "response": "r", "label": False}, "kto", ["2 trained (prompt 2), label 0", "q⟦r</s>⟧"]),
        ({"prompt": "q", "steps": ["a", "b"], "label": [1, 0.5]}, "steps", [", label 1, 0.5", "qa⟦\n⟧b⟦</s>⟧"]),
    ],
)
def test_the_kind_is_told_from_the_keys(tmp_path: Path, row: dict[str, Any], kind: str, lines: list[str]) -> None:
    out = _shown(tmp_path, [row], template=None)
    assert f"1 row as {kind}, plain text" in out
    for line in lines:
        assert line in out


def test_a_given_kind_counts_and_only_so_many_rows_are_shown(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "response": str(n), "label": True} for n in range(5)]
    out = _shown(tmp_path, rows, kind="sft", rows=2)
    assert "2 rows as sft" in out
    assert ("row-1" in out, "row-2" in out, "label" in out) == (True, False, False)


def test_a_terminal_shows_the_mask_in_colour(tmp_path: Path) -> None:
    from rich.style import Style

    out = _shown(tmp_path, [{"prompt": "q", "response": "r"}], terminal=True)
    assert "⟦" not in out
    for name, piece in [("trained", "r"), ("trained special", "<|end|>"), ("special", "<|start|>"), ("not trained", "user")]:
        codes = Style.parse(STYLES[name]).render("|").partition("|")[0]
        assert f"{codes}{piece}" in out, name


def test_dropped_rows_are_counted_and_bad_ones_named_with_their_line(tmp_path: Path) -> None:
    settings = SupervisedSettings(max_tokens=6, overlong="drop")
    out = _shown(tmp_path, [{"prompt": "q", "response": "x" * n} for n in (1, 9)], settings, template=None)
    assert "1 of 2 rows dropped as overlong" in out
    with pytest.raises(DataError, match=r"^'.*rows\.jsonl' line 2 has no key 'response'"):
        _shown(tmp_path, [{"prompt": "q", "response": "r"}, {"prompt": "q"}])
    with pytest.raises(DataError, match=r"rows of no known kind: they have a, b; they must have 'prompt' \(prompts\)"):
        _shown(tmp_path, [{"a": 1, "b": 2}])
    with pytest.raises(DataError, match=r"x\.txt' is no file.*; a dataset source needs one"):
        inspect(str(tmp_path / "x.txt"), str(tmp_path / "model"), SETTINGS)


def test_folders_and_parquet_files_are_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "q", "response": "r"}]), file)
    for path in (file, tmp_path / "data"):
        inspect(str(path), str(tmp_path / "model"), SETTINGS)
        assert "⟦r<|end|>⟧" in capsys.readouterr().out


@pytest.mark.skipif("pictures" not in OPTIONS, reason="needs the option pictures")
def test_pictures_are_shown_with_their_size_tokens_and_file(tmp_path: Path) -> None:
    model = seeing_folder(tmp_path / "model")
    for name, size in (("a", (640, 480)), ("b", (56, 84))):
        picture(*size).save(tmp_path / f"{name}.png")
    rows = [{"problem": "<image>\nHow <image> many?", "images": ["a.png", "b.png"]}, {"problem": "1 + 1?"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))

    def shown(**fields: Any) -> str:
        stream = io.StringIO()
        settings = SupervisedSettings(prompt_key="problem")
        pictures = PictureFields(image_folder=str(tmp_path), **fields)
        inspect(str(file), str(model), settings, console=Console(file=stream, width=60), pictures=pictures)
        return stream.getvalue()

    out = shown(media_folder=str(tmp_path / "media"))
    kept = sorted((tmp_path / "media").iterdir())
    first = re.search(r"picture 1: 252x168 px, patches 1x12x18, 54 tokens from (\d+) on, (.*)\n", out)
    second = re.search(r"picture 2: 56x84 px, patches 1x6x4, 6 tokens from (\d+) on, (.*)\n", out)
    assert first is not None
    assert second is not None
    assert sorted([Path(first[2]), Path(second[2])]) == kept
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{mark}\nHow {mark} many?<|im_end|>" in out
    parts = [{"type": "image"}, {"type": "text", "text": "\nHow "}, {"type": "image"}, {"type": "text", "text": " many?"}]
    whole = processed("qwen2_vl", [{"role": "user", "content": parts}], [picture(640, 480), picture(56, 84)])
    ids = whole["input_ids"][0].tolist()
    places = [at for at, token in enumerate(ids) if token == SPECIAL.index("<|image_pad|>")]
    assert f"row-0: {len(ids)} tokens" in out
    assert [int(first[1]), int(second[1])] == [places[0], places[54]]
    reduced = shown(max_pixels=28 * 28 * 16)
    assert "picture 1: 112x84 px, patches 1x6x8, 12 tokens" in reduced
    temporary = re.search(r"from \d+ on, (/.*/megarl-media-[^/]*)/", reduced)
    assert temporary is not None
    assert len([*Path(temporary[1]).iterdir()]) == 2
    shutil.rmtree(temporary[1])


def test_options_of_the_template_are_shown_as_a_run_would_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    template = tmp_path / "mine.jinja"
    template.write_text(QWEN3)
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.yaml"
    rows.write_text('{"prompt": "hi"}\n')
    source = {"source": "jsonl", "path": str(rows)}
    tree = {"model": {"path": str(tmp_path / "model")}, "data": {"train": source, "prompt_key": "prompt"}}
    config.write_text(json.dumps({**tree, "rewards": [{"name": "exact_number"}]}))
    said = [{"role": "user", "content": "hi"}]
    off = byte_tokenizer(QWEN3).apply_chat_template(said, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    options = ["--chat-template", str(template), "--template-args", "{enable_thinking: false}"]
    assert "<think>" in off
    for target in (["data", "inspect", str(config)], ["data", "inspect", str(rows), "--model", str(tmp_path / "model")]):
        assert main([*target, *options]) == 0
        assert off.strip() in capsys.readouterr().out
    overridden = [f"data.chat_template={template}", "data.template_args.enable_thinking=false"]
    assert main(["data", "inspect", str(config), *overridden]) == 0
    assert off.strip() in capsys.readouterr().out


@pytest.mark.parametrize("given", ["no", "[1]", "{a: ", "{enable_thinking: 2024-01-01}"])
def test_options_that_are_no_mapping_are_one_sentence(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(tmp_path / "rows.jsonl"), "--model", "none", "--template-args", given]) == 2
    assert "--template-args" in capsys.readouterr().err
