"""`megarl report`, `compare`, `samples` and `chat`: looking at runs and models; megarl/cli/commands.py adds the commands."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.cli.arguments import add_template_args, make_console, template_args
from megarl.config.yaml_tree import read_yaml
from megarl.errors import DataError, ModelError, counted, nearest
from megarl.system.atomic_files import write_text_atomically
from megarl.system.near_folders import nearest_folder

if TYPE_CHECKING:
    from megarl.observe.run_record import RunRecord

PROMPT = "prompt"
"""The role, of `megarl samples`, of what stands before all turns."""
FIELD_WIDTH, FIGURE_WIDTH = 24, 14
"""Columns of a run in the tables of `megarl compare`: of config fields at least, of figures at most."""


def add_report(commands: Any) -> None:
    """Add the commands to the subparsers `commands`."""
    report = commands.add_parser(
        "report",
        help="write an HTML report of runs: curves, timeline, samples, distributions, config",
        description="Write one HTML file that shows the runs and needs no network. Of runs that repeat each other under other "
        "seeds it draws the mean, and a band from the lowest to the highest.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders (<run.folder>/<run.name>)")
    report.add_argument("--out", metavar="FILE", help="HTML file to write (default: report.html in the first run's folder)")
    report.add_argument("--trace", metavar="FILE", help="also write the first run's timeline for Perfetto or chrome://tracing")
    report.add_argument("--png", metavar="FILE", help="also draw --metric as a PNG for a paper")
    report.add_argument("--metric", default="reward/mean", help="metric that --png draws (default: reward/mean)")
    report.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1 and keep it up to date until Ctrl-C")
    report.add_argument("--port", type=int, default=0, help="port for --watch (default: 0, a free one)")
    report.set_defaults(run=_report)

    compare = commands.add_parser(
        "compare",
        help="compare configs and results of runs",
        description="Show the config fields in which runs differ, and the means of their metrics over the last 10 steps (of an "
        "evaluation: its last value).",
    )
    compare.add_argument("runs", metavar="RUN", nargs="+", help="run folders, two or more")
    compare.add_argument("--out", metavar="FILE", help="also write the runs' report as an HTML file")
    compare.set_defaults(run=_compare)

    samples = commands.add_parser(
        "samples", help="read a run's samples in the terminal", description="Show samples of a run, the newest step's first."
    )
    samples.add_argument("runs", metavar="RUN", nargs=1, help="run folder")
    samples.add_argument("--step", type=int, help="only samples of this step")
    order = samples.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest reward first")
    order.add_argument("--worst", action="store_true", help="lowest reward first")
    samples.add_argument(
        "--grep",
        metavar="TEXT",
        default="",
        help="only samples with TEXT in the response or a turn behind the prompt, or where --role says; ignores case",
    )
    samples.add_argument(
        "--role",
        metavar="ROLE",
        help="only turns of ROLE: assistant (the policy), user, tool, …; or prompt, which is the prompt",
    )
    samples.add_argument("--turn", metavar="N", type=int, help="only turn N behind the prompt, counted from 1")
    samples.add_argument("--count", type=int, default=5, help="number of samples (default: 5)")
    samples.set_defaults(run=_samples)

    chat = commands.add_parser(
        "chat",
        help="talk to a model or a checkpoint",
        description="Talk to a Hugging Face model, a checkpoint, or a run's newest checkpoint. One line is one message; /new "
        "forgets what was said, /quit or the end of the input ends it; a line that begins with a space is sent as it is.",
    )
    chat.add_argument("model", metavar="FOLDER", help="Hugging Face folder, checkpoint, or run folder")
    chat.add_argument("--max-new-tokens", type=int, default=256, help="maximum number of tokens of an answer (default: 256)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: 0)")
    chat.add_argument("--chat-template", metavar="FILE", help="a .jinja file in place of the model's chat template")
    add_template_args(chat)
    chat.add_argument(
        "--stop", metavar="TEXT", action="append", help="text that ends an answer; repeatable (default: the run's rollout.stop)"
    )
    chat.set_defaults(run=_chat)


def _report(arguments: argparse.Namespace) -> int:
    from megarl.observe.report import build_page
    from megarl.observe.trace import chrome_trace

    if arguments.watch:
        return _watch(arguments)
    runs = _read(arguments.runs)
    if arguments.trace:
        if not runs[0].trace:
            raise DataError(f"--trace is given, but {runs[0].folder} has no trace.jsonl")
        _write(arguments.trace, json.dumps(chrome_trace(runs[0].trace)))
    if arguments.png:
        from megarl.observe.plots import plot

        plot(runs, arguments.metric, Path(arguments.png))
        _say(f"{arguments.png} written")
    out = Path(arguments.out or runs[0].folder / "report.html")
    _write(out, build_page(runs, out.parent))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from megarl.observe.live import serve

    for option in ("out", "trace", "png"):
        if getattr(arguments, option):
            raise DataError(f"--watch serves the page and writes no file: leave --{option} out, or run megarl report again")
    if not 0 <= arguments.port <= 65535:
        raise DataError(f"--port is {arguments.port}, but it must be 0 to 65535")
    for run in map(Path, arguments.runs):
        if run.is_dir() and not _has_metrics(run):
            _say(f"waiting for the first figures of {run}, whose folder is there (Ctrl-C ends it)")
            while not _has_metrics(run):
                time.sleep(0.5)
    serve(arguments.runs, arguments.port, _say)
    return 0


def _has_metrics(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _compare(arguments: argparse.Namespace) -> int:
    from megarl.observe.report import build_page
    from megarl.observe.run_record import differences, last_figure, metric_names

    runs = _read(arguments.runs)
    if len(runs) < 2:
        raise DataError("megarl compare needs two runs or more; megarl report shows a single one")
    console, names = make_console(), [run.name for run in runs]
    fields = {
        name: ["–" if value is None else _in_words(value) for value in values] for name, values in differences(runs).items()
    }
    figures = {metric: [last_figure(run, metric) for run in runs] for metric in sorted(metric_names(runs))}
    told = {metric: values for metric, values in figures.items() if any(value is not None for value in values)}
    zeros = {metric for metric in told if not any(value for run in runs for value in run.curve(metric).values())}
    metrics = {
        metric: ["–" if value is None else f"{value:.4g}" for value in values]
        for metric, values in told.items()
        if metric not in zeros
    }
    _print_tables(console, "config field", names, fields, are_figures=False)
    _print_tables(console, "mean of the last 10 steps; eval/*: last value", names, metrics, are_figures=True)
    if zeros:
        console.print(f"left out: {counted(len(zeros), 'metric')} with 0 at every step of every run", highlight=False)
    if arguments.out:
        _write(arguments.out, build_page(runs, Path(arguments.out).parent))
    return 0


def _in_words(value: Any) -> str:
    """A value of a config as JSON, or as Python writes it where JSON has no form for it, such as dates as keys."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return str(value)


