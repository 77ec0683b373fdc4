"""Episodes token by token: what was sampled stays as it was sampled, what was told is masked, budgets hold."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.media import Media
from megarl.data.sample import Sample
from megarl.data.tokenize import PromptBuilder
from megarl.errors import EpisodeError
from megarl.rollout.episodes import load_episode
from tests.data.chat_tokenizers import CHATML, FORGETFUL, byte_tokenizer, ids_of
from tests.rollout.episode_parts import HERE, PROMPT, Script, Settings, opened

pytestmark = pytest.mark.needs_option("tools", "environments", "agents")

END, START, EOS = ids_of("<|end|>")[0], ids_of("<|start|>")[0], ids_of("</s>")[0]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
NO_NEWLINE = CHATML.replace("<|end|>\n", "<|end|>")
NO_END = CHATML.replace("<|end|>", "")
TRIMMING = CHATML.replace("m.content", "m.content | trim")
THINKING = (  # as Qwen 3: only the last turn has an empty thought
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "newline after the end": (CHATML, ["\n"]),
    "nothing after the end": (NO_NEWLINE, []),
    "earlier turns rewritten": (FORGETFUL, ["\n"]),
    "trimmed": (TRIMMING, ["\n"]),
    "thought only in the last turn": (THINKING, ["\n"]),
}


def run(tokenizer: Any, script: Script, settings: Settings | None = None, **options: Any) -> Sample:
    episode, context = opened(tokenizer, settings or Settings(tools=[f"{HERE}:slow"]), **options)
    try:
        return asyncio.run(episode(PROMPT, 3, script, context))
    finally:
        context.close()


def slow_call(seconds: float = 0) -> str:
    return f'<tool_call>{{"name": "slow", "arguments": {{"seconds": {seconds}}}}}</tool_call>'


def test_a_single_turn_is_the_engine_s_answer() -> None:
    tokenizer = byte_tokenizer(None)
    script = Script([([*ids_of("yes"), EOS], "stop")])
    episode, context = opened(tokenizer, Settings(kind="single", tools=()), max_new_tokens=50)
    sample = asyncio.run(episode(PROMPT, 3, script, context))
    assert script.asked == [([10, 11, 12], 50)]
    assert sample == Sample(
        sample_id="train-7@2/3", group_id="train-7@2", row_id="train-7", prompt_ids=[10, 11, 12],
        response_ids=[*ids_of("yes"), EOS], sampled_mask=[1] * 4, rollout_log_probs=[0, -0.125, -0.25, -0.375],
        weight_versions=[0] * 4, finish_reason="stop", prompt_text="a prompt", response_text="yes", row={"answer": "4"},
    )  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_ids_are_those_sampled_and_the_template_s_turns_between_them(template: str) -> None:
    """Random turns, many of them ids that no tokenizer would make of their text; the expected ids are spelled out by hand."""
    text, after_end = TEMPLATES[template]
    tokenizer = byte_tokenizer(text, merges=(("a", "b"),))
    told_head = [*after_end, "<|start|>", "tool\n"]
    tail = ["<|end|>", *after_end, "<|start|>", "assistant\n"]
    rng = random.Random(template)
    for _ in range(20):
        turns: list[tuple[list[int], Any]] = []
        expected, mask = [], []
        for _ in range(rng.randrange(1, 5)):
            noise = [rng.randrange(4, 260) for _ in range(rng.randrange(9))]  # a and b, never the token ab
            turn = [*noise, *ids_of(slow_call()), END]
            turns.append((turn, "stop"))
            told = ids_of(*told_head, '{"waited": 0}', *tail)
            expected += [*turn, *told]
            mask += [1] * len(turn) + [0] * len(told)
        last = [*ids_of("ab", "todo"), END]
        turns.append((last, "stop"))
        script = Script(turns)
        sample = run(tokenizer, script)
        assert sample.response_ids == expected + last
        assert sample.sampled_mask == mask + [1] * len(last)
        assert sample.finish_reason == "stop"
        assert sample.response_text == "abtodo"
        check_bookkeeping(sample, script)


def check_bookkeeping(sample: Sample, script: Script, budget: int = 10_000) -> None:
    """Each turn was asked after exactly the tokens before it, and log-probs and versions are the sampler's, in order."""
    number, at = 0, 0
    for ids, max_new_tokens in script.asked:
        at = len(ids) - len(sample.prompt_ids)
        assert ids == sample.prompt_ids + sample.response_ids[:at]
        assert max_new_tokens == budget - at > 0
    for place, sampled in enumerate(sample.sampled_mask):
        assert sample.rollout_log_probs[place] == (-number / 8 if sampled else 0.0)
        assert sample.weight_versions[place] == (number if sampled else number - 1) // 10
        number += sampled
    assert number == script.sampled
    assert sample.sampled_mask[-1] == 1


