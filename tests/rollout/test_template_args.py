"""Options of the chat template between turns: what the policy is told is what transformers writes with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.data.chat_tokenizers import byte_tokenizer, ids_of
from tests.rollout.episode_parts import HERE, PROMPT, Script, Settings, opened

END = ids_of("<|end|>")[0]
TEMPLATE = (
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}{%- endif %}"
)
OFF = {"enable_thinking": False}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


class Echo:
    """An environment that begins by itself and repeats what it is told."""

    def reset(self, prompt: Any) -> str:
        return "begin"

    def step(self, text: str) -> tuple[str, float, bool]:
        return "go on", 0.0, False


@pytest.mark.parametrize(
    ("of_run", "of_row", "thinks"),
    [({}, None, True), (OFF, None, False), (OFF, {"enable_thinking": True}, True), ({}, '{"enable_thinking": false}', False)],
)
@pytest.mark.needs_option("tools", "environments")
@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_turns_follow_as_the_options_say(kind: str, of_run: dict[str, Any], of_row: Any, thinks: bool) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    script = Script([([*ids_of(CALL), END], "stop"), ([*ids_of("done"), END], "stop")])
    name = f"{HERE}:add" if kind == "tools" else f"{__name__}:Echo"
    episode, context = opened(tokenizer, Settings(kind=kind, tools=[name], max_turns=2), template_args=of_run)
    prompt = replace(PROMPT, row={**PROMPT.row, "template_args": of_row})
    try:
        asyncio.run(episode(prompt, 0, script, context))
    finally:
        context.close()
    (first, _), (second, _) = script.asked
    told = tokenizer.decode(second[len(first) + len(ids_of(CALL)) + 1 :])
    (role, said) = ("tool", "4") if kind == "tools" else ("user", "go on")
    args = {"enable_thinking": thinks}
    spoken = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": CALL}, {"role": role, "content": said}]
    whole = tokenizer.apply_chat_template(spoken, add_generation_prompt=True, tokenize=False, **args)
    assert told == whole.partition(f"{CALL}<|end|>")[2]
    assert ("<think></think>" in told) is not thinks
    if kind == "environment":  # which begins with messages of its own
        assert tokenizer.decode(first) == tokenizer.apply_chat_template(
            spoken[:1], add_generation_prompt=True, tokenize=False, **args
        )
