"""Pictures in agents' messages: whatever protocol they come by, ids, grids and pixels are those of transformers' processor."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl.data.media import Media
from megarl.data.sample import Sample
from megarl.options.agents import anthropic_form, openai_form, responses_form
from megarl.options.agents.episode import KeptTurns, samples_of
from megarl.options.agents.messages import ChatRequest, RequestError
from megarl.options.agents.session import AgentSession, History, SessionLimits
from megarl.options.pictures.picture_keeper import PictureKeeper
from megarl.rollout.episodes.turns import TurnTemplate
from tests.data.seeing_folders import encoded, picture, seeing_tokenizer
from tests.rollout.episode_parts import Script
from tests.rollout.picture_parts import FIRST, SECOND, THIRD, as_url
from tests.themes.options.test_episodes_pictures import PROMPT, SHOWN, assert_like_processor, settings_of, text_part, turns

LIMITS = SessionLimits(turns=9, context_tokens=10_000, response_tokens=10_000)
OTHER = picture(90, 60, 9)
"""Of FIRST's size."""
Content = list[str | Image.Image]


def keeper_of(folder: Path) -> PictureKeeper:
    settings = settings_of(folder)
    return PictureKeeper(settings.rules, settings.media_folder)


def chat(said: list[Content | str], keeper: PictureKeeper | None) -> ChatRequest:
    """What was told and said in turn, as chat completions have it."""

    def part(piece: str | Image.Image) -> dict[str, Any]:
        return text_part(piece) if isinstance(piece, str) else {"type": "image_url", "image_url": {"url": as_url(piece)}}

    messages = [
        {"role": "assistant", "content": one} if isinstance(one, str) else {"role": "user", "content": [*map(part, one)]}
        for one in said
    ]
    return openai_form.read_request({"model": "megarl", "messages": messages}, keeper)


def response(said: list[Content | str], keeper: PictureKeeper | None) -> ChatRequest:
    def part(piece: str | Image.Image) -> dict[str, Any]:
        is_text = isinstance(piece, str)
        return {"type": "input_text", "text": piece} if is_text else {"type": "input_image", "image_url": as_url(piece)}

    items = [
        {"role": "assistant", "content": one} if isinstance(one, str) else {"role": "user", "content": [*map(part, one)]}
        for one in said
    ]
    return responses_form.read_request({"model": "megarl", "input": items}, {}, keeper).chat


def message(said: list[Content | str], keeper: PictureKeeper | None) -> ChatRequest:
    def part(piece: str | Image.Image) -> dict[str, Any]:
        if isinstance(piece, str):
            return text_part(piece)
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(piece)).decode()}
        return {"type": "image", "source": source}

    messages = [
        {"role": "assistant", "content": one} if isinstance(one, str) else {"role": "user", "content": [*map(part, one)]}
        for one in said
    ]
    return anthropic_form.read_request({"model": "megarl", "max_tokens": 99, "messages": messages}, keeper)


async def acted(folder: Path, requests: list[ChatRequest], history: History, script: Script) -> list[Sample]:
    """The samples of an agent that asks so, one request after the other."""
    tokenizer, settings = seeing_tokenizer(), settings_of(folder)

    def renderer(tools: Any) -> TurnTemplate:
        return TurnTemplate(tokenizer, [], "user", settings)

    session = AgentSession(LIMITS, KeptTurns(script), renderer, Counter(), history, keeper_of(folder))
    for request in requests:
        for turn in await session.answers(request):
            turn.is_delivered = True
    return samples_of(PROMPT, 0, session.tree, tokenizer, renderer(()), 10_000, settings.media_folder)


