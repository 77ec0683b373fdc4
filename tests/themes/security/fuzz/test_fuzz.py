"""Of what others made up, damaged or wrote at random nothing comes but sentences: some hundred inputs of every kind.

`benchmarks/fuzz.py` looks on for hours. What it found is in `FOUND`, shortened.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config.sources import SourceConfig
from megarl.data.chat import ChatTemplate
from megarl.data.prompts import rows_of
from megarl.data.rows import Origin, RowPlace
from megarl.errors import DataError
from megarl.rollout.episodes.tool_calls import parse_turn
from tests.themes.security.fuzz.targets import TARGETS, quick_templates, run_quietly, tokenizer

EXAMPLES = {"rows": 40, "http_answers": 40, "chat_templates": 60}
OTHERS = 200


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Seeds of a target with pieces replaced by other bytes, by its words or by nothing, and words in any order."""
    target = TARGETS[name]
    piece = st.one_of(st.sampled_from(target.words), st.binary(max_size=6), st.just(b""))
    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), piece), min_size=1, max_size=6)

    def changed(given: tuple[bytes, list[tuple[int, int, bytes]]]) -> bytes:
        data, edits = given
        for at, length, new in edits:
            start = at % (len(data) + 1)
            data = data[:start] + new + data[start + length :]
        return data

    damaged = st.tuples(st.sampled_from(target.seeds), changes).map(changed)
    begins = st.sampled_from([seed[:1] for seed in target.seeds])
    made_up = st.tuples(begins, st.lists(piece, max_size=40).map(b"".join)).map(b"".join)
    return st.one_of(damaged, made_up)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_of_an_input_is_a_sentence(name: str) -> None:
    @settings(
        max_examples=EXAMPLES.get(name, OTHERS), derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(inputs(name))
    def check(data: bytes) -> None:
        run_quietly(TARGETS[name], data)

    check()


METADATA = TARGETS["checkpoints"].seeds[0]
FOUND = {
    "metadata_that_names_no_file": ("checkpoints", METADATA.replace(b"__0_0.distcp", b"__0\0_.distcp")),
    "metadata_without_offsets": ("checkpoints", METADATA.replace(b"offset", b"offsex")),
    "metadata_without_lengths": ("checkpoints", METADATA.replace(b"length", b"lengtx")),
    "metadata_without_descriptions": ("checkpoints", METADATA.replace(b"state_dict_m", b"state_dict_n")),
    "half_a_character_in_a_prompt": ("rows", b'l{"p": "\\ud800", "r": "a"}'),
    "half_a_character_in_a_response": ("rows", b'l{"p": "q", "r": "\\udfff"}'),
    "half_a_character_in_a_message": ("rows", b'l{"p": [{"role": "user", "content": "\\ud800"}]}'),
    "half_a_character_in_a_step": ("rows", b'l{"p": "q", "steps": [{"text": "\\ud800", "label": 1}]}'),
    "a_pickle_that_says_it_is_large": ("checkpoints", base64.b64decode("ZIAEjgAAAAAAAABALg==")),
    "a_message_whose_parts_are_texts": ("rows", b'l{"m": [{"from": "gpt", "value": ["x"]}]}'),
    "a_message_from_an_object": ("rows", b'|{"r": [{"from": {}, "value": ""}]}'),
    "tools_nested_deeply": ("rows", b'l{"m": [{"from": "human", "value": "x"}], "tools": "' + b"[" * 50_000 + b'"}'),
    "a_config_whose_model_type_is_a_list": ("safetensors", b'c{"model_type": []}'),
    "a_file_whose_name_is_too_long": ("safetensors", b'i{"weight_map": {"a": "' + b"x" * 300 + b'"}}'),
    "a_state_that_is_nested_deeply": ("checkpoints", b"s" + b"[" * 100_000),
    "a_state_that_is_no_object": ("checkpoints", b"s[]"),
    "a_header_that_is_nested_deeply": ("safetensors", b"h" + b'{"a":' * 50_000),
    "a_header_with_infinity": ("safetensors", b'h{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 1e999]}}'),
    "negative_sizes": ("safetensors", b'h{"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}'),
    "an_index_that_is_nested_deeply": ("safetensors", b"i" + b"[" * 100_000),
    "an_index_with_half_a_character": ("safetensors", b'i{"weight_map": {"a": "\\ud800"}}'),
    "a_config_with_a_long_number": ("safetensors", b'c{"a": ' + b"9" * 5000 + b"}"),
    "a_config_whose_architectures_are_a_number": ("safetensors", b'c{"architectures": 3}'),
    "a_template_with_a_long_range": ("chat_templates", b"{% for i in range(1000000000) %}{% endfor %}"),
    "a_template_that_calls_itself": ("chat_templates", b"{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    target, data = FOUND[name]
    run_quietly(TARGETS[target], data)


MARKS = ("<arg_key>", "<arg_key>a</arg_key>", "<arg_key></arg_key><arg_value>")
MARKS += ("<function=", "<function=\n", "<parameter=", "<tool_call>")


@pytest.mark.parametrize("unit", MARKS)
def test_marks_that_a_policy_repeats_cost_no_more_than_their_number(unit: str) -> None:
    """Eight thousand of them took from nine seconds to hours, in the process that all other episodes wait for."""
    for begin in ("<tool_call>", "<tool_call><function=f>"):
        parse_turn(begin + unit * 200_000)


TEMPLATES = {
    "loops": "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubles": "{% set n = namespace(a='a' * 1000) %}{% for i in range(90000) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "gathers": "{% set n = namespace(a=[]) %}{% for i in range(90000) %}{% set n.a = n.a + ['a' * 100000 ~ i] %}{% endfor %}",
    "huge": "{{ 'a' * 10 ** 17 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_without_an_end_is_ended(name: str) -> None:
    tokenizer().chat_template = TEMPLATES[name]
    place = RowPlace(Origin("data.train"), 0)
    with quick_templates(), pytest.raises(DataError, match="does not fit the tokenizer's chat template: it took more"):
        ChatTemplate(tokenizer(), "auto", None).render([{"role": "user", "content": "hi"}], place, ask=True)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "cycler.__init__.__globals__.os.popen('touch made').read()",
        "messages.__class__.__base__.__subclasses__()",
        "'{0.__class__.__init__.__globals__}'.format(namespace)",
        "raise_exception.__globals__",
        "self.__init__.__globals__",
    ],
)
def test_a_chat_template_reaches_nothing_but_what_it_is_given(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer().chat_template = "[{{ " + expression + " }}]"
    template = ChatTemplate(tokenizer(), "auto", None)
    try:
        said = template.render([{"role": "user", "content": "hi"}], RowPlace(Origin("data.train"), 0), ask=True)
    except DataError:
        said = "[]"
    assert "object at 0x" not in said
    assert "__builtins__" not in said
    assert said == "[]"
    assert not [*tmp_path.iterdir()]


def test_a_row_of_ten_megabytes_with_null_characters_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"p": "' + "\\u0000a" * 1_500_000 + '"}\n')
    [row] = rows_of(SourceConfig(source="jsonl", path=str(file)))
    assert row is not None
    assert row["p"] == "\0a" * 1_500_000
