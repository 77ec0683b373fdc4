"""The house's own limits, read from the source: import circles, names, sizes, headers, and who touches torch.cuda's internals.

What import-linter cannot see; the import contracts themselves, and with them the order of the rooms, are in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.catalogue import ESTIMATORS
from megarl.option_list import OPTIONS

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "megarl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
FUNCTION_LINES = 80
FILE_LINES = 500
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
TWO_CLASSES = {
    "Config": "stand_ins.py has one because triton, which it stands in for, has one",
    "RequestError": "agents and serve refuse requests of two protocols, and an option imports no other",
}
"""Names of classes that stand for two things, and why each may."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The file's tree, which most tests here look through."""
    return ast.parse(path.read_text())


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


def asks_for_a_kind(source: str) -> Iterator[int]:
    """Lines that compare with the name of an estimator, or ask which kind of run a config describes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [side for part in (node.left, *node.comparators) for side in getattr(part, "elts", [part])]
            constants = {side.value for side in sides if isinstance(side, ast.Constant)}
            if constants & {*ESTIMATORS, "objective"}:
                yield node.lineno
        is_check = isinstance(node, ast.Call) and dotted(node.func) == "isinstance"
        names = {dotted(part) for part in ast.walk(node)} if is_check else set()
        if names & {"Config", "SupervisedConfig"}:
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("algorithm.advantage == 'remax'", True),
        ("name in ('gae', 'other')", True),
        ("'objective' in tree", True),
        ("isinstance(config, SupervisedConfig)", True),
        ("isinstance(config, (int, Config))", True),
        ("needs.greedy and name == 'sync'", False),
        ("isinstance(config, Layout)", False),
    ],
)
def test_the_rule_on_kinds_knows_what_it_looks_for(source: str, asks: bool) -> None:
    assert bool(list(asks_for_a_kind(source))) is asks


def test_nobody_compares_names_of_estimators_or_asks_a_config_for_its_kind() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in asks_for_a_kind(path.read_text())]
    places = {place.partition(":")[0] for place in found}
    assert places == {"megarl/config/load.py"}  # `parse_any`, once
    assert len(found) == 1


def test_every_file_says_what_it_is_for() -> None:
    silent = [path for path in SOURCES if path.read_text().strip() and not ast.get_docstring(parsed(path))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


UNCLEAR_OPENINGS = 87
"""Docstrings that still begin with What, Whether, Which, Who or Its; the number may only fall."""


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    opening = re.compile(r"(What|Whether|Which|Who|Whose|Those|Of|As|That|Its?|How|Where)\b")
    package = [path for path in SOURCES if "megarl" in path.relative_to(ROOT).parts]
    nodes = [node for path in package for node in ast.walk(parsed(path)) if isinstance(node, kinds)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    assert len(texts) > 1000, "no docstrings were seen"
    assert sum(bool(opening.match(text)) for text in texts) <= UNCLEAR_OPENINGS


def test_files_and_functions_stay_readable() -> None:
    long = [f"{p.relative_to(ROOT)}" for p in SOURCES if len(p.read_text().splitlines()) > FILE_LINES]
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in NAMELESS] == []


def module_of(path: Path) -> str:
    """`megarl.config.schema` for its file, `megarl.config` for the `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "megarl").rglob("*.py"))}


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules of megarl that a file imports anywhere: inside functions and for type checking, too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys() - {module_of(path)}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle in the graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_of(module: str) -> str:
    """The folder that a module is in."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def option_of(module: str) -> str:
    """The option that a module or room belongs to; empty: none."""
    return module.split(".")[2] if module.startswith("megarl.options.") else ""


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same between folders; a folder and one inside it are no two rooms, and the package's own face is none."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        here = room_of(module)
        for there in map(room_of, others):
            if option_of(there) != option_of(here) and option_of(there):
                continue  # counted by `test_only_these_imports_of_options_are_left`
            nested = f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}.")
            if not nested and "megarl" not in (here, there):
                found[here].add(there)
    return found


def test_nothing_is_imported_in_a_circle() -> None:
    graph = {module: imported(path) for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph), "no imports were seen"
    assert circle(graph) == []
    assert circle(rooms(graph)) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


IMPORTS_OF_OPTIONS: dict[str, int] = {
    "pictures": 0,
    "lora": 0,
    "prediction": 0,
    "routing_replay": 0,
    "shared_prefixes": 0,
    "few_bits": 0,
    "linear_attention": 0,
    "sparse_attention": 0,
    "state_spaces": 0,
    "compressed_attention": 0,
    "gemma4": 0,
    "shortcut_experts": 0,
    "environments": 0,
    "tools": 0,
    "agents": 0,
    "sandboxes": 0,
    "lending": 0,
    "elastic": 0,
    "elastic_engines": 0,
    "disaggregation": 0,
    "host_cache": 0,
    "fp8_cache": 0,
    "transports": 0,
    "distillation": 0,
    "online_pairs": 0,
    "ptx": 0,
    "curriculum": 0,
    "reward_model": 0,
    "mirror": 0,
    "telemetry": 0,
    "serve": 0,
}
"""For each option how many imports of it there are from outside; they are to go. Lower a number when it falls."""


def test_only_these_imports_of_options_are_left() -> None:
    counts = dict.fromkeys(OPTIONS, 0)
    for module, path in MODULES.items():
        for option in (option_of(other) for other in imported(path)):
            if option and option != option_of(module):
                counts[option] += 1
    assert {name: count for name, count in counts.items() if count > IMPORTS_OF_OPTIONS[name]} == {}
    assert {*OPTIONS} <= IMPORTS_OF_OPTIONS.keys()


def places_called(*rooms: str) -> dict[str, set[str]]:
    """place → names of functions that are called there, of calls with literal names in these rooms."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if module.split(".")[1:2] == ["options"] or (rooms and not {*rooms} & {*module.split(".")[1:2]}):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "functions":
                place, name = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                places[str(place)].add(str(name))
    return places


def test_a_file_with_the_name_of_a_place_is_one() -> None:
    """Else it is imported wherever that place is called, with all that it imports."""
    places = places_called()
    assert places.keys() > {"checks", "order", "questions"}
    text = "\n".join(path.read_text() for path in MODULES.values())
    mistaken = []
    for place, names in places.items():
        asked = re.search(rf'parts?\([^()]*"{place}"', text) or re.search(rf'[a-z]+_part\("{place}"', text)
        for option in OPTIONS:
            path = MODULES.get(f"megarl.options.{option}.{place}")
            if path and not asked and not names & names_of(f"megarl.options.{option}.{place}"):
                mistaken.append(f"{option}/{place}.py")
    assert mistaken == []


def test_the_driver_calls_options_without_megatron() -> None:
    """A process that torchrun started is driver and rank; on a CPU, megatron is imported after `megarl.platform.install`."""
    places = sorted(places_called("config", "core", "data", "experience", "observe", "rollout", "runs", "trainers"))
    assert len(places) > 5
    calls = f"import sys; from megarl.option_list import parts; [parts(place) for place in {places}]"
    code = f"{calls}; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PLAIN_PATH = {"lines": 10_505, "lines_that_name_an_option": 141}
"""What a reader of a plain step reads, in the files that docs/architecture.md names; both may only fall."""


NAMING = {"share": 0.0275, "others": 0.02}
"""Lines of core rooms that name an option, of all, and without pictures and adapters, whose values the core passes on."""
LOOP_CLOSURE_LINES = 20_000
"""What the loop imports, with all that this imports, whether in a function or for type checking."""
CORE = {"lines": 2_000, "lines_that_name_an_option": 0}
"""The room `core` is read in one sitting; that it imports no backend is a layer in pyproject.toml."""


@functools.cache
def house() -> dict[str, Any]:
    """The figures of tools/house/measure.py."""
    figures: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "house" / "measure.py"))["measure"]()
    return figures


def test_the_core_is_small_and_imports_no_option() -> None:
    figures = house()["core"]
    assert figures["lines"] > 1000, "the core was not found"
    assert {name: count for name, count in CORE.items() if figures[name] > count} == {}
    of_core = {module: imported(path) for module, path in MODULES.items() if module.startswith("megarl.core.")}
    assert {other for others in of_core.values() for other in others if other.startswith("megarl.options")} == set()


def test_the_plain_path_does_not_grow() -> None:
    figures = house()["plain_path"]
    assert figures["files"] > 30, "docs/architecture.md names the files of a step"
    assert {name: count for name, count in PLAIN_PATH.items() if figures[name] > count} == {}


def test_the_core_hardly_names_an_option() -> None:
    figures = house()["core_lines_that_name_an_option"]
    assert figures["lines"] > 100, "the core rooms were not found"
    assert {name: share for name, share in NAMING.items() if figures[name] > share} == {}


def test_the_loop_imports_no_more_than_a_run_needs() -> None:
    figures = house()["closures"]["megarl.core.loop"]
    assert figures["modules"] > 50, "the loop was not found"
    assert figures["lines"] <= LOOP_CLOSURE_LINES


def test_a_name_of_a_class_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)):
                targets = (target.id for target in node.targets if isinstance(target, ast.Name))
                for name in targets:  # an alias of a type
                    if name.lstrip("_")[:1].isupper() and not name.isupper():
                        homes[name].append(module)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in shared.items() if name not in TWO_CLASSES} == {}
    if (*IMPORTS_OF_OPTIONS,) == OPTIONS:  # all are there
        assert TWO_CLASSES.keys() - shared.keys() == set(), "exceptions that nothing needs any more"


@functools.cache
def names_of(module: str) -> set[str]:
    """What a module binds outside functions and classes: definitions, imports and assignments."""
    names: set[str] = set()
    nodes: list[ast.AST] = [parsed(MODULES[module])]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize("room", ["benchmarks", "tools", "examples", "tests"])
def test_what_is_imported_of_megarl_is_there(room: str) -> None:
    """Not every line of benchmarks and examples is run by tests, and nobody sees that a name has moved away from under it."""
    missing = []
    for file in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] == "megarl":
                if option_of(f"{module}.") in IMPORTS_OF_OPTIONS.keys() - {*OPTIONS}:
                    continue  # of an option that this installation does not have
                there = names_of(module) if module in MODULES else set()
                wanted = [name.name for name in node.names if f"{module}.{name.name}" not in MODULES]
                missing += [f"{file.relative_to(ROOT)}: {module}.{name}" for name in wanted if name not in there]
    assert not missing