def test_a_whole_conversation_is_what_the_template_makes_of_it() -> None:
    """Where the policy says what the tokenizer would, the ids are those of the conversation rendered and tokenised at once."""
    tokenizer = byte_tokenizer(CHATML)
    question = [{"role": "user", "content": "2 + 2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False)
    said = [slow_call(), f"{slow_call(0)}{slow_call(0.0)}", "four"]
    script = Script([([*tokenizer(text, add_special_tokens=False)["input_ids"], END], "stop") for text in said])
    episode, context = opened(tokenizer, Settings(tools=[f"{HERE}:slow"]))
    sample = asyncio.run(episode(type(PROMPT)("r", "g", prompt, ""), 0, script, context))
    conversation = [
        *question,
        {"role": "assistant", "content": said[0]}, {"role": "tool", "content": '{"waited": 0}'},
        {"role": "assistant", "content": said[1]},
        {"role": "tool", "content": '{"waited": 0}'}, {"role": "tool", "content": '{"waited": 0.0}'},
        {"role": "assistant", "content": said[2]},
    ]  # fmt: skip
    whole = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert sample.prompt_ids + sample.response_ids == whole[:-1]  # the line break behind the last turn is never written
    assert [{"role": t["role"], "content": t["content"]} for t in sample.turns] == conversation[1:]


@pytest.mark.parametrize(
    ("template", "ends_with", "expected"),
    [
        (CHATML, EOS, ["\n"]),  # the policy may end a turn with another end token: it stays, and the template's is left out
        (CHATML, None, ["<|end|>", "\n"]),  # or with an ordinary token at which sampling stops: the template's comes after it
        (NO_END, EOS, ["\n"]),
    ],
)
def test_a_turn_ends_once(template: str, ends_with: int | None, expected: list[str]) -> None:
    call = ids_of(slow_call())
    turn = call if ends_with is None else [*call, ends_with]
    sample = run(byte_tokenizer(template), Script([(turn, "stop"), ([5, END], "stop")]))
    after = ids_of(*expected, "<|start|>", "tool\n")
    assert sample.response_ids[: len(turn) + len(after)] == turn + after


def test_a_template_without_end_tokens_keeps_the_token_that_begins_a_turn() -> None:
    ask = "{% if add_generation_prompt %}<|start|>{% endif %}"
    bare = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}{% endfor %}" + ask
    turn = [*ids_of(slow_call()), EOS]
    sample = run(byte_tokenizer(bare), Script([(turn, "stop"), ([5, EOS], "stop")]))
    assert sample.response_ids == [*turn, *ids_of("<|start|>", 'tool {"waited": 0}', "<|start|>"), 5, EOS]


def test_the_budget_holds_for_all_turns_together() -> None:
    """For every budget: never more tokens than it, a sampled token at the end, and the same tokens as with more budget."""
    turn = [*ids_of(slow_call()), END]
    turns = [(turn, "stop"), (turn, "stop"), ([*ids_of("done"), END], "stop")]
    tokenizer = byte_tokenizer(CHATML)
    whole = run(tokenizer, Script(turns)).response_ids  # type: ignore[arg-type]
    reasons = []
    for budget in range(1, len(whole) + 3):
        script = Script(turns)  # type: ignore[arg-type]
        sample = run(tokenizer, script, max_new_tokens=budget)
        assert len(sample.response_ids) <= budget
        assert sample.response_ids == whole[: len(sample.response_ids)]
        assert sample.finish_reason == ("stop" if len(sample.response_ids) == len(whole) else "length")
        check_bookkeeping(sample, script, budget)
        reasons.append(sample.finish_reason)
    assert reasons == ["length"] * (len(whole) - 1) + ["stop"] * 3


@pytest.mark.parametrize("max_turns", [1, 2, 5])
def test_an_episode_that_wants_more_turns_is_cut(max_turns: int) -> None:
    script = Script([([*ids_of(slow_call()), END], "stop")])
    sample = run(byte_tokenizer(CHATML), script, Settings(tools=[f"{HERE}:slow"], max_turns=max_turns))
    assert len(script.asked) == max_turns
    assert sample.finish_reason == "length"
    assert sample.response_ids[-1] == END
    assert sample.sampled_mask[-1] == 1


def test_an_aborted_turn_ends_the_episode_as_aborted() -> None:
    sample = run(byte_tokenizer(CHATML), Script([([*ids_of(slow_call()), END], "stop"), (ids_of("par"), "abort")]))
    assert sample.finish_reason == "abort"
    assert sample.response_text == "par"


def test_calls_of_one_turn_run_at_once_and_are_answered_in_order() -> None:
    calls = slow_call(0.6) + slow_call(0.2) + slow_call(0.4)
    tokenizer = byte_tokenizer(CHATML)

    async def timed() -> tuple[Sample, float]:
        episode, context = opened(tokenizer, Settings(tools=[f"{HERE}:slow"]))
        started = asyncio.get_running_loop().time()
        sample = await episode(PROMPT, 0, Script([([*ids_of(calls), END], "stop"), ([5, END], "stop")]), context)
        assert context.take_counts() == {"turns": 2, "tool_calls": 3}
        assert context.take_counts() == {}
        return sample, asyncio.get_running_loop().time() - started

    sample, seconds = asyncio.run(timed())
    assert [turn["content"] for turn in sample.turns[1:4]] == ['{"waited": 0.6}', '{"waited": 0.2}', '{"waited": 0.4}']
    assert 0.6 <= seconds < 1.2


def test_an_engine_s_error_and_a_cancellation_pass_through() -> None:
    async def broken(ids: list[int], max_new_tokens: int, media: Any = None) -> Any:
        raise ConnectionError("gone")

    async def endless(ids: list[int], max_new_tokens: int, media: Any = None) -> Any:
        await asyncio.sleep(600)

    episode, context = opened(byte_tokenizer(CHATML), Settings(tools=[f"{HERE}:slow"]))
    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(episode(PROMPT, 0, broken, context))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(episode(PROMPT, 0, endless, context), 0.05))


