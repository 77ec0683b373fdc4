"""Rows as other trainers write them become the ids and pixels of transformers' own processor; bad rows are one sentence."""

from __future__ import annotations

import json
import os
import pickle
import re
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from megarl.config.sections import DataConfig, PictureFields
from megarl.config.sources import SourceConfig
from megarl.data.held_out import drop_eval_overlap
from megarl.data.media import Media
from megarl.data.prompts import load_rows
from megarl.data.row_media import open_media
from megarl.data.rows import Origin
from megarl.data.sample import Prompt, Sample, read_record
from megarl.data.supervised import Kind, SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, ModelError, PictureError
from megarl.options.pictures.picture_reader import READ_AHEAD, PictureReader
from megarl.options.pictures.picture_rules import load_picture_rules
from megarl.options.pictures.pixels import patches_of
from tests.data.seeing_folders import (
    PROCESSORS,
    SPECIAL,
    TEMPLATE,
    encoded,
    picture,
    processed,
    seeing_folder,
    seeing_tokenizer,
)

FAMILIES = [*PROCESSORS]
SIZES = [(100, 70), (31, 200), (640, 480)]
"""Resized up, up with another ratio, and down."""
PICTURES = [picture(*size, seed) for seed, size in enumerate(SIZES)]
USER_1 = [{"type": "image"}, {"type": "text", "text": "\nHow many?\n\n"}, {"type": "image"}, {"type": "text", "text": "?"}]


def _reader(folder: Path, family: str = "qwen2_vl", **fields: Any) -> PictureReader:
    model = seeing_folder(folder / "model", family)
    reader = open_media(PictureFields(**fields), str(model), load_tokenizer(str(model)), folder / "run")
    assert isinstance(reader, PictureReader)
    return reader


def _prompts(
    folder: Path, rows: list[dict[str, Any]], source: SourceConfig | None = None, *, family: str = "qwen2_vl", **fields: Any
) -> list[Prompt]:
    data = DataConfig(**{"train": source or SourceConfig(source="jsonl", path="rows.jsonl"), "prompt_key": "problem"} | fields)
    model = seeing_folder(folder / "model", family)
    tokenizer = load_tokenizer(str(model))
    return PromptBuilder(tokenizer, data, (), open_media(data, str(model), tokenizer, folder / "run")).build(
        rows, prefix="train"
    )


def _assert_like_processor(
    prompt: Prompt | Sample,
    folder: Path,
    family: str,
    messages: list[dict[str, Any]],
    pictures: list[Image.Image],
    rest: int = 0,
) -> None:
    """Ids, grids and pixels are those of transformers' processor, given the pictures as they were; `rest`: ids to leave out."""
    expected = processed(family, messages, pictures, ask=rest == 0)
    ids = expected["input_ids"][0].tolist()
    assert prompt.prompt_ids == ids[: len(ids) - rest]
    assert [list(one.grid) for one in prompt.media] == expected["image_grid_thw"].tolist()
    placeholder = seeing_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    covered = [at for one in prompt.media for at in range(one.place, one.place + one.tokens)]
    assert covered == [at for at, token in enumerate(prompt.prompt_ids) if token == placeholder]
    rules = load_picture_rules(folder / "model")
    patches = torch.cat([patches_of(one.files(folder / "run/media"), rules) for one in prompt.media])
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-6)


