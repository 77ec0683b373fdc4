"""The command line, and the only place that parses argv.

What the user did wrong ends as one sentence on stderr and exit code 2; Ctrl-C as 130. Heavy imports wait until needed.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from rich.table import Table

from megarl.cli.arguments import add_config, add_template_args, make_console, template_args, with_models
from megarl.cli.convert import add_convert
from megarl.cli.doctor import add_doctor
from megarl.cli.plan import add_plan
from megarl.cli.rehearse import add_rehearse
from megarl.cli.report import add_report
from megarl.cli.serve import add_serve
from megarl.cli.submit import add_submit
from megarl.cli.submit_pods import add_pods
from megarl.cli.tries import add_tries
from megarl.config import AnyConfig, SupervisedConfig, config_fields, load_any, load_config, to_yaml
from megarl.config.checks import check_evaluates
from megarl.config.evaluated import load_to_evaluate
from megarl.config.yaml_tree import load_text
from megarl.errors import ConfigError, MegarlError, RunInterrupted, RunStopped, counted, nearest, written_out
from megarl.models.from_hub import model_here, models_here
from megarl.system.garbage import collect_rarely
from megarl.system.ray_token import want_a_token
from megarl.system.redaction import redacted
from megarl.system.safe_console import SafeConsole
from megarl.system.terminal import print_safely
from megarl.system.torchrun import is_leader, is_torchrun
from megarl.system.utf8 import speak_utf8
from megarl.version import __version__

if TYPE_CHECKING:
    from megarl.config.reference import ConfigField

NARROW = 140
"""Columns below which config fields are listed in paragraphs, as a table would cut their names."""
USER_ERROR = 2
STOPPED = 75
"""EX_TEMPFAIL: to be tried again."""
INTERRUPTED = 130
COMMANDS = (
    "train", "sft", "reward-model", "preference", "eval", "generate", "serve", "serve-reward", "rewards", "episodes", "data",
    "convert", "plan", "rehearse",
    "config", "submit", "node", "report", "compare", "samples", "chat", "doctor",
)  # fmt: skip
OBJECTIVES = {
    "sft": ("sft", "dft"),
    "reward-model": ("reward_model", "process_reward_model"),
    "preference": (
        "dpo", "cdpo", "robust_dpo", "ipo", "apo_zero", "apo_down", "bco_pair", "simpo", "orpo", "mixture", "kto", "bco",
    ),
}  # fmt: skip
"""The commands that are `train` for some objectives alone, and what `objective.name` must be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Given `argv`, training is done in this process, and not begun again if it fails.

    0 done, 1 doctor found a problem, 2 the user's mistake, 75 stopped by a batch system's signal and saved, 130 Ctrl-C.
    """

    def run() -> int:
        arguments = _parse(argv)
        arguments.is_watched = argv is None
        # Also where the shell starts programs with SIGINT ignored, as in the background; a batch system sends SIGTERM.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        return int(arguments.run(arguments))

    if argv is None:
        speak_utf8()
    before = sys.stdout, sys.stderr
    print_safely()
    # reasoning_gym imports it, and where it cannot be kept compiled it would warn at every start
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
    try:
        return reported(run)
    finally:
        if argv is not None:  # else also what is printed as the process ends
            sys.stdout, sys.stderr = before


def reported(run: Callable[[], int]) -> int:
    """Call `run` and give what it returns, or the exit code of what it raised, which is said on stderr."""
    try:
        return run()
    except MegarlError as error:
        print(f"megarl: {redacted(str(error))}", file=sys.stderr)
        if isinstance(error, RunInterrupted):
            return INTERRUPTED
        return STOPPED if isinstance(error, RunStopped) else USER_ERROR
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return _tell_defect()
        name = written_out(redacted(str(error.filename)[:80]))
        print(f"megarl: '{name}…' is longer than the names that the file system takes; shorten it", file=sys.stderr)
        return USER_ERROR
    except Exception:  # noqa: BLE001 - a defect, or what a user's own code raised: Python would print it as it is
        return _tell_defect()


def _tell_defect() -> int:
    print(redacted(traceback.format_exc()), end="", file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are our sentences, with the nearest command."""

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument COMMAND: invalid choice: '(.+?)'", message)
        if choice:
            hint = nearest(choice[1], COMMANDS)
            raise ConfigError(f"command is '{choice[1]}'; it must be {', '.join(COMMANDS)}{hint}")
        # argparse counts the optional overrides among what is missing when CONFIG is
        raise ConfigError(f"{message.replace(', KEY=VALUE', '')}; see '{self.prog} --help'")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse argv; overrides may also follow options (`eval CONFIG --checkpoint X run.seed=1`)."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    for word in rest if hasattr(arguments, "overrides") else ():
        if re.match(r"--?[A-Za-z_]\w*\.[\w.]+(=|$)", word):
            field = word.lstrip("-")
            value = "" if "=" in field else "=VALUE"
            raise ConfigError(f"'{word}' begins with dashes, but fields are overridden without them: {field}{value}")
    options = [word for word in rest if word.startswith("-") or "=" not in word]
    if options or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(options or rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of `megarl` with all its commands; docs/cli.md is made of it."""
    parser = _Parser(
        prog="megarl",
        description="Reinforcement learning of large language models on megatron-core, SGLang and Ray.",
        epilog="Config fields are overridden by key=value, such as policy.optimizer.lr=1e-6; `megarl config` lists them.",
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    _training_commands(commands)
    _model_commands(commands)
    _serving_and_data_commands(commands)
    for add_command in (add_tries, add_convert, add_plan, add_rehearse, add_report):
        add_command(commands)
    add_pods(add_submit(commands))
    config = commands.add_parser(
        "config",
        help="list config fields, or show the resolved CONFIG",
        description="Without CONFIG: every field with its default, allowed values and meaning; with the name of a section "
        "or field, such as rollout.episode, in its place: those. With CONFIG: the resolved config and its batch arithmetic.",
    )
    add_config(config, is_optional=True)
    config.set_defaults(run=_config)
    add_doctor(commands)
    return parser


def _training_commands(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train as CONFIG says",
        description="Train as CONFIG says: by reinforcement learning, or, with a section `objective`, on given responses. "
        "Ray starts the ranks; torchrun may where there are no engines.",
    )
    add_config(train)
    train.set_defaults(run=_train, command="train")

    for command, what in (
        ("sft", "on demonstrations or conversations"),
        ("reward-model", "a scalar head on pairs (outcome) or on judged steps (process)"),
        ("preference", "on pairs by DPO and its variants or a mixture of them, or on labelled responses by KTO or BCO"),
    ):
        supervised = commands.add_parser(
            command,
            help=f"train {what}",
            description=f"Train {what}: `megarl train` for a CONFIG that must say so. Under torchrun every process is "
            "one rank; otherwise Ray starts them.",
        )
        add_config(supervised)
        supervised.set_defaults(run=_train, command=command)


def _model_commands(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model on data.eval and evaluations",
        description="Evaluate a model on data.eval, with greedy decoding, and on each set of evaluations as it says.",
    )
    add_config(evaluate)
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint", metavar="FOLDER", help="checkpoint or run (its newest one) to evaluate (default: model.path)"
    )
    which.add_argument(
        "--watch", action="store_true", help="evaluate each checkpoint of the run when it appears, until the run is finished"
    )
    evaluate.add_argument(
        "--out", metavar="FILE", help="also write every judged response to this JSONL file; it must not exist"
    )
    evaluate.set_defaults(run=_evaluate)

    generate = commands.add_parser(
        "generate",
        help="sample responses to data.train, score them and write them to a file",
        description="Sample rollout.samples_per_prompt responses per row of data.train, score them and write them to a file.",
    )
    add_config(generate)
    generate.add_argument("--out", metavar="FILE", required=True, help="JSONL file to write; it must not exist")
    generate.add_argument(
        "--as", dest="form", choices=("samples", "sft", "pairs", "pass_rates"), default="samples",
        help="samples: all responses with rewards; sft: correct responses; pairs: correct beside wrong; pass_rates: the rows "
        "with their share of correct responses (default: samples)",
    )  # fmt: skip
    generate.add_argument(
        "--checkpoint", metavar="FOLDER", help="checkpoint or run (its newest one) to sample from (default: model.path)"
    )
    generate.set_defaults(run=_generate)


def _serving_and_data_commands(commands: Any) -> None:
    add_serve(commands)
    serve = commands.add_parser(
        "serve-reward",
        help="serve the rewards of CONFIG over HTTP",
        description="Serve the sources in `rewards` over HTTP, by the protocol of the reward `http` (and of OpenRLHF).",
    )
    add_config(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=5000, help="port to listen on; 0: a free one (default: 5000)")
    serve.add_argument(
        "--token-file", metavar="FILE",
        help="file with the token that clients must send (default: MEGARL_REWARD_TOKEN; not needed on loopback)",
    )  # fmt: skip
    serve.set_defaults(run=_serve_reward)

    data = commands.add_parser("data", help="look at data files", description="Look at data files.")
    inspect = data.add_subparsers(metavar="ACTION", required=True).add_parser(
        "inspect",
        help="show rows as the model sees them",
        description="Show the first rows of FILE as the model will see them: tokens that are trained on told from the others. "
        "Of a config (.yaml) these are the rows of data.train, with its keys, system prompt, filters and tools.",
    )
    inspect.add_argument(
        "file", metavar="FILE", help="config (.yaml), file of rows, folder of such files, or data set of the hub"
    )
    inspect.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="fields of a config to override")
    inspect.add_argument("--model", metavar="FOLDER", help="model folder that the tokenizer comes from (default: the config's)")
    inspect.add_argument("--rows", type=int, default=3, help="rows shown (default: 3)")
    inspect.add_argument(
        "--kind", choices=("prompts", "sft", "pairs", "kto", "steps"), help="kind of rows (default: guessed from their keys)"
    )
    inspect.add_argument("--prompt-key", default="prompt", help="key of the prompt (default: prompt)")
    inspect.add_argument("--prompt", metavar="TEMPLATE", help='columns that make the prompt, such as "{instruction}\\n{input}"')
    inspect.add_argument("--messages-key", help="key of a conversation (default: messages)")
    inspect.add_argument(
        "--chat-template", metavar="CHOICE", default="auto", help="auto, always, never, or a .jinja file (default: auto)"
    )
    add_template_args(inspect)
    inspect.add_argument("--image-key", default="images", help="key of the pictures (default: images)")
    inspect.add_argument("--video-key", default="videos", help="key of the videos (default: videos)")
    inspect.add_argument("--audio-key", default="audios", help="key of the sounds (default: audios)")
    inspect.add_argument("--image-folder", metavar="FOLDER", help="where relative paths of pictures start (default: here)")
    inspect.add_argument("--media-folder", metavar="FOLDER", help="keeps pictures as the model sees them")
    inspect.add_argument("--max-pixels", type=int, help="largest size of a picture (default: the model's)")
    inspect.add_argument("--max-tokens", type=int, default=1024, help="longest row (default: 1024)")
    inspect.set_defaults(run=_inspect)


def _train(arguments: argparse.Namespace) -> int:
    allowed = OBJECTIVES.get(arguments.command)
    config = load_any(arguments.config, arguments.overrides, default={} if allowed is None else {"objective": {}})
    if allowed is not None and config.trains_by not in allowed:
        raise ConfigError(
            f"{arguments.config} trains by {config.trains_by}, but `megarl {arguments.command}` trains by "
            f"{' or '.join(allowed)}; `megarl train` runs any config"
        )
    config = with_models(config)
    return _watch(f"megarl.trainers.{config.trainer}.train", config, arguments)


def _watch(loop: str, config: AnyConfig, arguments: argparse.Namespace) -> int:
    """Train by module `loop` in a process that is watched over; under torchrun, which does that itself, in this one."""

    def train(config: AnyConfig) -> None:
        if is_leader():  # libraries, tokenizer and rows take seconds
            _say(f"{config.run_folder}: reading tokenizer and rows")
        module = importlib.import_module(loop)
        collect_rarely()
        module.train(config)

    if not arguments.is_watched or is_torchrun():
        train(config)
        return 0
    from megarl.supervise.restarts import run_with_restarts  # loads nothing that starts threads: it forks
    from megarl.system.terminal import outlive_readers

    _close_ray(config, arguments)
    outlive_readers()
    return run_with_restarts(config, train)


def _close_ray(config: AnyConfig, arguments: argparse.Namespace) -> None:
    """Before Ray is imported: one that the command starts answers its own processes alone."""
    if arguments.is_watched:  # else Ray may be there already
        want_a_token(config.resources.ray_address)


def _evaluate(arguments: argparse.Namespace) -> int:
    config = load_to_evaluate(arguments.config, arguments.overrides)
    check_evaluates(config)
    config = with_models(config)
    _close_ray(config, arguments)
    from megarl.system.own_temporary import own_temporary
    from megarl.trainers.evaluate import evaluate, watch

    if arguments.watch and arguments.out is not None:
        raise ConfigError("--out is given, but --watch writes no responses: remove one of them")
    if arguments.watch:
        with own_temporary():
            watch(config, _say, SafeConsole(stderr=True))
    else:
        with own_temporary():
            figures = evaluate(config, arguments.checkpoint, _say_aside, arguments.out, SafeConsole(stderr=True))
        print(json.dumps({"model": arguments.checkpoint or config.model.path} | figures, indent=2))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    config = with_models(load_config(arguments.config, arguments.overrides))
    _close_ray(config, arguments)
    from megarl.system.own_temporary import own_temporary
    from megarl.trainers.generate import generate

    with own_temporary():
        rows = generate(config, arguments.out, arguments.form, arguments.checkpoint, _say_aside, SafeConsole(stderr=True))
    print(f"{counted(rows, 'row')} written to {arguments.out}")
    return 0


def _serve_reward(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from megarl.rewards.server import serve_reward

    serve_reward(config.rewards, config.data, arguments.host, arguments.port, arguments.token_file, _say)
    return 0


def _say(line: str) -> None:
    print(redacted(line), flush=True)


def _template(text: str) -> str:
    """A template of the command line, in which a line break may be written as a backslash and an n."""
    from megarl.config.row_template import columns_of

    template = text.replace("\\n", "\n")
    try:
        columns_of(template)
    except ValueError as error:
        raise ConfigError(f"--prompt: {error}") from None
    return template


def _say_aside(line: str) -> None:
    """Say how far a command is, apart from what it prints."""
    print(redacted(line), file=sys.stderr, flush=True)


def _inspect(arguments: argparse.Namespace) -> int:
    from megarl.config.sections import PictureFields
    from megarl.data.inspect import inspect
    from megarl.data.supervised import SupervisedSettings

    if Path(arguments.file).suffix in (".yaml", ".yml"):
        return _inspect_config(arguments)
    if arguments.model is None:
        raise ConfigError("--model is missing; it must be the model folder that the tokenizer comes from")
    if arguments.overrides:
        raise ConfigError(
            f"unrecognized arguments: {' '.join(arguments.overrides)}; only a config (.yaml) has fields to override"
        )
    names = ("prompt", "prompt_key", "messages_key", "max_tokens", "chat_template")
    settings = {name: getattr(arguments, name) for name in names}
    settings["template_args"] = template_args(arguments)
    if arguments.prompt is not None:
        settings["prompt"] = _template(arguments.prompt)
    keys = ("image_key", "video_key", "audio_key", "image_folder", "media_folder", "max_pixels")
    pictures = PictureFields(**{name: getattr(arguments, name) for name in keys})
    inspect(
        arguments.file,
        model_here(arguments.model, "--model", weights=False),
        SupervisedSettings(**settings),
        arguments.rows,
        make_console(),
        kind=arguments.kind,
        pictures=pictures,
    )
    return 0


def _inspect_config(arguments: argparse.Namespace) -> int:
    from megarl.config.sections import DataConfig
    from megarl.data.inspect import inspect_config

    model = [] if arguments.model is None else [f"model.path={json.dumps(arguments.model)}"]
    if arguments.chat_template != "auto":
        model.append(f"data.chat_template={json.dumps(arguments.chat_template)}")
    model += [f"data.template_args.{name}={json.dumps(value)}" for name, value in template_args(arguments).items()]
    config = models_here(load_any(arguments.file, [*arguments.overrides, *model]), weights=False)
    tools: list[dict[str, Any]] = []
    rollout, data = config.sampling, config.data
    if rollout is not None and isinstance(data, DataConfig) and rollout.episode.kind != "single":
        from megarl.data.tokenize import load_tokenizer
        from megarl.rollout.episodes import open_episodes

        tokenizer = load_tokenizer(config.model.path)
        episodes = open_episodes(rollout.episode, data, tokenizer, rollout.max_new_tokens, None)
        tools = list(episodes.tool_schemas)
        episodes.close()
    inspect_config(config, arguments.rows, make_console(), tools)
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from megarl.observe.progress import aligned

    section = _section_named(arguments)
    if arguments.config is None or section:
        for title, fields in (
            ("train, eval, generate", config_fields()),
            ("sft, reward-model, preference", config_fields(SupervisedConfig)),
        ):
            leaves = [leaf for leaf in fields if not section or f"{leaf.name}.".startswith((f"{section}.", f"{section}[]."))]
            if not leaves:
                continue
            if (width := make_console().width) < NARROW:
                print(f"{title}\n" + "\n".join(_in_lines(leaf, width) for leaf in leaves))
                continue
            table = Table("field", "default", "values", "meaning", box=None, pad_edge=False, title=title, title_justify="left")
            for leaf in leaves:
                table.add_row(leaf.name, leaf.default, leaf.allowed_values, leaf.description)
            make_console().print(table, markup=False)
        return 0
    config = load_any(arguments.config, arguments.overrides)
    text = to_yaml(config)
    if written_out(text) != text:  # in YAML's own escapes, with which it reads back the same
        text = yaml.safe_dump(load_text(text), sort_keys=False, width=120)
    print(text)
    # as comments, so that the output as a whole is a config file again
    print("\n".join(f"# {line}" for line in aligned(config.batch_rows())))
    return 0


def _in_lines(leaf: ConfigField, width: int) -> str:
    """A field in lines of `width` columns: its name whole, and under it default, values and meaning."""
    text = f"{leaf.description} Default: {leaf.default}. Values: {leaf.allowed_values}."
    return f"{leaf.name}\n" + textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ")


def _section_named(arguments: argparse.Namespace) -> str | None:
    """The section or field that stands in CONFIG's place, such as `rollout.episode`; None where that is a file's name."""
    target = arguments.config
    if target is None or arguments.overrides or Path(target).exists() or Path(target).suffix in (".yaml", ".yml"):
        return None
    names = {leaf.name for leaf in (*config_fields(), *config_fields(SupervisedConfig))}
    sections = {".".join(name.replace("[]", "").split(".")[:depth]) for name in names for depth in range(1, 9)}
    if target not in sections | names:
        raise ConfigError(f"'{target}' is no file, and no section or field of a config{nearest(target, sorted(sections))}")
    return str(target)
