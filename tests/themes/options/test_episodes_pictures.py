"""Pictures that environments and tools show between turns: ids, grids and pixels are those of transformers' processor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megarl.config.sections import PictureFields
from megarl.data.row_media import open_media
from megarl.data.sample import Prompt, Sample, read_record
from megarl.data.tokenize import load_tokenizer
from megarl.errors import EpisodeError
from megarl.options.pictures.picture_settings import PictureSettings
from megarl.options.pictures.pixels import Pictures
from tests.data.chat_tokenizers import byte_tokenizer
from tests.data.seeing_folders import SPECIAL, TEMPLATE, processed, seeing_folder, seeing_tokenizer
from tests.rollout.episode_parts import Script, Settings, opened
from tests.rollout.picture_parts import FIRST, SECOND, THIRD, unwritable

PARTS = "tests.rollout.picture_parts"
IMAGE = SPECIAL.index("<|image_pad|>")
SAID = ("one", "two", "three")
Parts = list[dict[str, Any]]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


SHOWN = {"type": "image"}
PROMPT = Prompt("train-7", "train-7@2", seeing_tokenizer()("How?")["input_ids"], "How?", {"answer": "4"})


def turns(*said: str) -> list[tuple[list[int], Any]]:
    return [(seeing_tokenizer()(f"{text}<|im_end|>")["input_ids"], "stop") for text in said]


def settings_of(folder: Path, family: str = "qwen2_vl") -> PictureSettings:
    model = seeing_folder(folder / "model", family)
    found = open_media(PictureFields(), str(model), load_tokenizer(str(model)), folder / "run").model
    assert isinstance(found, PictureSettings)
    return found


def run(
    folder: Path, name: str, *said: str, family: str = "qwen2_vl", prompt: Prompt = PROMPT, max_new_tokens: int = 10_000,
    script: Script | None = None, pictures: PictureSettings | None = None, **options: Any,
) -> Sample:  # fmt: skip
    kind = "environment" if name[0].isupper() else "tools"
    pictures = pictures or settings_of(folder, family)
    settings = Settings(kind, [f"{PARTS}:{name}"], tool_timeout_s=60.0, **options)
    tokenizer = seeing_tokenizer()
    episode, context = opened(tokenizer, settings, max_new_tokens, pictures, media_folder=str(folder / "run/media"))
    try:
        return asyncio.run(episode(prompt, 0, script or Script(turns(*(said or SAID))), context))
    finally:
        context.close()


def assert_like_processor(
    sample: Sample, folder: Path, family: str, messages: Parts, pictures: Sequence[Image.Image], begins: Parts | None = None
) -> None:
    """The whole conversation is what transformers' processor makes of it at once; `begins`: the part that is the prompt."""
    expected = processed(family, messages, pictures, ask=False)
    ids = sample.prompt_ids + sample.response_ids
    assert ids == expected["input_ids"][0].tolist()[:-1]  # the line break behind the last turn is never written
    if begins is not None:
        asked = processed(family, begins, pictures[: sum(part == SHOWN for one in begins for part in one["content"])])
        assert sample.prompt_ids == asked["input_ids"][0].tolist()
    assert [list(media.grid) for media in sample.media] == expected["image_grid_thw"].tolist()
    covered = [at for media in sample.media for at in range(media.place, media.place + media.tokens)]
    assert covered == [at for at, token in enumerate(ids) if token == IMAGE]
    assert not any(mask for token, mask in zip(sample.response_ids, sample.sampled_mask, strict=True) if token == IMAGE)
    kept = Pictures(folder / "run/media", settings_of(folder, family).rules)
    patches = torch.cat([kept.patches(media) for media in sample.media])
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("name", ["Gallery", "InParts"])
def test_a_conversation_in_an_environment_is_what_the_processor_makes_of_it(tmp_path: Path, name: str, family: str) -> None:
    script = Script(turns(*SAID))
    sample = run(tmp_path, name, family=family, script=script)
    begins = [{"role": "user", "content": [text_part("H"), SHOWN, text_part("ow?")]}]
    conversation = [
        *begins, {"role": "assistant", "content": "one"},
        {"role": "user", "content": [SHOWN, text_part("Ho"), SHOWN, text_part(" th")]}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": [SHOWN]}, {"role": "assistant", "content": "three"},
    ]  # fmt: skip
    assert_like_processor(sample, tmp_path, family, conversation, [FIRST, SECOND, THIRD, THIRD], begins)
    assert (sample.rewards, sample.finish_reason) == ({"environment": 2.0}, "stop")
    # every turn was asked with the tokens and the pictures so far
    assert [ids for ids, _ in script.asked] == [
        (sample.prompt_ids + sample.response_ids)[: len(ids)] for ids, _ in script.asked
    ]
    assert [len(media) for media in script.shown] == [1, 3, 4]
    assert script.shown[-1] == sample.media
    # equal pictures are one file, and readers of turns find it
    digests = [media.digests[0] for media in sample.media]
    assert digests[2] == digests[3]
    assert len(list((tmp_path / "run/media").iterdir())) == 3
    told = [part for turn in sample.turns if turn["role"] == "user" for part in turn["content"]]
    assert [Path(part["image"]).stem for part in told if part["type"] == "image"] == digests[1:]
    assert all(Path(part["image"]).is_file() for part in told if part["type"] == "image")
    # and all of it is plain data
    assert read_record(Sample, json.loads(json.dumps(sample.to_dict()))) == sample
    assert sample.prompt_text.count("<|image_pad|>") == 1