# the formats of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_easyr1(tmp_path: Path, family: str) -> None:
    structs = [{"bytes": encoded(one), "path": None} for one in PICTURES]
    (tmp_path / "2.png").write_bytes(encoded(PICTURES[2]))
    rows = [
        {"images": structs[:2], "problem": "<image>\nHow many?\n\n<image>?", "answer": "3"},
        {"images": [{"bytes": None, "path": str(tmp_path / "2.png")}], "problem": "Find x.<image>", "answer": "4"},
        {"images": [], "problem": "1 + 1?", "answer": "2"},
    ]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = SourceConfig(source="parquet", path=str(file))
    prompts = _prompts(tmp_path, load_rows(source), source, family=family)
    _assert_like_processor(prompts[0], tmp_path, family, [{"role": "user", "content": USER_1}], PICTURES[:2])
    last = [{"type": "text", "text": "Find x."}, {"type": "image"}]
    _assert_like_processor(prompts[1], tmp_path, family, [{"role": "user", "content": last}], PICTURES[2:])
    plain = processed(family, [{"role": "user", "content": "1 + 1?"}], [])
    assert (prompts[2].prompt_ids, prompts[2].media) == (plain["input_ids"][0].tolist(), [])
    assert [prompt.row["answer"] for prompt in prompts] == ["3", "4", "2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_lmm_r1(tmp_path: Path, family: str) -> None:
    file = tmp_path / "a b.png"
    file.write_bytes(encoded(PICTURES[0]))
    content = [{"type": "image", "image": f"file://{tmp_path}/a%20b.png"}, {"type": "text", "text": "How many?"}]
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": content}]
    rows = [
        {"message": json.dumps(messages), "answer": "$3$"},
        {"message": json.dumps([messages[0], messages[1] | {"content": "?"}])},
    ]
    prompts = _prompts(tmp_path, rows, family=family, prompt_key="message")
    _assert_like_processor(prompts[0], tmp_path, family, messages, PICTURES[:1])
    assert prompts[0].row["answer"] == "$3$"
    text_only = processed(family, [messages[0], {"role": "user", "content": "?"}], [])
    assert prompts[1].prompt_ids == text_only["input_ids"][0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_r1_v(tmp_path: Path, family: str) -> None:
    rows = [
        {"image": {"bytes": encoded(PICTURES[0], "JPEG", quality=95), "path": "x.jpg"}, "problem": "How many?", "solution": "3"}
    ]
    table = pyarrow.Table.from_pylist(rows)
    folder = tmp_path / "dataset"
    folder.mkdir()
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    source = SourceConfig(source="dataset", path=str(folder))
    [prompt] = _prompts(tmp_path, load_rows(source), source, family=family, image_key="image")
    seen = Image.open(__import__("io").BytesIO(rows[0]["image"]["bytes"]))  # type: ignore[index]
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    _assert_like_processor(prompt, tmp_path, family, [{"role": "user", "content": content}], [seen])


@pytest.mark.parametrize("names", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_llama_factory(tmp_path: Path, family: str, names: tuple[str, str, str, str]) -> None:
    role, value, user, assistant = names
    for number, one in enumerate(PICTURES[:2]):
        (tmp_path / f"{number}.png").write_bytes(encoded(one))
    turns = [("<image>\nHow many?\n\n<image>?", user), ("3 <b>", assistant), ("Sure?", user), ("Yes.", assistant)]
    row = {"messages": [{role: who, value: text} for text, who in turns], "images": ["0.png", "1.png"]}
    builder = SupervisedBuilder(
        seeing_tokenizer(family=family),
        "sft",
        SupervisedSettings(messages_key="messages"),
        _reader(tmp_path, family, image_folder=str(tmp_path)),
    )
    [sample] = builder.build([row], prefix="train")
    answered = [
        {"role": "assistant", "content": "3 <b>"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    messages = [{"role": "user", "content": USER_1}, *answered]
    expected = processed(family, messages, PICTURES[:2], ask=False)["input_ids"][0].tolist()
    assert sample.prompt_ids + sample.response_ids == expected[:-1]  # but the line break behind the last end token
    _assert_like_processor(sample, tmp_path, family, messages, PICTURES[:2], rest=len(sample.response_ids) + 1)
    tokenizer = seeing_tokenizer(family=family)
    trained = [token for token, is_trained in zip(sample.response_ids, sample.sampled_mask, strict=True) if is_trained]
    assert tokenizer.decode(trained) == "3 <b><|im_end|>Yes.<|im_end|>"


# other forms -----------------------------------------------------------------------------------------------------------


def _forms(folder: Path) -> dict[str, Any]:
    import base64

    content = encoded(PICTURES[0])
    (folder / "p.png").write_bytes(content)
    return {
        "path": str(folder / "p.png"),
        "Path": folder / "p.png",
        "relative": "p.png",
        "file URL": f"file://{folder}/p.png",
        "data URL": "data:image/png;base64," + base64.b64encode(content).decode(),
        "bytes": content,
        "struct": {"bytes": content, "path": "elsewhere.png"},
        "url struct": {"url": f"file://{folder}/p.png"},
        "PIL": PICTURES[0],
    }


def test_every_form_of_a_picture_gives_the_same_prompt(tmp_path: Path) -> None:
    forms = _forms(tmp_path)
    asked = "Which? "
    rows = [{"images": [form], "problem": f"{asked}<image>"} for form in forms.values()]
    parts: list[dict[str, Any]] = [{"type": "image", "image": form} for form in forms.values()]
    parts += [
        {"type": "image_url", "image_url": {"url": forms["data URL"]}},
        {"image": forms["path"]},
        {"type": "image", "path": "p.png"},
    ]
    parts += [{"type": "image", "image": forms["path"], "text": None}]  # a table's struct has all fields
    for part in parts:
        text = {"type": "text", "text": asked, "image": None}
        rows.append({"problem": [{"role": "user", "content": [text, part]}]})
    rows += [
        {"images": form, "problem": [{"role": "user", "content": [{"type": "text", "text": asked}, {"type": "image"}]}]}
        for form in forms.values()
    ]
    prompts = _prompts(tmp_path, rows, image_folder=str(tmp_path))
    first = prompts[0]
    assert len(prompts) == 2 * len(forms) + len(parts)
    assert {(tuple(p.prompt_ids), tuple(p.media), p.prompt_text) for p in prompts} == {
        (tuple(first.prompt_ids), tuple(first.media), first.prompt_text)
    }
    assert first.prompt_text.count("<|image_pad|>") == 1
    assert [file.name for file in (tmp_path / "run/media").iterdir()] == [f"{first.media[0].digests[0]}.png"]


def test_without_a_template_the_models_own_tokens_stand_for_pictures(tmp_path: Path) -> None:
    rows = [{"images": [PICTURES[0]], "problem": "How many <image>?"}, {"images": PICTURES[0], "problem": "How many?"}]
    marked, bare = _prompts(tmp_path, rows, chat_template="never", system_prompt="Be brief.")
    tokens = marked.media[0].tokens
    text = f"Be brief.\n\nHow many <|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>?"
    assert marked.prompt_ids == seeing_tokenizer()(text)["input_ids"]
    assert bare.prompt_text == "<|vision_start|><|image_pad|><|vision_end|>Be brief.\n\nHow many?"


def test_without_a_template_glms_own_tokens_stand_for_pictures_and_those_of_videos_are_refused(tmp_path: Path) -> None:
    fields = {"family": "glm4v_moe", "chat_template": "never"}
    [prompt] = _prompts(tmp_path, [{"images": [PICTURES[0]], "problem": "How many <image>?"}], **fields)
    text = f"How many <|begin_of_image|>{'<|image|>' * prompt.media[0].tokens}<|end_of_image|>?"
    assert prompt.prompt_ids == seeing_tokenizer(family="glm4v_moe")(text)["input_ids"]
    for token in ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"):
        with pytest.raises(PictureError, match=rf"has the text '{re.escape(token)}' in the user's turn, which stands for a"):
            _prompts(tmp_path, [{"problem": f"a {token} b"}], **fields)
    [plain] = _prompts(tmp_path, [{"problem": "a <|image_pad|> b"}], **fields)  # text to this model
    assert len(plain.prompt_ids) == len("a <|image_pad|> b") - 1


def test_without_a_template_a_word_stands_inside_of_kimis_pictures_and_its_tokens_are_refused(tmp_path: Path) -> None:
    fields = {"family": "kimi_k25", "chat_template": "never"}
    [prompt] = _prompts(tmp_path, [{"images": [PICTURES[0]], "problem": "How many <image>?"}], **fields)
    placeholders = "<|media_pad|>" * prompt.media[0].tokens
    text = f"How many <|media_begin|>image<|media_content|>{placeholders}<|media_end|>?"
    assert prompt.prompt_ids == seeing_tokenizer(family="kimi_k25")(text)["input_ids"]
    for token in ("media_begin", "media_content", "media_pad", "media_end", "kimi_k25_video_placeholder"):
        with pytest.raises(PictureError, match=rf"has the text '<\|{token}\|>' in the user's turn, which stands for a"):
            _prompts(tmp_path, [{"problem": f"a <|{token}|> b"}], **fields)
    with pytest.raises(ModelError, match=r"data\.min_pixels is 100; it must be null: .* enlarges no picture"):
        _prompts(tmp_path, [{"images": [PICTURES[0]], "problem": "<image>"}], min_pixels=100, **fields)
    with pytest.raises(ModelError, match=r"data\.video is 'native', which .* has not in megarl"):
        _prompts(tmp_path, [{"images": [PICTURES[0]], "problem": "<image>"}], video="native", **fields)
    [prompt] = _prompts(tmp_path, [{"images": [PICTURES[2]], "problem": "<image>"}], max_pixels=14 * 14 * 40, **fields)
    assert prompt.media[0].grid == (1, 6, 8)


def test_marks_are_text_where_rows_have_no_pictures_by_the_config(tmp_path: Path) -> None:
    row = {"images": [b"junk"], "problem": "<image> is a tag, as <video> is"}
    [prompt] = _prompts(tmp_path, [row], image_key=None, video_key=None)
    expected = processed("qwen2_vl", [{"role": "user", "content": row["problem"]}], [])
    assert (prompt.prompt_ids, prompt.media) == (expected["input_ids"][0].tolist(), [])
    assert prompt.row == {"images": [None], "problem": row["problem"]}


def test_the_models_limits_are_the_default_and_the_configs_go_before(tmp_path: Path) -> None:
    rows = [{"images": [PICTURES[2]], "problem": "<image>"}, {"images": [picture(20, 20)], "problem": "<image>"}]
    grids = [p.media[0].grid for p in _prompts(tmp_path, rows)]
    narrow = [p.media[0].grid for p in _prompts(tmp_path, rows, min_pixels=84 * 84, max_pixels=28 * 28 * 16)]
    assert grids == [(1, 12, 18), (1, 4, 4)]
    assert narrow == [(1, 6, 8), (1, 6, 6)]


def test_lengths_count_the_tokens_of_pictures(tmp_path: Path) -> None:
    row = {"images": [PICTURES[2]], "problem": "<image>"}
    sentence = r"a prompt of 113 tokens, 54 of them for pictures, .* is 112; raise it, lower data\.max_pixels, or set"
    [prompt] = _prompts(tmp_path, [row], max_prompt_tokens=113)
    assert len(prompt.prompt_ids) == 113
    with pytest.raises(DataError, match=sentence):
        _prompts(tmp_path, [row], max_prompt_tokens=112)
    reader = _reader(tmp_path)
    row |= {"response": "3"}
    settings = SupervisedSettings(prompt_key="problem", max_tokens=115)
    [sample] = SupervisedBuilder(seeing_tokenizer(), "sft", settings, reader).build([row], prefix="train")
    assert (sample.total_length, sample.prompt_ids, sample.media) == (115, prompt.prompt_ids, prompt.media)
    with pytest.raises(DataError, match=r"has 115 tokens, but data\.max_tokens is 114"):
        SupervisedBuilder(seeing_tokenizer(), "sft", replace(settings, max_tokens=114), reader).build([row], prefix="train")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("pairs", {"chosen": "3", "rejected": "4"}),
        ("kto", {"response": "3", "label": True}),
        ("steps", {"steps": ["a", "b"], "label": [1, 0]}),
        ("pairs", {"chosen": [{"role": "assistant", "content": "3"}], "rejected": [{"role": "assistant", "content": "4"}]}),
    ],
)
def test_every_kind_of_supervised_row_has_the_prompt_of_a_rollout(tmp_path: Path, kind: Kind, fields: dict[str, Any]) -> None:
    row = {"images": PICTURES[:2], "problem": "<image>\nHow many?\n\n<image>?"}
    [prompt] = _prompts(tmp_path, [row])
    builder = SupervisedBuilder(seeing_tokenizer(), kind, SupervisedSettings(prompt_key="problem"), _reader(tmp_path))
    samples = builder.build([row | fields], prefix="train")
    assert len(samples) == (2 if kind == "pairs" else 1)
    assert all((one.prompt_ids, one.media) == (prompt.prompt_ids, prompt.media) for one in samples)


# what travels ----------------------------------------------------------------------------------------------------------


def test_no_picture_travels_with_a_prompt(tmp_path: Path) -> None:
    noise = picture(600, 400, 7)
    content = encoded(noise)
    messages = [{"role": "user", "content": [{"type": "image", "image": content}, {"type": "text", "text": "?"}]}]
    data_url = _forms(tmp_path)["data URL"]
    rows = [
        {"images": [{"bytes": content, "path": None}], "problem": "<image>", "preview": noise, "raw": {"a": [content]}},
        {"problem": messages},
        {"problem": json.dumps([{"role": "user", "content": [{"type": "image", "image": data_url}]}])},
        {"images": noise, "problem": "?"},
    ]
    prompts = _prompts(tmp_path, rows)
    for prompt in prompts:
        assert len(pickle.dumps(prompt)) < 4000
        json.dumps(asdict(prompt))
    kept = str(prompts[0].media[0].files(tmp_path / "run/media")[0])
    assert prompts[0].row == {"images": [kept], "problem": "<image>", "preview": None, "raw": {"a": [None]}}
    assert prompts[1].row["problem"][0]["content"][0] == {"type": "image", "image": kept}
    assert rows[0]["images"][0]["bytes"] is content, "the user's rows stay as they were"  # type: ignore[index]


def test_prompts_and_samples_keep_their_media_through_json(tmp_path: Path) -> None:
    [prompt] = _prompts(tmp_path, [{"images": PICTURES[:2], "problem": "<image><image>"}])
    assert read_record(Prompt, json.loads(json.dumps(asdict(prompt)))) == prompt
    sample = Sample("s", "g", "r", prompt.prompt_ids, [1], [1], [0.0], [0], "stop", media=prompt.media)
    assert read_record(Sample, json.loads(json.dumps(sample.to_dict()))) == sample
    assert sample.media[1] == Media(
        "image", prompt.media[1].digests, prompt.media[1].grid, prompt.media[1].place, prompt.media[1].tokens
    )
    former = sample.to_dict() | {"media": ["a.png"]}  # what versions before pictures wrote
    assert read_record(Sample, former) == replace(sample, media=[])


def test_a_row_is_held_out_by_its_pictures_too(tmp_path: Path) -> None:
    rows = [{"images": [picture(56, 56, seed)], "problem": "How many?"} for seed in (0, 1)]
    first, second = _prompts(tmp_path, rows)
    assert first.prompt_ids == second.prompt_ids
    assert drop_eval_overlap([first, second], [second]) == [first]


# what does not fit -----------------------------------------------------------------------------------------------------

MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "more marks": ({"images": [PICTURES[0]], "problem": "<image><image>"}, "has 1 picture under 'images', but 2 places"),
    "fewer marks": ({"images": PICTURES[:2], "problem": "<image>"}, "has 2 pictures under 'images', but 1 place for them"),
    "a mark and no column": ({"problem": "<image>", "images": None}, "has 0 pictures under 'images', but 1 place "),
    "a video's mark": ({"problem": "<video>", "videos": []}, "has 0 videos under 'videos', but 1 place for them"),
    "placeholder typed": ({"problem": "a <|image_pad|> b"}, r"has the text '<\|image_pad\|>' in the user's turn"),
    "start typed": ({"problem": "a <|vision_start|> b"}, r"has the text '<\|vision_start\|>' in the user's turn"),
    "missing": ({"images": ["no.png"], "problem": "<image>"}, r"picture 1 of 1 \('no\.png'\) is no file \(/.*no\.png\)"),
    "a folder": ({"images": ["/tmp"], "problem": "<image>"}, r"picture 1 of 1 \('/tmp'\) cannot be read: Is a directory"),
    "empty": ({"images": [b""], "problem": "<image>"}, r"picture 1 of 1 \(0 bytes in the row\) is empty"),
    "junk": ({"images": [b"junk" * 9], "problem": "?"}, r"picture 1 of 1 \(36 bytes in the row\) is not of a format .* PNG"),
    "a URL": ({"images": ["https://x.y/a.png"], "problem": "?"}, r"'https://x\.y/a\.png'\) is a URL, which megarl does not"),
    "a damaged data URL": ({"images": ["data:image/png;base64,%%"], "problem": "?"}, "is a data: URL whose base64 is damaged"),
    "a number": ({"images": [7], "problem": "?"}, "picture 1 of 1 .* is 7, but it must be a path, bytes or a struct"),
    "a null": ({"images": [PICTURES[0], None], "problem": "<image>"}, "picture 2 of 2 .* is null, but it must be a path"),
    "an empty struct": ({"images": [{"bytes": None, "path": None}], "problem": "?"}, "must have bytes, a path or a url"),
    "in an answer": (
        {"problem": [{"role": "assistant", "content": [{"type": "image", "image": PICTURES[0]}]}]},
        "has a picture in an assistant turn; it must be in another turn",
    ),
    "twice": (
        {"images": [PICTURES[0]], "problem": [{"role": "user", "content": [{"type": "image", "image": PICTURES[1]}]}]},
        "has pictures both in its messages and in a column",
    ),
    "without a user": (
        {"images": [PICTURES[0]], "problem": [{"role": "system", "content": "?"}]},
        "has 1 picture, but no user turn that they could be in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_a_bad_row_is_one_sentence_or_dropped_and_counted(tmp_path: Path, name: str) -> None:
    row, sentence = MISUSES[name]
    good = {"images": [PICTURES[0]], "problem": "<image>"}
    with pytest.raises(
        PictureError, match=rf"^data\.train \('rows\.jsonl'\) row 1 \(counted from 0\)[: ].*{sentence}"
    ) as caught:
        _prompts(tmp_path, [good, row])
    assert str(caught.value).endswith("; mend the row, or set data.bad_pictures to 'drop'")
    assert "\n" not in str(caught.value)
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="problem", bad_pictures="drop")
    builder = PromptBuilder(seeing_tokenizer(), data, (), _reader(tmp_path))
    assert [prompt.row_id for prompt in builder.build([good, row, good], prefix="train")] == ["train-0", "train-2"]
    assert builder.dropped == {"overlong": 0, "bad_pictures": 1, "not_kept": 0}
    with pytest.raises(DataError, match="gives no prompts: of 1 row 1 dropped as bad_pictures"):
        builder.build([row], prefix="train")


def test_supervised_rows_with_bad_pictures_are_dropped_and_counted_too(tmp_path: Path) -> None:
    rows = [{"prompt": "<image>", "response": "3", "images": [one]} for one in (PICTURES[0], b"junk")]
    with pytest.raises(PictureError, match=r"row 1 .* picture 1 of 1 .* is not of a format"):
        SupervisedBuilder(seeing_tokenizer(), "sft", SupervisedSettings(), _reader(tmp_path)).build(rows, prefix="train")
    builder = SupervisedBuilder(seeing_tokenizer(), "sft", SupervisedSettings(bad_pictures="drop"), _reader(tmp_path))
    assert len(builder.build(rows, prefix="train")) == 1
    assert builder.dropped["bad_pictures"] == 1


@pytest.mark.parametrize("choice", ["auto", "never"])
def test_a_response_with_a_token_of_pictures_is_refused(tmp_path: Path, choice: Any) -> None:
    builder = SupervisedBuilder(seeing_tokenizer(), "sft", SupervisedSettings(chat_template=choice), _reader(tmp_path))
    with pytest.raises(PictureError, match=r"row 0 .* has the text '<\|image_pad\|>' in the assistant's turn"):
        builder.build([{"prompt": "?", "response": "a <|image_pad|>"}], prefix="train")


def test_a_part_without_a_picture_is_refused_where_there_is_no_column(tmp_path: Path) -> None:
    row = {"problem": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(PictureError, match=r"has 0 pictures as data\.image_key is null, but 1 place for them"):
        _prompts(tmp_path, [row], image_key=None)


def test_a_part_that_is_neither_text_nor_a_picture_is_refused(tmp_path: Path) -> None:
    row = {"problem": [{"role": "user", "content": [{"type": "smell", "smell": "a.wav"}]}]}
    with pytest.raises(DataError, match=r"in the user's turn; it must be text, a picture or a video"):
        _prompts(tmp_path, [row])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_conversation_may_show_pictures_behind_its_first_answer(tmp_path: Path, family: str) -> None:
    """One picture before it, two behind it, and one behind the last, which is left out with its turn."""
    shown = [picture(90, 60, 1), picture(60, 120, 2), picture(64, 64, 3), picture(70, 70, 4)]
    turns = [
        ("user", "<image>How?"),
        ("assistant", "!"),
        ("user", "<image>t<image>"),
        ("assistant", "How 3"),
        ("user", "<image>"),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in turns], "images": shown}
    reader = _reader(tmp_path, family)
    builder = SupervisedBuilder(seeing_tokenizer(), "sft", SupervisedSettings(messages_key="messages"), reader)
    [sample] = builder.build([row], prefix="train")
    messages = [{"role": role, "content": _parts(text)} for role, text in turns[:-1]]
    expected = processed(family, messages, shown[:3], ask=False)
    whole = expected["input_ids"][0].tolist()
    assert sample.prompt_ids + sample.response_ids == whole[:-1]  # the line break behind the last turn
    asked = processed(family, messages[:1], shown[:1])["input_ids"][0].tolist()
    assert sample.prompt_ids == asked
    tokenizer = seeing_tokenizer()
    said = [tokenizer(f"{text}<|im_end|>")["input_ids"] for text in ("!", "How 3")]
    between = len(sample.response_ids) - sum(map(len, said))
    assert sample.sampled_mask == [1] * len(said[0]) + [0] * between + [1] * len(said[1])
    assert [list(media.grid) for media in sample.media] == expected["image_grid_thw"].tolist()
    ids, image = sample.prompt_ids + sample.response_ids, SPECIAL.index("<|image_pad|>")
    shows = [at for media in sample.media for at in range(media.place, media.place + media.tokens)]
    assert shows == [at for at, token in enumerate(ids) if token == image]
    assert [len(sample.prompt_media), len(sample.response_media)] == [1, 2]
    assert sample == read_record(Sample, json.loads(json.dumps(sample.to_dict())))


def _parts(text: str) -> list[dict[str, str]]:
    pieces = [piece for piece in re.split("(<image>)", text) if piece]
    return [{"type": "image"} if piece == "<image>" else {"type": "text", "text": piece} for piece in pieces]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"images": [b"x"], "problem": "?"}, r"has pictures under 'images' \(data\.image_key\), but the model takes none"),
        ({"videos": "a.mp4", "problem": "?"}, r"has videos under 'videos' \(data\.video_key\), but the model takes none"),
        ({"problem": [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]}, "has pictures in its messages, but"),
    ],
)
def test_a_text_model_refuses_pictures(row: dict[str, Any], sentence: str) -> None:
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="problem", bad_pictures="drop")
    with pytest.raises(DataError, match=sentence):
        PromptBuilder(seeing_tokenizer(), data).build([row], prefix="train")
    with pytest.raises(DataError, match=sentence):
        SupervisedBuilder(seeing_tokenizer(), "sft", SupervisedSettings(prompt_key="problem")).build([row], prefix="train")
    without = {"images": [], "videos": None, "problem": "<image>"}
    [prompt] = PromptBuilder(seeing_tokenizer(), data).build([without], prefix="train")
    assert "<image>" in prompt.prompt_text
    assert prompt.row is without