@pytest.mark.parametrize("history", ["tokens", "template"])
@pytest.mark.parametrize("form", [chat, response, message])
def test_a_conversation_with_pictures_is_what_the_processor_makes_of_it(
    tmp_path: Path, form: Callable[..., ChatRequest], history: History
) -> None:
    opening: Content = ["H", FIRST, "ow?"]
    later: Content = [SECOND, "Ho", THIRD, " th"]
    keeper, script = keeper_of(tmp_path), Script(turns("one", "two"))
    requests = [form([opening], keeper), form([opening, "one", later], keeper)]
    [sample] = asyncio.run(acted(tmp_path, requests, history, script))
    begins = [{"role": "user", "content": [text_part("H"), SHOWN, text_part("ow?")]}]
    conversation = [
        *begins, {"role": "assistant", "content": "one"},
        {"role": "user", "content": [SHOWN, text_part("Ho"), SHOWN, text_part(" th")]}, {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    assert_like_processor(sample, tmp_path, "qwen2_vl", conversation, [FIRST, SECOND, THIRD], begins)
    assert [len(media) for media in script.shown] == [1, 3]
    assert script.shown[1] == sample.media
    shown = [part["image"] for turn in sample.turns if turn["role"] == "user" for part in turn["content"] if "image" in part]
    assert [Path(path).stem for path in shown] == [media.digests[0] for media in sample.media[1:]]


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_another_picture_of_the_same_size_is_another_history(tmp_path: Path, history: History) -> None:
    """Its tokens are the same; what was sampled for the one is not given to the other."""
    keeper, script = keeper_of(tmp_path), Script(turns("one", "two", "three"))
    told = [[["How?", one]] for one in (FIRST, OTHER)]
    requests = [chat(told[0], keeper), chat(told[1], keeper), chat([*told[1], "two", ["again"]], keeper)]
    samples = asyncio.run(acted(tmp_path, requests, history, script))
    assert samples[0].prompt_ids == samples[1].prompt_ids
    assert len(script.asked) == 3
    last, first = ([media.digests[0] for media in sample.media] for sample in samples)
    assert [media.digests[0] for media in script.shown[0]] == first
    assert [[media.digests[0] for media in shown] for shown in script.shown[1:]] == [last, last]
    assert first != last
    assert [sum(sample.sampled_mask) for sample in samples] == [len(turns("two")[0][0]) + len(turns("three")[0][0]), 4]


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_a_history_with_another_picture_does_not_go_on_from_the_first(tmp_path: Path, history: History) -> None:
    keeper, script = keeper_of(tmp_path), Script(turns("one", "two"))
    requests = [chat([["How?", FIRST]], keeper), chat([["How?", OTHER], "one", ["again"]], keeper)]
    later, first = asyncio.run(acted(tmp_path, requests, history, script))
    assert later.prompt_media != first.prompt_media
    assert len(later.prompt_ids) > len(first.prompt_ids), "all of it was told, and nothing of it sampled"
    assert script.shown[1] == later.media


def test_a_later_try_that_shows_another_picture_is_not_given_what_was_sampled_for_the_first(tmp_path: Path) -> None:
    script = Script(turns("one", "two"))
    kept = KeptTurns(script)
    first, other = (Media("image", (digest,), (1, 4, 4), 1, 4) for digest in ("a", "b"))
    one = asyncio.run(kept([1, 2], 9, [first]))
    kept.begin_try()
    assert asyncio.run(kept([1, 2], 9, [other])) != one
    assert asyncio.run(kept([1, 2], 9, [first])) == one


def test_a_tool_of_anthropics_may_answer_with_a_picture(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path)
    [shown] = message([[FIRST]], keeper).messages
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(FIRST)).decode()}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text_part("see"), {"type": "image", "source": source}]}
    given = {"model": "megarl", "messages": [{"role": "user", "content": [result, text_part("and?")]}]}
    tool, user = anthropic_form.read_request(given, keeper).messages
    assert (tool.role, tool.text, tool.pictures) == ("tool", "see", ((3, shown.pictures[0][1]),))
    assert (user.text, user.pictures) == ("and?", ())


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("/etc/passwd", "messages[0].content has a picture that is no data: URL; addresses, files and ids are not read here"),
        ("file:///etc/passwd", "that is no data: URL"),
        ("https://example.com/a.png", "that is no data: URL"),
        ({"id": "file-1"}, "that is no data: URL"),
        (as_url(FIRST)[:200], "messages[0].content: picture 1"),
        ("data:image/png;base64,!!", "messages[0].content: picture 1"),
    ],
)
def test_pictures_that_cannot_be_taken_are_refused_in_a_sentence(tmp_path: Path, url: Any, sentence: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url} if isinstance(url, str) else url}
    given = {"model": "megarl", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(RequestError) as refused:
        openai_form.read_request(given, keeper_of(tmp_path))
    assert sentence in str(refused.value)
    with pytest.raises(RequestError, match=r"messages\[0\].content has a picture, but the model takes none"):
        openai_form.read_request(given)