@pytest.mark.parametrize(
    ("settings", "template", "data", "sentence"),
    [
        (
            Settings(kind="tool"),
            CHATML,
            {},
            r"kind is 'tool' \(did you mean 'tools'\?\); it must be single, environment, tools",
        ),
        (Settings(kind="nowhere:f"), CHATML, {}, "nowhere cannot be imported"),
        (Settings(tools=()), CHATML, {}, "rollout.episode.tools is empty"),
        (Settings(tools=[f"{HERE}:add", f"{HERE}:add"]), CHATML, {}, "two tools called 'add'"),
        (Settings(tools=[f"{HERE}:ad"]), CHATML, {}, r"no function 'ad' \(did you mean 'add'\?\)"),
        (Settings(tools=[f"{HERE}:undocumented"]), CHATML, {}, "has no schema: .*needs type hints and a docstring"),
        (Settings(), None, {}, "tokenizer has none; it must be 'single'"),
        (Settings(), CHATML, {"chat_template": "never"}, "data.chat_template is 'never'"),
        (
            Settings(),
            CHATML.replace("messages %}", "messages if m.role != 'tool' %}"),
            {},
            "leaves out messages of role 'tool'",
        ),
        (Settings(), CHATML.replace("m.content", "m.content | upper"), {}, "word for word"),
        (Settings(kind="environment", tools=()), CHATML, {}, "has 0 names, but .* needs one"),
        (Settings(kind="environment", tools=[f"{HERE}:Count"]), CHATML, {}, r"did you mean 'Counting'\?"),
    ],
)
def test_what_cannot_work_is_said_before_the_run(
    settings: Settings, template: Any, data: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EpisodeError, match=sentence):
        opened(byte_tokenizer(template), settings, **data)


@pytest.mark.parametrize("kind", ["single", "tools"])
def test_a_sample_has_its_prompts_pictures(kind: str) -> None:
    tokenizer = byte_tokenizer()
    seen = replace(PROMPT, media=[Media("image", ("a1",), (1, 2, 2), 1, 1)])
    episode, context = opened(tokenizer, Settings(kind=kind, tools=[f"{HERE}:slow"] if kind == "tools" else ()))
    try:
        sample = asyncio.run(episode(seen, 0, Script([([*ids_of("yes"), END], "stop")]), context))
    finally:
        context.close()
    assert sample.media == seen.media


def test_prompts_say_which_tools_there_are() -> None:
    named = "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}" + CHATML
    tokenizer = byte_tokenizer(named)
    _, context = opened(tokenizer, Settings(tools=[f"{HERE}:add", f"{HERE}:slow"]))
    data = DataConfig(train=SourceConfig(name="chain_sum"))
    (prompt,) = PromptBuilder(tokenizer, data, context.tool_schemas).build([{"question": "2 + 2?"}], prefix="train")
    expected = ids_of("add: Add two numbers.\nslow: Wait.\n", *opening("2 + 2?"))
    assert prompt.prompt_ids == expected
    (without,) = PromptBuilder(tokenizer, data).build([{"question": "2 + 2?"}], prefix="train")
    assert without.prompt_ids == ids_of(*opening("2 + 2?"))


def opening(question: str) -> list[str]:
    return ["<|start|>", f"user\n{question}", "<|end|>", "\n", "<|start|>", "assistant\n"]


def test_an_episode_may_be_the_user_s_own() -> None:
    assert load_episode("megarl.rollout.episodes.single:single_turn") is load_episode("single")