def _print_tables(
    console: Console,
    title: str,
    names: list[str],
    rows: dict[str, list[str]],
    *,
    are_figures: bool,
) -> None:
    """Print a row of values for each name, below each other as many tables as the console's width takes for all runs.

    Figures are on the right, and those with another word before the first slash stand apart.
    """
    named = max(map(len, [*rows, title[:FIELD_WIDTH]]))
    longest = max([9, *map(len, names)])  # 9: of a figure
    width = min(longest, FIGURE_WIDTH) if are_figures else FIELD_WIDTH
    at_once = max(1, (console.width - named) // (width + 1))
    for start in range(0, len(names), at_once):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(title, width=named, overflow="fold")
        for name in names[start : start + at_once]:
            table.add_column(
                name, justify="right" if are_figures else "left", overflow="fold", width=width if are_figures else None
            )
        before = None
        for name, values in rows.items():
            section = name.partition("/")[0]
            if are_figures and before not in (None, section):
                table.add_row()
            table.add_row(name, *values[start : start + at_once])
            before = section
        console.print(table, markup=False)
        console.print()


def _samples(arguments: argparse.Namespace) -> int:
    from megarl.observe.run_record import reward_of
    from megarl.observe.sample_media import describe_media, shown_media

    (run,), console = _read(arguments.runs), make_console()
    steps = run.samples.steps
    places = [place for place, step in enumerate(steps) if arguments.step in (None, step)]
    if not places and steps:
        raise DataError(f"--step is {arguments.step}, but samples were written of steps {min(steps)} to {max(steps)}")
    text, sign = arguments.grep.lower(), -1 if arguments.best else 1
    ranks: dict[int, float] = {}
    for place, sample in zip(places, run.samples.at(places), strict=True):  # of which there may be more than memory holds
        if _parts(sample, arguments, text):
            reward = reward_of(sample) if arguments.best or arguments.worst else -steps[place]
            ranks[place] = math.inf if reward is None or math.isnan(reward) else sign * reward
    if not ranks:
        roles = _roles_of(run.samples.at(places), arguments.role)
        raise DataError(f"{run.folder / 'samples.jsonl'} holds no such sample{roles}")
    for sample in run.samples.at(sorted(ranks, key=ranks.__getitem__)[: arguments.count]):
        console.print(Text(_head(sample), style="bold"))
        for number, media in enumerate(shown_media(sample), start=1):
            console.print(Text(describe_media(number, media, run.media_folder)), soft_wrap=True)
        if arguments.turn is None and arguments.role in (None, PROMPT):
            console.print(Text(sample.get("prompt_text", ""), style="dim"))
        for words in _parts(sample, arguments) if arguments.role != PROMPT else ():
            console.print(Text(words))
        console.print()
    console.print(Text(f"{min(arguments.count, len(ranks))} of {counted(len(ranks), 'sample')}"))
    return 0


def _head(sample: Mapping[str, Any]) -> str:
    """The line above a sample: where it is from, and its reward; of a server's client who asked which model."""
    from megarl.observe.run_record import SERVED, reward_of

    reward, told = reward_of(sample), f"step {sample['step']}  {sample['sample_id']}  "
    if SERVED in sample:
        told += "tenant {tenant}  model {model}  ".format(**sample[SERVED])
    if reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in sample.get("rewards", {}).items())
        told += f"reward {reward:g} ({parts})  "
    return told + str(sample.get("finish_reason", ""))


