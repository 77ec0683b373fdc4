"""Writes what in docs/ follows from the program (config fields, commands, errors, families.py) and from benchmarks/results/
(figures.py).

`python tools/docs/generate.py` (or `make docs`) rewrites it; `--check` only says which pages are out of date, with exit code 1.
Both name the figures that are older than the code that they measure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/docs")]

import families  # noqa: E402
import figures  # noqa: E402
import gpu_table  # noqa: E402
import results  # noqa: E402

from megarl import errors  # noqa: E402
from megarl.cli import commands  # noqa: E402
from megarl.config import Config, SupervisedConfig, config_fields  # noqa: E402
from megarl.config.at_resume import KINDS, FieldAnswer, at_resume  # noqa: E402
from megarl.supervise import restarts  # noqa: E402

BY_PRESET = "by algorithm.name"
NOTE = "<!-- Written by `python tools/docs/generate.py`: change the program, not this page. -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="folder of the pages (default: docs)")
    arguments = parser.parse_args()
    pages = {**generated(), **with_figures(arguments.folder), **with_answers(arguments.folder)}
    pages |= families.with_families(arguments.folder) | {"gpu_paths.md": gpu_table.page()}
    same = gpu_table.says_the_same if arguments.check else _is
    stale = {name: text for name, text in pages.items() if not same(arguments.folder / name, text)}
    for name, text in stale.items():
        if not arguments.check:
            (arguments.folder / name).write_text(text)
        print(f"{name} {'is out of date' if arguments.check else 'written'}")
    for line in results.older_than_their_code():
        print(line, file=sys.stderr)
    return 1 if arguments.check and stale else 0


def generated() -> dict[str, str]:
    """By name of the page, what it must hold."""
    return {"config.md": config_page(), "cli.md": cli_page(), "errors.md": errors_page()}


def with_figures(folder: Path) -> dict[str, str]:
    """By name of the page below `folder`, its text with the tables of today's figures."""
    present = [page for page in figures.TABLES if (folder / page).is_file()]
    return {page: figures.with_tables(page, (folder / page).read_text()) for page in present}


def with_answers(folder: Path) -> dict[str, str]:
    """The page on checkpoints below `folder`, if it is there, with the table of today's answers to changes at resume."""
    page, begin, end = folder / "checkpoints.md", "<!-- at resume: begin -->\n", "<!-- at resume: end -->"
    if not page.is_file():
        return {}
    before, _, rest = page.read_text().partition(begin)
    if end not in rest:
        raise SystemExit(f"{page} lacks the marks of the table of answers: {begin.strip()} and {end}")
    return {page.name: f"{before}{begin}" + "\n".join(_answers()) + f"\n{end}{rest.partition(end)[2]}"}


def _answers() -> Iterator[str]:
    """A line for the fields of a section that have the same answer, in the order of the reference."""
    table, lines = at_resume(), dict[tuple[str, FieldAnswer], list[str]]()
    for name in dict.fromkeys(field.name for root in (Config, SupervisedConfig) for field in config_fields(root)):
        section, _, last = name.rpartition(".")
        lines.setdefault((section, table[name]), []).append(f"`{last}`")
    yield from ("| section | fields | other value at resume | remark |", "|---|---|---|---|")
    for (section, answer), names in lines.items():
        words, remark = KINDS[answer.kind], answer.note
        if answer.kind == "like":
            words, remark = f"as `{answer.note}`", ""
        if answer.kind == "steered":
            remark = f"the target is `{answer.note}`"
        yield f"| {f'`{section}`' if section else ''} | {', '.join(names)} | {words} | {remark} |"