def test_several_messages_and_steps_without_pictures(tmp_path: Path) -> None:
    sample = run(tmp_path, "InTurns")
    conversation = [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "Ho"}, {"role": "user", "content": [SHOWN]}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "th"}, {"role": "assistant", "content": "three"},
    ]  # fmt: skip
    whole = processed("qwen2_vl", conversation, [FIRST], ask=False)["input_ids"][0].tolist()
    start = len(processed("qwen2_vl", conversation[:1], [])["input_ids"][0])
    assert sample.prompt_ids == PROMPT.prompt_ids
    assert sample.response_ids == whole[start:-1]
    assert sample.turns[3] == {"role": "assistant", "content": "two"}
    assert sample.turns[4] == {"role": "user", "content": "th"}


def test_a_row_with_pictures_may_begin_in_the_environments_words(tmp_path: Path) -> None:
    shown = run(tmp_path, "Gallery", max_turns=1)
    [media] = shown.prompt_media
    path = tmp_path / "run/media" / f"{media.digests[0]}.png"
    prompt = replace(PROMPT, media=[replace(media, place=0)], row={"images": [str(path)]})
    again = run(tmp_path, "FromRow", prompt=prompt, max_turns=1)
    begins = [{"role": "user", "content": [SHOWN, text_part("again")]}]
    conversation = [*begins, {"role": "assistant", "content": "one"}]
    assert_like_processor(again, tmp_path, "qwen2_vl", conversation, [FIRST], begins)
    assert again.media[0].digests == media.digests


def call(name: str, which: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"which": "{which}"}}}}</tool_call>'


@pytest.mark.parametrize("name", ["look", "look_awaited"])
def test_tools_show_pictures(tmp_path: Path, name: str) -> None:
    """Two calls at once, then one whose picture is damaged, which is told like any error of a tool."""
    both = call(name, "first") + call(name, "second")
    sample = run(tmp_path, name, both, call(name, "damaged"), call(name, "results"), call(name, "own error"), "done")
    roles = [turn["role"] for turn in sample.turns]
    assert roles == ["assistant", "tool", "tool", *["assistant", "tool"] * 3, "assistant"]
    error = sample.turns[4]["content"]
    assert error.startswith("error: PictureError: picture 1 (100 bytes in the row) cannot be decoded, it is damaged or cut off")
    assert sample.turns[6]["content"] == '[{"title": "a cat", "image": "cat.png"}]'
    assert sample.turns[8]["content"] == "error: DataError: of the tool itself"
    answer = [text_part("see "), SHOWN, text_part(" there")]
    conversation = [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": both},
        {"role": "tool", "content": answer}, {"role": "tool", "content": answer},
        *({"role": turn["role"], "content": turn["content"]} for turn in sample.turns[3:]),
    ]  # fmt: skip
    whole = processed("qwen2_vl", conversation, [FIRST, SECOND], ask=False)["input_ids"][0].tolist()
    start = len(processed("qwen2_vl", conversation[:1], [])["input_ids"][0])
    assert sample.response_ids == whole[start:-1]
    assert [media.grid for media in sample.response_media] == [media.grid for media in sample.media]
    assert len(sample.media) == 2


@pytest.mark.parametrize("name", ["look", "look_awaited"])
def test_failed_pictures_of_tools_are_counted(tmp_path: Path, name: str) -> None:
    settings = Settings("tools", [f"{PARTS}:{name}"], tool_timeout_s=60.0)
    episode, context = opened(seeing_tokenizer(), settings, 10_000, settings_of(tmp_path))
    asyncio.run(episode(PROMPT, 0, Script(turns(call(name, "damaged"), "done")), context))
    context.close()
    assert context.take_counts()["tool_errors"] == 1


