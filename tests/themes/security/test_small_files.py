"""Small JSON files of folders that a run, a server or a conversion goes on with are read by one reader, which checks them.

`object_line` (megarl/observe/record_lines.py) gives an object or a ValueError, however deep or wrong the content is.
`json.loads` of a file raises a RecursionError where it is nested deeply, and may give a list or a number.
"""

from __future__ import annotations

import ast
from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent
ROOMS = (
    "core", "runs", "observe", "supervise", "launch", "convert", "trainers", "workers", "planning", "options/serve",
    "options/elastic", "options/elastic_engines", "options/mirror",
)  # fmt: skip
ALLOWED = {
    "runs/run_checkpoint.py": "a state may hold half a character of a row, which the reader refuses; errors are caught",
    "options/serve/registry.py": "metadata of a client may hold half a character; what cannot be read is named and left out",
    "planning/measured.py": "a table that a user names, of a row or a list of rows; errors are caught",
    "launch/cluster_doctor.py": "what the command's own processes wrote a moment before, into a folder of its own",
    "workers/profiling.py": "a profile of the process itself, written a moment before under a name of its own",
}


def readers_of_files(path: Path) -> list[int]:
    """Lines of a module in which `json.load` is called, or `json.loads` of a file's whole content."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads"):
            inner = {getattr(call.func, "attr", "") for call in ast.walk(node.args[0]) if isinstance(call, ast.Call)}
            if node.func.attr == "load" or inner & {"read_text", "read_bytes", "read"}:  # type: ignore[attr-defined]
                found.append(node.lineno)
    return found


def test_small_files_of_a_run_a_server_or_a_conversion_have_one_reader() -> None:
    modules = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    assert len(modules) > 200
    found = {path.relative_to(PACKAGE).as_posix() for path in modules if readers_of_files(path)}
    assert found == {*ALLOWED}


def test_what_reads_a_file_by_itself_is_found(tmp_path: Path) -> None:
    module = tmp_path / "a.py"
    module.write_text("import json\nx = json.loads(Path(a).read_text())\ny = json.loads(line)\nz = json.load(file)\n")
    assert readers_of_files(module) == [2, 4]