def _parts(sample: Mapping[str, Any], arguments: argparse.Namespace, text: str = "") -> list[str]:
    """The turns that --role and --turn ask for, behind the prompt unless the role is `prompt`, and that have `text`."""
    from megarl.observe.sample_media import sample_parts

    if arguments.role == PROMPT:
        parts = [sample.get("prompt_text", "")] if arguments.turn is None else []
    else:
        turns = enumerate(sample_parts(sample), start=1)
        parts = [
            words for number, (role, words) in turns if arguments.turn in (None, number) and arguments.role in (None, role)
        ]
    return [words for words in parts if text in words.lower()]


def _roles_of(samples: Iterable[Mapping[str, Any]], role: str | None) -> str:
    """Words that say which roles there are, where `role` is none of them."""
    from megarl.observe.sample_media import sample_parts

    known = sorted({of for sample in samples for of, _ in sample_parts(sample)} | {PROMPT})
    return f"; its roles are {', '.join(known)}{nearest(role, known)}" if role is not None and role not in known else ""


def _chat(arguments: argparse.Namespace) -> int:
    from megarl.config.stop_checks import check_stops
    from megarl.models.transformers_names import config_in_transformers, loader_of
    from megarl.observe.chat import chat

    console = make_console()
    print(f"loading {arguments.model}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="megarl-chat-") as scratch:
        folder = _as_model(Path(arguments.model), Path(scratch) / "model")
        sampling = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
        of_run = _config_of_run(Path(arguments.model))
        system, rollout = (of_run.get("data") or {}).get("system_prompt"), of_run.get("rollout") or {}
        stop = arguments.stop if arguments.stop is not None else rollout.get("stop") or ()
        stops: dict[str, Any] = {"stop": stop, "stop_token_ids": rollout.get("stop_token_ids") or ()}
        check_stops("rollout", **stops)
        if system is not None:
            console.print(f"system prompt of the run: {system}", style="dim", markup=False)
        chat(
            folder,
            console,
            config=config_in_transformers(folder),
            load=loader_of(folder),
            system_prompt=system,
            chat_template=arguments.chat_template,
            template_args=template_args(arguments),
            **sampling,
            **stops,
        )
    return 0


def _config_of_run(folder: Path) -> dict[str, Any]:
    """The sections of the run that `folder` is or belongs to; empty: it is of none."""
    from megarl.runs.folders import run_of

    config = run_of(folder) / "config.yaml"
    return read_yaml(config) if config.is_file() else {}


def _as_model(folder: Path, scratch: Path) -> Path:
    """The Hugging Face folder that `folder` is or holds; for a checkpoint, or the newest of a run, one written to `scratch`."""
    from megarl.checkpoint.format.dist_format import is_dist_checkpoint
    from megarl.convert.plan import plan_hf
    from megarl.convert.run import run_plan
    from megarl.convert.sources import open_dist
    from megarl.runs.folders import weights_in

    weights = weights_in(folder, exported_first=True)
    if (weights / "config.json").is_file():
        return weights
    if is_dist_checkpoint(weights):
        run_plan(plan_hf("export", open_dist(weights), None), scratch)
        return scratch
    raise ModelError(
        f"{folder} is no Hugging Face folder, no checkpoint and no run that has one{nearest_folder(folder)}; "
        "megarl chat takes any of these"
    )


def _read(folders: list[str]) -> list[RunRecord]:
    from megarl.observe.run_record import read_run
    from megarl.runs.folders import run_of

    runs = [read_run(run_of(folder)) for folder in folders]
    for damage in (damage for run in runs for damage in run.damage):
        print(f"megarl: {damage}", file=sys.stderr)
    return runs


def _write(file: str | Path, text: str) -> None:
    try:
        write_text_atomically(file, text)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}") from error
    _say(f"{file} written")


def _say(line: str) -> None:
    make_console().print(line, highlight=False, markup=False, soft_wrap=True)
