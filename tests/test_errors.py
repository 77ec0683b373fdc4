"""Errors are facts with one renderer, and no code reads the English that the renderer writes."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import errors
from megarl.errors import ConfigError, LayoutError, MegarlError, Missing, WrongValue, counted, describe_value, either, nearest

ROOT = Path(__file__).parent.parent
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MegarlError)}
PASSES_ON = {"redacted", "without_folder", "append", "print", "error"}
"""Functions that take a sentence to show it."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError.of("a.b", 0, allowed="at least 1"), "a.b is 0; it must be at least 1"),
        (
            ConfigError.of("a.b", "x", "does not divide 6", allowed="1 or 2", rule="does not divide"),
            "a.b is 'x', which does not divide 6; it must be 1 or 2",
        ),
        (ConfigError.of("a", None, "stands for nothing"), "a is null, which stands for nothing"),
        (
            ConfigError.of("a", "asynch", choices=("sync", "async", "one")),
            "a is 'asynch'; it must be 'sync', 'async' or 'one' (did you mean 'async'?)",
        ),
        (ConfigError.needs("a", "a source of b", "set b, or remove a"), "a needs a source of b: set b, or remove a"),
    ],
)
def test_a_sentence_is_made_of_its_facts(error: MegarlError, sentence: str) -> None:
    assert str(error) == sentence


@pytest.mark.parametrize(
    ("name", "choices", "meant"),
    [
        ("rollout.temp", ["rollout.tp", "rollout.top_p", "rollout.temperature"], "rollout.temperature"),
        ("rollout.top", ["rollout.tp", "rollout.top_p", "rollout.threads"], "rollout.top_p"),
        ("runs/ow", ["runs/ew", "runs/own-grpo"], "runs/own-grpo"),
        ("rollout.t", ["rollout.tp", "rollout.top_p", "rollout.temperature"], "rollout.tp"),  # too short to be a beginning
        ("trian", ["train", "tribune"], "train"),
        ("zzz", ["train"], None),
    ],
)
def test_a_name_that_is_cut_short_leads_to_the_whole_one_before_one_that_is_spelt_alike(
    name: str, choices: list[str], meant: str | None
) -> None:
    assert nearest(name, choices) == ("" if meant is None else f" (did you mean '{meant}'?)")


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(n, "node") for n in (0, 1, 1200)] == ["0 nodes", "1 node", "1,200 nodes"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]


def test_an_error_goes_under_a_section_with_its_facts() -> None:
    wrong = LayoutError.of("tp", 3, "does not divide 8", allowed="2", rule="does not divide").under(
        "policy.layout", ConfigError
    )
    assert type(wrong) is ConfigError
    assert str(wrong) == "policy.layout.tp is 3, which does not divide 8; it must be 2"
    assert wrong.facts == WrongValue("policy.layout.tp", 3, "does not divide 8", "2", (), "does not divide")
    missing = LayoutError.needs("vpp", "a pp", "set pp").under("critic.layout", ConfigError)
    assert missing.facts == Missing("critic.layout.vpp", "a pp", "set pp")
    assert str(LayoutError("rank 9 is outside").under("x", ConfigError)) == "x: rank 9 is outside"


def test_errors_of_one_kind_have_one_name_whatever_their_values() -> None:
    kinds = {
        ConfigError.of("dp", n, f"does not divide {n + 1} rows", allowed="1", rule="does not divide the rows").kind
        for n in (2, 3)
    }
    assert kinds == {"dp does not divide the rows"}
    assert ConfigError.of("a", 0, allowed="at least 1").kind == "a must be at least 1"
    assert ConfigError.needs("a", "b", "set b").kind == "a needs b"
    assert ConfigError("by hand: 3").kind == "ConfigError"


def test_an_error_keeps_its_facts_between_processes() -> None:
    error = LayoutError.of("tp", 3, "does not divide 8", allowed="2")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.facts) == (LayoutError, str(error), error.facts)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("a b", "'a b'"),
        ("a\nb", r"'a\nb'"),
        ([1, "x", None], "[1, 'x', null]"),
        ((0, 1), "[0, 1]"),
        ({"a": 1, "b": 2}, "a section (a, b)"),
        ({}, "an empty section"),
        ("x" * 1000, "'" + "x" * 299 + "…"),
    ],
)
def test_a_value_is_shown_as_it_stands_in_yaml(value: object, shown: str) -> None:
    assert describe_value(value) == shown


def test_lists_of_values_read_as_english() -> None:
    assert [either([]), either([1]), either([1, 2]), either([1, 2, 4])] == ["", "1", "1 or 2", "1, 2 or 4"]


def reads_a_sentence(source: str) -> Iterator[int]:
    """Lines that take apart, compare or rewrite `str(error)` of an error that a handler of a MegarlError caught."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None or handler.type is None:
            continue
        caught = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(handler.type)}
        if not caught & KINDS:
            continue
        parents = {child: parent for parent in ast.walk(handler) for child in ast.iter_child_nodes(parent)}
        for node in ast.walk(handler):
            is_sentence = isinstance(node, ast.Call) and ast.unparse(node) in (f"str({handler.name})", f"repr({handler.name})")
            if isinstance(node, ast.Attribute) and ast.unparse(node) == f"{handler.name}.args":
                yield node.lineno
            if not is_sentence:
                continue
            parent = parents[node]
            if isinstance(parent, (ast.Attribute, ast.Compare, ast.Subscript)):
                yield node.lineno
            if isinstance(parent, ast.Call):
                called = ast.unparse(parent.func).rpartition(".")[2]
                if called not in PASSES_ON and called not in KINDS:
                    yield node.lineno


@pytest.mark.parametrize(
    ("use", "reads"),
    [
        ("raise ConfigError(str(error).replace('a', 'b'))", True),
        ("refused[kind_of(str(error))] += 1", True),
        ("found = 'tp' in str(error)", True),
        ("first = error.args[0]", True),
        ("print(str(error))", False),
        ("self.damaged.append(str(error))", False),
        ("raise ConfigError(f'{field}: {error}')", False),
        ("refused[error.kind] += 1", False),
    ],
)
def test_the_rule_on_sentences_knows_what_it_looks_for(use: str, reads: bool) -> None:
    source = f"try:\n    go()\nexcept (ValueError, ConfigError) as error:\n    {use}\n"
    assert bool(list(reads_a_sentence(source))) is reads


def test_no_code_reads_its_own_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "megarl").rglob("*.py"))
        for line in reads_a_sentence(path.read_text())
    ]
    assert found == []
