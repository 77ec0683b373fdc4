"""Measures the house: lines, the core path, import closures, imports of options, docstrings and containers, as JSON or a table.

`python tools/house/measure.py [--json]` reads the sources of the checkout that it is in; nothing of megarl is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megarl"
CLOSURES = (
    "megarl.core.loop",
    "megarl.megatron.rank_model",
    "megarl.rollout.scheduling.scheduler",
    "megarl.weights.pusher",
)
"""Modules whose import closures are told: the loop, a role on a rank, the scheduler, the sender of weights."""
RIDDLES = ("what", "those", "as", "of", "which", "whether", "that", "it", "its", "where", "who", "whose")
"""Pronouns and the like that a docstring should not begin with."""
OPTION_WORDS = re.compile(
    r"\b(\w*lora\w*|\w*adapter\w*|\w*picture\w*|\w*vision\w*|\w*media\w*|\w*routes?\b|\w*replay\w*|\w*draft\w*|\w*mtp\w*|"
    r"\w*speculative\w*|\w*prediction\w*|\w*teacher\w*|\w*distill\w*|\w*ptx\w*|\w*curriculum\w*|\w*mirror\w*|\w*sandbox\w*|"
    r"\w*lent\b|\w*lending\w*|\w*rdma\w*|\w*relay\w*|\w*int4\w*|\w*mxfp\w*|\w*agents?\b|\w*reward_model\w*|\w*otel\w*)\b",
    re.IGNORECASE,
)
"""Words of code by which a line names an option."""
VALUES = re.compile(r"\b(\w*lora\w*|\w*adapter\w*|\w*picture\w*|\w*vision\w*|\w*media\w*)\b", re.IGNORECASE)
"""Those of the two options whose values the core passes on (docs/architecture.md, "Two that are not parted wholly")."""
CORE_ROOMS = (
    "core", "experience", "runs", "trainers", "workers", "rollout/scheduling", "rollout/engines", "megatron", "data", "config",
    "weights",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """The modules of the package by dotted name."""
    named: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imports_of(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of the package that a file imports anywhere, for type checking too."""
    names = set(known)
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in names else node.module for name in full}
    return imported & names


def closure(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All modules that importing `start` reaches."""
    reached, waiting = {start}, [start]
    while waiting:
        for module in graph[waiting.pop()] - reached:
            reached.add(module)
            waiting.append(module)
    return reached


def lines_of(paths: Iterable[Path]) -> int:
    """Lines of files, as `wc -l` counts them."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def code_lines(path: Path) -> list[str]:
    """The lines of a file without docstrings, comments and blank lines."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return [line for number, line in numbered if number not in left_out and line.split("#")[0].strip()]


def docstrings(paths: Iterable[Path]) -> list[str]:
    """Every docstring of modules, classes and functions, and every string that stands under a value."""
    texts: list[str] = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            for child in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
                is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if is_text and isinstance(child.value.value, str):
                    texts.append(child.value.value.strip())
    return texts


def riddles(texts: Iterable[str]) -> Counter[str]:
    """How many docstrings begin with each of `RIDDLES`."""
    first = (re.match(r"\w+", text) for text in texts)
    words = (match[0].lower() for match in first if match)
    return Counter(word for word in words if word in RIDDLES)


def plain_path() -> list[Path]:
    """The files of a plain step, from the loop to megatron-core and the engine, as docs/architecture.md names them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## One step, file by file")[2].partition("\n## ")[0]
    names = dict.fromkeys(re.findall(r"`([a-z_/]+/[a-z_0-9]+\.py)`", section))
    return [PACKAGE / name for name in names if not name.startswith("tools/")]


def path_figures(paths: Iterable[Path]) -> dict[str, int]:
    """The number of files, their lines, and how many lines of code name an option."""
    files = list(paths)
    naming = sum(bool(OPTION_WORDS.search(line)) for file in files for line in code_lines(file))
    return {"files": len(files), "lines": lines_of(files), "lines_that_name_an_option": naming}


def measure() -> dict[str, object]:
    """All figures by name."""
    named = modules()
    graph = {name: imports_of(path, named) - {name} for name, path in named.items()}
    options = {name for name in named if name.startswith("megarl.options.")}
    core = [path for name, path in named.items() if any(f"megarl/{room}/" in path.as_posix() for room in CORE_ROOMS)]
    code = [line for path in core for line in code_lines(path)]
    texts = docstrings(named.values())
    opening = riddles(texts)
    outside = Counter(
        other.split(".")[2] for name, others in graph.items() for other in others & options
        if name.split(".")[:3] != other.split(".")[:3]
    )  # fmt: skip
    generate = re.compile(r"def generate\((?:[^()]|\([^()]*\))*\bkeys\b", re.DOTALL)
    return {
        "product": {"lines": lines_of(named.values()), "files": len(named)},
        "options": {"lines": lines_of(named[name] for name in options), "files": len(options)},
        "tests": {"lines": lines_of((ROOT / "tests").rglob("*.py"))},
        "core": path_figures((PACKAGE / "core").glob("*.py")),
        "benchmarks": {"lines": lines_of((ROOT / "benchmarks").rglob("*.py"))},
        "plain_path": path_figures(plain_path()),
        "closures": {
            start: {"modules": len(reached), "lines": lines_of(named[name] for name in reached)}
            for start, reached in ((start, closure(start, graph)) for start in CLOSURES)
        },
        "core_lines_that_name_an_option": {
            "lines": (count := sum(bool(OPTION_WORDS.search(line)) for line in code)),
            "of": len(code),
            "share": round(count / len(code), 4),
            "others": round(sum(bool(OPTION_WORDS.search(VALUES.sub("", line))) for line in code) / len(code), 4),
        },
        "imports_of_options": dict(sorted(outside.items())),
        "docstrings": {
            "all": len(texts),
            "riddles": (unclear := sum(opening.values())),
            "share": round(unclear / len(texts), 4),
        },
        "signatures_of_generate": sum(len(generate.findall(path.read_text())) for path in named.values()),
    }


def main(arguments: list[str]) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    figures = measure()
    if parser.parse_args(arguments).json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:32} {json.dumps(value)}")


if __name__ == "__main__":
    main(sys.argv[1:])