def config_page() -> str:
    """Every field of both kinds of config, a table for each section."""
    lines = [
        "# Config fields",
        "",
        NOTE,
        "For everybody who writes a config file: every field with its default, the values that it accepts and its meaning.",
        "`megarl config` prints the same in a terminal, and `megarl config run.yaml` what your file resolves to.",
        "",
        "A field is set in YAML or on the command line: `megarl train run.yaml policy.layout.tp=2`. The default `required`",
        f"means that you must set the field; `{BY_PRESET}` means that the preset sets it"
        " ([the presets](algorithms.md#start-from-a-preset)).",
        "",
        "## Reinforcement learning",
        "",
        "`megarl train`, `megarl eval`, `megarl generate` and `megarl serve-reward`.",
        "",
        *_fields(Config, ""),
        "## Training on given responses",
        "",
        "`megarl sft`, `megarl reward-model` and `megarl preference`. Sections named as above have the same fields,"
        " and are listed again.",
        "",
        *_fields(SupervisedConfig, "Given responses: "),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _fields(root: type, before: str) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for field in config_fields(root):
        name, allowed, default, meaning = dataclasses.astuple(field)
        row = f"| `{name}` | {_cell(default)} | {_text(allowed)} | {_linked(_text(meaning))} |"
        sections.setdefault(name.rpartition(".")[0], []).append(row)
    for section, rows in sections.items():
        yield from (f"### {before}`{section}`", "", "| field | default | allowed | meaning |", "|---|---|---|---|", *rows, "")


def cli_page() -> str:
    """Every command with its arguments and options, from the parser."""
    lines = [
        "# Commands",
        "",
        NOTE,
        "For everybody who types `megarl`: every command with its arguments and options.",
        "`megarl COMMAND --help` prints the same.",
        "",
        "Config fields are set behind the config file: `megarl train run.yaml run.steps=50 policy.layout='{tp: 2}'`.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | `megarl doctor` or `megarl node` found something to mend |",
        f"| {commands.USER_ERROR} | an error that you can mend; one sentence on stderr says what and how"
        " ([Errors](errors.md)) |",
        f"| {commands.STOPPED} | a signal asked the run to stop; it saved, and `run.resume=auto` continues it |",
        f"| {commands.INTERRUPTED} | Ctrl-C; a training run saves first, unless hit twice; `run.resume=auto` continues it |",
        "",
    ]
    for words, parser in _commands(commands.build_parser(), "megarl"):
        lines += [f"## `{words}`", "", *_described(parser), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _commands(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield words, parser
    for group in groups:
        helps = {action.dest: action.help or "" for action in group._choices_actions}
        for name, inner in group.choices.items():
            inner.description = inner.description or f"{helps[name][:1].upper()}{helps[name][1:]}."
            yield from _commands(inner, f"{words} {name}")


def _described(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    yield _text(parser.description or "")
    yield from ("", "```text")
    places = [_shown(action) for action in actions if not action.option_strings]
    yield " ".join([parser.prog, *places, *(["[options]"] if len(places) < len(actions) else [])])
    yield from ("```", "", "| argument | meaning |", "|---|---|")
    for action in actions:
        names = ", ".join(f"`{option}`" for option in action.option_strings)
        value = f" `{_shown(action)}`" if action.nargs != 0 else ""
        needed = " (required)" if action.required and names else ""
        said = (action.help or "") % {"default": action.default} if "%" in (action.help or "") else action.help or ""
        yield f"| {names}{value}{needed} | {_linked(_text(said))} |".replace("|  `", "| `")


def _shown(action: argparse.Action) -> str:
    if action.metavar is not None:
        name = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    else:
        name = ",".join(map(str, action.choices)) if action.choices else action.dest.upper()
    if action.nargs in ("*", "+"):
        return f"[{name} …]"
    return f"[{name}]" if action.nargs == "?" else name


def errors_page() -> str:
    """Every class of error with its meaning, its exit code and whether the run is restarted for it."""
    lines = [
        "# Errors",
        "",
        NOTE,
        "For people whose run ended with one sentence, and for programs that read exit codes: every kind of error, its meaning",
        "and what megarl does. `megarl: <sentence>` on stderr names the field or file, what it was and what is allowed.",
        "",
        "A traceback instead of a sentence is a mistake in megarl. What to do about failures of machines and processes is in",
        "[Operations](operations.md#failures).",
        "",
        "| class in `megarl.errors` | meaning | exit code | restarted |",
        "|---|---|---|---|",
    ]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.MegarlError):
            meaning = " ".join((inspect.getdoc(kind) or "").split())
            lines.append(f"| `{name}` | {_text(meaning)} | {_exit_code(kind)} | {_restarted(kind)} |")
    lines += [
        "",
        "*Restarted*: `megarl train` and its kind start the run again from the newest checkpoint, at most"
        " `run.max_restarts` times.",
        "",
    ]
    return "\n".join(lines)


def _exit_code(kind: type[errors.MegarlError]) -> int:
    """What the command line returns where `kind` is raised."""

    def fail() -> int:
        raise kind("")

    with contextlib.redirect_stderr(io.StringIO()):
        return commands.reported(fail)


def _restarted(kind: type[errors.MegarlError]) -> str:
    names = {base.__name__ for base in kind.__mro__}
    if names & {*restarts.ENVIRONMENT}:
        return "yes"
    return "once the run has done a step" if names & {*restarts.ONCE_IT_RAN} else "no"


def _text(words: str) -> str:
    """One table cell: one line, in which a bar is no border and an angle bracket no tag."""
    one_line = " ".join(words.split()).replace("|", "\\|")
    return "".join(
        part if place % 2 else part.replace("<", "&lt;").replace("*", "\\*")
        for place, part in enumerate(re.split(r"(`[^`]*`)", one_line))
    )


def _cell(default: str) -> str:
    return default if default in ("required", BY_PRESET) else f"`{default}`".replace("|", "\\|")


def _linked(text: str) -> str:
    """A mention of a page below docs/ as a link of the site."""
    return re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", lambda found: f"[{_title(found[1])}]({found[1]}.md{found[2] or ''})", text)


def _title(page: str) -> str:
    return re.match(r"# (.+)", (ROOT / "docs" / f"{page}.md").read_text())[1].partition(":")[0]  # type: ignore[index]


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