def test_rows_whose_pictures_would_be_overlooked_are_refused(tmp_path: Path) -> None:
    rows = [{"image": PICTURES[0], "problem": "How many?"}]
    sentence = (
        r"data\.train .* has nothing under 'images' \(data\.image_key\), but under 'image'; set data\.image_key to 'image'"
    )
    with pytest.raises(DataError, match=sentence):
        _prompts(tmp_path, rows)
    assert _prompts(tmp_path, rows, image_key=None)[0].media == []
    assert len(_prompts(tmp_path, [*rows, {"images": PICTURES[0], "problem": "?"}])) == 2


def test_a_template_that_knows_no_pictures_is_named(tmp_path: Path) -> None:
    model = seeing_folder(tmp_path / "model", template="{% for m in messages %}{{ m.role }}{% endfor %}")
    tokenizer = load_tokenizer(str(model))
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="problem")
    builder = PromptBuilder(tokenizer, data, (), open_media(data, str(model), tokenizer, tmp_path / "run"))
    with pytest.raises(DataError, match="has a part of type 'image' in its content, but the chat template takes text alone; "):
        builder.build([{"images": [PICTURES[0]], "problem": "<image>"}], prefix="train")


def test_the_processors_template_goes_before_the_tokenizers(tmp_path: Path) -> None:
    model = seeing_folder(tmp_path / "model", template=None)
    assert load_tokenizer(str(model)).chat_template is None
    (model / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(str(model)).chat_template == TEMPLATE
    (model / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json' holds no chat template"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"resample": 2}, "its image processor's resample is 2; it must be 3"),
        ({"do_resize": False}, "its image processor's do_resize is False; it must be True"),
    ],
)
def test_image_processors_that_do_otherwise_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    model = seeing_folder(tmp_path, **change)
    with pytest.raises(ModelError, match=sentence):
        open_media(PictureFields(), str(model), seeing_tokenizer(), tmp_path)


