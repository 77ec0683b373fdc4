"""Calls of tools in the formats of several families, as SGLang's own parsers read them."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from typing import Any

import pytest

from megarl.rollout.episodes.tool_calls import parse_turn

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "stops": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
ARGUMENTS: dict[str, Any] = {"city": "São 12", "days": 3, "share": 0.5, "deep": True, "stops": ["a", "b"]}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
WRITTEN = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ARGUMENTS.items()}
QWEN = f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n"
    + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in WRITTEN.items())
    + "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n"
    + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in WRITTEN.items())
    + "</tool_call>"
)
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
KIMI = [f"<|tool_call_begin|>functions.weather:{n}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>" for n in (0, 1)]
HARMONY = f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
FORMATS = {
    "qwen": ("qwen25_detector.Qwen25Detector", f"Let me look.\n{QWEN}\n{QWEN}"),
    "qwen coder": ("qwen3_coder_detector.Qwen3CoderDetector", f"Let me look.\n{CODER}\n{CODER}"),
    "glm": ("glm4_moe_detector.Glm4MoeDetector", f"Let me look.\n{GLM}\n{GLM}"),
    "deepseek v3": (
        "deepseekv3_detector.DeepSeekV3Detector",
        f"Let me look.<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": (
        "deepseekv31_detector.DeepSeekV31Detector",
        f"Let me look.<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "kimik2_detector.KimiK2Detector",
        f"Let me look.<|tool_calls_section_begin|>{KIMI[0]}{KIMI[1]}<|tool_calls_section_end|>",
    ),
    "mistral": ("mistral_detector.MistralDetector", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]'),
    "gpt-oss": ("gpt_oss_detector.GptOssDetector", f"<|channel|>analysis<|message|>hm<|end|>{HARMONY}"),
}


SGLANG = """
import importlib, json, sys, tempfile
from pathlib import Path
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(tempfile.mkdtemp()))
from sglang.srt.entrypoints.openai.protocol import Function, Tool
given = json.load(sys.stdin)
tools = [Tool(type="function", function=Function(**tool["function"])) for tool in given["tools"]]
read = {}
for name, (detector, text) in given["formats"].items():
    module, _, kind = detector.partition(".")
    found = getattr(importlib.import_module("sglang.srt.function_call." + module), kind)().detect_and_parse(text, tools)
    read[name] = [found.normal_text, [[call.name, json.loads(call.parameters)] for call in found.calls]]
print("read " + json.dumps(read))
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """By format what SGLang's parser reads, the text and the calls: in a process of its own, with stand-ins for CUDA's
    parts."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    given = json.dumps({"tools": TOOLS, "formats": FORMATS})
    done = subprocess.run([sys.executable, "-c", SGLANG], input=given, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("read ")]
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("read "))


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_those_that_sglang_reads(name: str, theirs: dict[str, Any]) -> None:
    text, calls = theirs[name]
    ours = parse_turn(FORMATS[name][1], TOOLS)
    assert calls, "SGLang reads no call there"
    assert [[call.name, call.arguments] for call in ours.calls] == calls
    assert [call.arguments for call in ours.calls] == [ARGUMENTS] * len(calls)
    if name not in ("gpt-oss", "mistral"):
        assert ours.text == text.strip() == "Let me look."


@pytest.mark.parametrize(
    ("said", "reasoning", "text"),
    [
        ("<think>hm</think>\n\n42", "hm", "42"),
        ("it was open</think>42", "it was open", "42"),
        ("<think>cut in the mid", "cut in the mid", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42", "hm", "42"),
        ("42", "", "42"),
        ('<think><tool_call>{"name": "weather", "arguments": {}}</tool_call></think>no', None, "no"),
    ],
)
def test_thoughts_are_apart_and_not_read_for_calls(said: str, reasoning: str | None, text: str) -> None:
    turn = parse_turn(said, TOOLS)
    assert turn.calls == []
    assert turn.text == text
    if reasoning is not None:
        assert turn.reasoning == reasoning


@pytest.mark.parametrize("seed", range(40))
def test_no_text_makes_it_raise(seed: int) -> None:
    numbers = random.Random(seed)
    marks = [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=",
            ">",
            "<parameter=a>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "{",
            "}",
        ),
        *(
            '"name"',
            ":",
            '"weather"',
            "[TOOL_CALLS]",
            "[ARGS]",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<|tool_call_begin|>",
        ),
        *("<|tool_call_argument_begin|>", "<|channel|>", "to=", "<|message|>", "<think>", "</think>", " ", "x", "[" * 3000),
    ]
    for _ in range(100):
        turn = parse_turn("".join(numbers.choices(marks, k=numbers.randrange(1, 25))), TOOLS)
        assert all(call.name or call.problem for call in turn.calls)