def test_a_model_of_text_is_told_that_it_takes_no_picture(tmp_path: Path) -> None:
    settings = Settings("tools", [f"{PARTS}:look_awaited"])
    _, context = opened(byte_tokenizer(), settings)
    assert context.tools is not None
    answer = asyncio.run(context.tools.call("look_awaited", {"which": "results"}))
    assert answer.told.text == '[{"title": "a cat", "image": "cat.png"}]'
    episode, context = opened(byte_tokenizer(), Settings("environment", [f"{PARTS}:Gallery"]))
    with pytest.raises(
        EpisodeError, match=rf"^the environment {PARTS}:Gallery shows row train-7 what cannot be shown: the model takes none"
    ):
        asyncio.run(episode(PROMPT, 0, Script(turns("one")), context))


def test_the_budget_counts_the_tokens_of_pictures(tmp_path: Path) -> None:
    """For every budget: never more tokens than it, and a picture that does not fit is not shown, nor is any part of it."""
    pictures = settings_of(tmp_path)
    whole = run(tmp_path, "Gallery", pictures=pictures)
    asked = 0
    for budget in range(1, len(whole.response_ids) + 2):
        sample = run(tmp_path, "Gallery", pictures=pictures, max_new_tokens=budget)
        assert len(sample.response_ids) <= budget
        assert sample.response_ids == whole.response_ids[: len(sample.response_ids)]
        assert sample.sampled_mask[-1] == 1
        assert sample.finish_reason == ("stop" if budget >= len(whole.response_ids) else "length")
        ids = sample.prompt_ids + sample.response_ids
        assert sample.media == [media for media in whole.media if media.place < len(ids)]
        assert sum(media.tokens for media in sample.media) == ids.count(IMAGE)
        asked = max(asked, len(sample.media))
    assert asked == 4


def test_what_is_cut_leaves_out_the_pictures_behind_the_cut(tmp_path: Path) -> None:
    sample = run(tmp_path, "Wide", max_turns=2)
    told = sample.turns[1]["content"]
    assert [part["type"] for part in told] == ["text", "image", "text"]
    assert told[0]["text"] + told[2]["text"] == f"{'y' * 100}\n[cut: 100 of 120 characters]"
    assert len(sample.response_media) == 1


def test_a_placeholder_spelled_out_is_no_picture(tmp_path: Path) -> None:
    sample = run(tmp_path, "Forging")
    assert len(sample.response_media) == 1
    ids = sample.prompt_ids + sample.response_ids
    assert sum(media.tokens for media in sample.media) == ids.count(IMAGE)
    assert "< |image_pad|>" in seeing_tokenizer().decode(sample.response_ids)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Missing", r"shows row train-7 what cannot be shown: picture 2 \('no/such.png'\) is no file"),
        ("MarksWithout", "shows row train-7 what cannot be shown: there are 1 pictures for 2 marks <image> in the text"),
        ("Moving", "shows row train-7 what cannot be shown: a part is a video; its frames must be shown as pictures"),
        ("BeginsForged", r"cannot begin row train-7: a message has the text '<\|vision_start\|>', which stands for a picture"),
    ],
)
def test_what_an_environment_cannot_show_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(EpisodeError, match=rf"^the environment {PARTS}:{name} {sentence}"):
        run(tmp_path, name)


def test_a_prompt_that_pictures_make_too_long_says_so(tmp_path: Path) -> None:
    settings = Settings("environment", [f"{PARTS}:Gallery"])
    episode, context = opened(seeing_tokenizer(), settings, 100, settings_of(tmp_path), max_prompt_tokens=20)
    with pytest.raises(EpisodeError, match=r"begins row train-7 with \d+ tokens, 6 of them for pictures, but data.max_prompt"):
        asyncio.run(episode(PROMPT, 0, Script(turns("one")), context))


@pytest.mark.parametrize("name", ["Gallery", "look", "look_awaited"])
def test_a_media_folder_that_cannot_be_written_ends_the_run(tmp_path: Path, name: str) -> None:
    pictures = replace(settings_of(tmp_path), media_folder=unwritable(tmp_path))
    with pytest.raises(EpisodeError, match=r"^the media folder '.*taken' cannot be written"):
        run(tmp_path, name, call(name, "first"), pictures=pictures)


def test_a_template_that_leaves_out_pictures_is_named(tmp_path: Path) -> None:
    without = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    settings = Settings("environment", [f"{PARTS}:Gallery"])
    episode, context = opened(seeing_tokenizer(without), settings, 100, settings_of(tmp_path))
    with pytest.raises(
        EpisodeError, match="does not write the pictures in messages of the roles user: there are 0 placeholders"
    ):
        asyncio.run(episode(PROMPT, 0, Script(turns("one")), context))