def test_the_settings_of_a_whole_processor_are_read(tmp_path: Path) -> None:
    """transformers 5 writes the image processor into processor_config.json."""
    expected = load_picture_rules(seeing_folder(tmp_path, "qwen3_vl"))
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": settings, "processor_class": "Qwen3VLProcessor"})
    )
    assert load_picture_rules(tmp_path) == expected
    assert (expected.patch, expected.max_pixels, expected.mean) == (16, 32 * 32 * 64, (0.5, 0.5, 0.5))


def test_the_limits_of_glms_processor_count_both_frames_of_a_patch(tmp_path: Path) -> None:
    rules = load_picture_rules(seeing_folder(tmp_path, "glm4v_moe"))
    assert (rules.min_pixels, rules.max_pixels, rules.grows_first) == (56 * 56, 28 * 28 * 64, True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("Glm4vImageProcessor", "Glm46VImageProcessor"))  # that of GLM-4.6V
    assert load_picture_rules(tmp_path) == rules
    seeing_folder(tmp_path, "glm4v_moe", size={"shortest_edge": 6273, "longest_edge": 10**6})
    with pytest.raises(ModelError, match=r"its image processor's size is \[6273, 1000000\], but .* multiples of 2 frames"):
        load_picture_rules(tmp_path)


@pytest.mark.parametrize(
    ("vision", "sentence"),
    [
        ({"patch_size": 16}, "its image processor's patch_size is 14, but config.json's tower has patch_size 16"),
        ({"spatial_merge_size": 3}, "merge_size is 2, but config.json's tower has spatial_merge_size 3"),
    ],
)
def test_the_image_processor_of_another_tower_is_refused(tmp_path: Path, vision: dict[str, int], sentence: str) -> None:
    config = json.loads((seeing_folder(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    with pytest.raises(ModelError, match=sentence):
        load_picture_rules(tmp_path)


def test_folders_that_lack_something_are_named(tmp_path: Path) -> None:
    model = seeing_folder(tmp_path)
    with pytest.raises(DataError, match=r"pictures of 3136 to 700 pixels are impossible .* at least data\.min_pixels and 784"):
        open_media(PictureFields(max_pixels=700), str(model), seeing_tokenizer(), tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"image_token_id": 20}))
    with pytest.raises(ModelError, match="has image_token_id 20, which is no special token of the tokenizer"):
        open_media(PictureFields(), str(model), seeing_tokenizer(), tmp_path)
    del config["image_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no image_token_id, but a model that sees must have one"):
        open_media(PictureFields(), str(model), seeing_tokenizer(), tmp_path)
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="has no image processor that can be loaded"):
        open_media(PictureFields(), str(model), seeing_tokenizer(), tmp_path)


