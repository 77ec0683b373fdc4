"""`megarl rewards try`: one response judged by a config's rewards, without a model; megarl/cli/commands.py adds the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.text import Text

from megarl.cli.arguments import add_config, make_console
from megarl.config import load_config
from megarl.config.sections import DataConfig
from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.data.rows import Row
    from megarl.data.sample import Sample
    from megarl.rewards import RewardSources


def add_rewards(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    rewards = commands.add_parser("rewards", help="try the rewards of a config", description="Try the rewards of a config.")
    actions = rewards.add_subparsers(metavar="ACTION", required=True)
    one = actions.add_parser(
        "try",
        help="judge one response without a model",
        description="Have the `rewards` of CONFIG judge a response that you write, to a row of data.train. No model, tokenizer "
        "or engine is loaded: the prompt is the row's own text, without the chat template.",
    )
    add_config(one)
    one.add_argument("--response", metavar="TEXT", required=True, help="the response; - reads it from stdin")
    one.add_argument("--row", metavar="N", type=int, default=0, help="row of data.train, counted from 0 (default: 0)")
    one.set_defaults(run=_try)


def _try(arguments: argparse.Namespace) -> int:
    from megarl.data.rows import find_value, value_of
    from megarl.data.sample import Prompt
    from megarl.rewards import build_rewards
    from megarl.rewards.sources import made_up_sample

    config = load_config(arguments.config, arguments.overrides)
    data, number = config.data, arguments.row
    row = training_row(data, number)
    prompt_text = _text(value_of(row, data.prompt_key, "data.prompt_key", f"row {number} of data.train"))
    prompt = Prompt(f"train-{number}", f"train-{number}@0", [], prompt_text, row)
    sources = build_rewards(config.rewards, data)
    sources.check([prompt])
    response = sys.stdin.read() if arguments.response == "-" else arguments.response
    lines = [("prompt", prompt_text), ("expected", find_value(row, data.answer_key)), ("response", response)]
    print_rows([*lines, *judged(sources, made_up_sample(prompt, response))])
    return 0


def training_row(data: DataConfig, number: int) -> Row:
    """Row `number` of data.train.

    Raises:
        DataError: there is no such row.
    """
    from megarl.data.prompts import rows_of

    row = next(islice(rows_of(data.train), number, None), None) if number >= 0 else None
    if row is None:
        raise DataError(f"--row is {number}, but data.train has no such row, or data.train.keep leaves it out")
    return row


def judged(sources: RewardSources, sample: Sample) -> list[tuple[str, str]]:
    """The reward of each source for `sample`, and their weighted sum."""
    (total,) = sources.score([sample])
    rows = [(label, f"{sample.rewards[label]:g} (weight {weight:g})") for label, weight, _ in sources.sources]
    failed = " (a response that could not be judged counts 0)" if sources.failures else ""
    return [*rows, ("reward", f"{total:g}{failed}")]


def print_rows(rows: Sequence[tuple[str, Any]]) -> None:
    """A line for each row, the values below each other; control characters of a response are shown, not obeyed."""
    from megarl.observe.chat import printable
    from megarl.observe.progress import aligned

    for line in aligned([(what, printable(str(value))) for what, value in rows]):
        make_console().print(Text(line), soft_wrap=True)


def _text(prompt: Any) -> str:
    """A row's prompt as text: that of its messages, one after the other, where it is a conversation."""
    if not isinstance(prompt, list):
        return str(prompt)
    contents = [turn.get("content", turn.get("value", "")) if isinstance(turn, dict) else turn for turn in prompt]
    return "\n".join(str(content) for content in contents)
