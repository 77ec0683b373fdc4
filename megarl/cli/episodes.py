"""`megarl episodes try`: one episode of a config, whose turns you write yourself; megarl/cli/commands.py adds the command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.rollout.engines.protocol import Generation


def add_episodes(
    commands: Any,
    parser_class: type[argparse.ArgumentParser],
    config_arguments: Callable[[argparse.ArgumentParser], None],
    console: Callable[[], Console],
) -> None:
    """Add the command to the subparsers `commands`."""
    episodes = commands.add_parser(
        "episodes", help="try the tools or environment of a config", description="Try the episodes of a config."
    )
    actions = episodes.add_subparsers(metavar="ACTION", required=True, parser_class=parser_class)
    one = actions.add_parser(
        "try",
        help="act an episode without a model",
        description="Act one episode of CONFIG: its tools, its environment or your own function are called for real, the turns "
        "of the model are what you say, and the rewards judge it. Only the model's tokenizer is loaded, and no engine.",
    )
    config_arguments(one)
    one.add_argument("--say", metavar="TEXT", action="append", required=True, help="what the model says; once for each turn")
    one.add_argument("--row", metavar="N", type=int, default=0, help="row of data.train, counted from 0 (default: 0)")
    one.set_defaults(run=lambda arguments: _try(arguments, console()))


class _AnotherTurnError(Exception):
    """The episode asks for a turn that nobody said."""


class _Said:
    """A Sampler whose turns were written: each is its tokens and the end token, all with log-prob 0 and version 0."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self._turns = [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns]
        self.ids: list[int] = []
        """What the episode has so far."""

    async def __call__(self, ids: list[int], max_new_tokens: int, media: Any = None, /) -> Generation:
        from megarl.rollout.engines.protocol import Generation

        self.ids = list(ids)
        if not self._turns:
            raise _AnotherTurnError
        turn = self._turns.pop(0)
        reason = "stop" if len(turn) <= max_new_tokens else "length"
        turn = turn[:max_new_tokens]
        return Generation(turn, [0.0] * len(turn), [0] * len(turn), reason)  # type: ignore[arg-type]


def _try(arguments: argparse.Namespace, console: Console) -> int:
    import asyncio
    import tempfile
    from contextlib import ExitStack, closing

    from rich.text import Text

    from megarl.config import load_config
    from megarl.data.picture_reader import open_pictures
    from megarl.data.prompts import rows_of
    from megarl.data.rows import Origin
    from megarl.data.tokenize import PromptBuilder, load_tokenizer
    from megarl.models.from_hub import models_here
    from megarl.observe.chat import printable
    from megarl.rewards import build_rewards
    from megarl.rollout.episodes import open_episodes

    config = models_here(load_config(arguments.config, arguments.overrides), weights=False)
    data, settings, number = config.data, config.rollout.episode, arguments.row
    if settings.kind == "agent":
        raise ConfigError.of(
            "rollout.episode.kind", settings.kind, "has agents that ask an endpoint by themselves, which no --say can answer"
        )
    rows = list(islice(rows_of(data.train), number, number + 1)) if number >= 0 else []
    if not rows:
        raise DataError(f"--row is {number}, but data.train has no such row, or data.train.keep leaves it out")
    tokenizer = load_tokenizer(config.model.path)
    say = _Said(tokenizer, arguments.say)

    def tell(what: str, value: str) -> None:
        console.print(Text(f"{what:<8}  {printable(value)}"), soft_wrap=True)

    with ExitStack() as stack:
        pictures = open_pictures(data, config.model.path, tokenizer, stack.enter_context(tempfile.TemporaryDirectory()))
        limit = config.rollout.max_new_tokens
        episodes = stack.enter_context(closing(open_episodes(settings, data, tokenizer, limit, pictures.model)))
        builder = PromptBuilder(tokenizer, data, episodes.tool_schemas, pictures)
        [prompt] = builder.build(rows, prefix="train", origin=Origin("data.train", data.train))
        sources = build_rewards(config.rewards, data)
        sources.check([prompt])
        try:
            sample = asyncio.run(episodes.branches(prompt, 0, say))[0]
        except _AnotherTurnError:
            tell("episode", tokenizer.decode(say.ids))
            tell("open", f"it asks for turn {len(arguments.say) + 1}: give one more --say")
            return 0
        counts = episodes.take_counts()
    tell("episode", tokenizer.decode([*sample.prompt_ids, *sample.response_ids]))
    tell("ended", f"{sample.finish_reason}; " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if sample.turn_rewards:
        tell("turns", ", ".join(f"{value:g}" for value in sample.turn_rewards))
    (total,) = sources.score([sample])
    parts = ", ".join(f"{label} {sample.rewards[label]:g} (weight {weight:g})" for label, weight, _ in sources.sources)
    tell("reward", f"{total:g}: {parts}")
    return 0
