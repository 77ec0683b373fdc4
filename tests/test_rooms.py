"""The house's own limits, read from the source: only `platform` touches torch.cuda's internals, sizes, names and headers.

What import-linter cannot see; the import contracts themselves are in pyproject.toml.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "megarl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
FUNCTION_LINES = 80
FILE_LINES = 500
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}


def dotted(node: ast.AST) -> str:
    """`torch.cuda.synchronize` for the expression of that spelling, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def torch_cuda_internals(source: str) -> Iterator[int]:
    """Lines that replace something in torch.cuda, or use one of its underscore names."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr") and node.args:
            targets = [ast.Attribute(value=node.args[0], attr="x")]
        for target in targets:
            if dotted(target).startswith("torch.cuda."):
                yield node.lineno
        if isinstance(node, ast.Attribute) and dotted(node).startswith("torch.cuda._"):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda._"):
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "is_internal"),
    [
        ("torch.cuda.current_device = f", True),
        ("setattr(torch.cuda, 'stream', f)", True),
        ("torch.cuda._lazy_init()", True),
        ("from torch.cuda._utils import x", True),
        ("torch.cuda.synchronize()", False),
        ("x = torch.cuda.device_count()", False),
    ],
)
def test_the_rule_on_torch_cuda_knows_what_it_looks_for(source: str, is_internal: bool) -> None:
    assert bool(list(torch_cuda_internals(source))) is is_internal


def test_only_platform_touches_the_internals_of_torch_cuda() -> None:
    outside = [path for path in SOURCES if "platform" not in path.relative_to(ROOT).parts]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in outside for line in torch_cuda_internals(path.read_text())]
    assert found == []


def test_every_file_says_what_it_is_for() -> None:
    silent = [path for path in SOURCES if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_files_and_functions_stay_readable() -> None:
    long = [f"{p.relative_to(ROOT)}" for p in SOURCES if len(p.read_text().splitlines()) > FILE_LINES]
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in NAMELESS] == []
