"""`megarl episodes try`: one episode in which you say what the policy says; megarl/cli/commands.py adds the command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megarl.cli.arguments import add_config
from megarl.cli.rewards import judged, print_rows, training_row
from megarl.config import load_config
from megarl.errors import ConfigError
from megarl.models.from_hub import models_here

if TYPE_CHECKING:
    from megarl.data.sample import Sample


def add_episodes(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    episodes = commands.add_parser("episodes", help="try the tools or the environment of a config")
    actions = episodes.add_subparsers(metavar="ACTION", required=True)
    one = actions.add_parser(
        "try",
        help="run one episode without a model",
        description="Run one episode of CONFIG to a row of data.train, in which the policy says the given texts, one a turn; "
        "tools, environment and rewards are the config's own. Of the model only the tokenizer is loaded.",
    )
    add_config(one)
    one.add_argument(
        "--say", metavar="TEXT", action="append", required=True, help="a turn of the policy; - reads it from stdin; repeatable"
    )
    one.add_argument("--row", metavar="N", type=int, default=0, help="row of data.train, counted from 0 (default: 0)")
    one.set_defaults(run=_try)


def _try(arguments: argparse.Namespace) -> int:
    from megarl.data.tokenize import PromptBuilder, load_tokenizer
    from megarl.options.pictures.picture_reader import open_pictures
    from megarl.rewards import build_rewards
    from megarl.rollout.episodes import open_episodes
    from megarl.rollout.episodes.scripted import ScriptedTurns

    config = load_config(arguments.config, arguments.overrides)
    data, settings, number = config.data, config.rollout.episode, arguments.row
    if settings.kind == "agent":
        reason = "asks an endpoint of the run for its turns"
        raise ConfigError.of("rollout.episode.kind", "agent", reason, allowed="another kind for `megarl episodes try`")
    row = training_row(data, number)
    path = models_here(config, weights=False).model.path
    tokenizer, sources = load_tokenizer(path), build_rewards(config.rewards, data)
    script = ScriptedTurns(tokenizer, [sys.stdin.read() if text == "-" else text for text in arguments.say])
    with TemporaryDirectory() as folder:
        pictures = open_pictures(data, path, tokenizer, folder)
        episodes = open_episodes(settings, data, tokenizer, config.rollout.max_new_tokens, pictures.model)
        try:
            builder = PromptBuilder(tokenizer, data, episodes.tool_schemas, pictures)
            (prompt,) = builder.build([*[None] * number, row], prefix="train")
            prompt = replace(prompt, group_id=f"{prompt.row_id}@0")
            sources.check([prompt])
            samples = asyncio.run(episodes.branches(prompt, 0, script))
            counts = {name: count for name, count in episodes.take_counts().items() if count}
        finally:
            episodes.close()
    said, asked = len(script.texts), script.asked
    note = [] if asked == said else [("note", f"the episode asked for turns: {asked}; --say was given: {said}")]
    for sample in samples:
        rows = [("prompt", sample.prompt_text), *_turns(sample, said), *_facts(sample, counts), *note]
        print_rows([*rows, *judged(sources, sample)])
    return 0


def _turns(sample: Sample, said: int) -> list[tuple[str, str]]:
    """Lines that say who said what; behind the policy's first `said` turns nothing was left to be said."""
    from megarl.options.pictures.shown import turn_texts

    texts = turn_texts(asdict(sample)) or [f"assistant: {sample.response_text}"]
    rows, own = [], 0
    for role, _, text in (text.partition(": ") for text in texts):
        own += role == "assistant"
        rows.append((role, text if role != "assistant" or own <= said else "(asked, but no --say is left)"))
    return rows


def _facts(sample: Sample, counts: dict[str, int]) -> list[tuple[str, Any]]:
    tokens = f"{len(sample.response_ids)} behind the prompt, {sum(sample.sampled_mask)} of them the policy's"
    rows = [("finish_reason", sample.finish_reason), ("tokens", tokens)]
    rows += [("counts", ", ".join(f"{name} {count}" for name, count in counts.items()))] if counts else []
    rows += [("turn rewards", ", ".join(f"{gained:g}" for gained in sample.turn_rewards))] if any(sample.turn_rewards) else []
    return rows + ([("turn states", ", ".join(sample.turn_states))] if sample.turn_states else [])