def test_a_media_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the media folder '.*/file/media' cannot be written: .*Not a directory"):
        _prompts(tmp_path, [{"images": [PICTURES[0]], "problem": "?"}], media_folder=str(tmp_path / "file/media"))


def test_few_rows_are_in_memory_with_their_pictures(tmp_path: Path) -> None:
    shown: list[weakref.ref[Image.Image]] = []
    most = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal most
        for number in range(150):
            image = picture(56, 56, number)
            shown.append(weakref.ref(image))
            most = max(most, sum(one() is not None for one in shown))
            yield {"images": [image], "problem": "?"}
            del image

    found = [*_reader(tmp_path).light_rows(rows(), Origin("data.train"), ["problem"])]
    assert len(found) == 150
    assert most <= (READ_AHEAD + 2) * (os.cpu_count() or 1) + 2


def test_many_rows_keep_their_order_and_the_first_bad_one_is_told(tmp_path: Path) -> None:
    rows = [{"images": [picture(40 + 28 * (n % 5), 60, n)], "problem": f"{n}<image>"} for n in range(40)]
    prompts = _prompts(tmp_path, rows)
    assert [prompt.prompt_text.count(f"{n}<|vision_start|>") for n, prompt in enumerate(prompts)] == [1] * 40
    assert len({prompt.media[0].digests for prompt in prompts}) == 40
    reader = _reader(tmp_path)
    rows[3]["images"] = rows[20]["images"] = [b"junk"]
    told = [row for _, row in reader.light_rows(rows, Origin("data.train"), ["problem"]) if isinstance(row, PictureError)]
    assert [str(one).partition(" picture")[0] for one in told] == [
        "data.train row 3 (counted from 0):",
        "data.train row 20 (counted from 0):",
    ]
