"""`megarl rewards try` and `megarl episodes try`: one response judged, one episode run, without a model.

The rewards, the tools and the environment are a config's own; who tries them says what the policy says.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.text import Text

from megarl.cli.arguments import add_config, make_console
from megarl.config import load_config
from megarl.config.sections import DataConfig
from megarl.errors import ConfigError, DataError
from megarl.models.from_hub import models_here

if TYPE_CHECKING:
    from megarl.data.rows import Row
    from megarl.data.sample import Sample
    from megarl.rewards import RewardSources


def add_tries(commands: Any) -> None:
    """Add the commands `rewards` and `episodes` to the subparsers `commands`."""
    rewards = commands.add_parser("rewards", help="try the rewards of a config", description="Try the rewards of a config.")
    rewards_try = rewards.add_subparsers(metavar="ACTION", required=True).add_parser(
        "try",
        help="judge one response without a model",
        description="Have the `rewards` of CONFIG judge a response that you write, to a row of data.train. No model, tokenizer "
        "or engine is loaded: the prompt is the row's own text, without the chat template.",
    )
    add_config(rewards_try)
    rewards_try.add_argument("--response", metavar="TEXT", required=True, help="the response; - reads it from stdin")
    _add_row(rewards_try)
    rewards_try.set_defaults(run=_try_rewards)

    episodes = commands.add_parser("episodes", help="try the tools or the environment of a config")
    episodes_try = episodes.add_subparsers(metavar="ACTION", required=True).add_parser(
        "try",
        help="run one episode without a model",
        description="Run one episode of CONFIG to a row of data.train, in which the policy says the given texts, one a turn; "
        "tools, environment and rewards are the config's own. Of the model only the tokenizer is loaded.",
    )
    add_config(episodes_try)
    episodes_try.add_argument(
        "--say", metavar="TEXT", action="append", required=True, help="a turn of the policy; - reads it from stdin; repeatable"
    )
    _add_row(episodes_try)
    episodes_try.set_defaults(run=_try_episode)


def _add_row(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", metavar="N", type=int, default=0, help="row of data.train, counted from 0 (default: 0)")


def _try_rewards(arguments: argparse.Namespace) -> int:
    from megarl.data.row_template import with_prompt
    from megarl.data.rows import find_value, value_of
    from megarl.data.sample import Prompt
    from megarl.rewards import build_rewards
    from megarl.rewards.trial import made_up_sample

    config = load_config(arguments.config, arguments.overrides)
    data, number = config.data, arguments.row
    row = with_prompt(_training_row(data, number), data.prompt, data.prompt_key, f"row {number} of data.train")
    prompt_text = _text(value_of(row, data.prompt_key, "data.prompt_key", f"row {number} of data.train"))
    prompt = Prompt(f"train-{number}", f"train-{number}@0", [], prompt_text, row)
    sources = build_rewards(config.rewards, data)
    sources.check([prompt])
    response = sys.stdin.read() if arguments.response == "-" else arguments.response
    lines = [("prompt", prompt_text), ("expected", find_value(row, data.answer_key)), ("response", response)]
    _print_rows([*lines, *_judged(sources, made_up_sample(prompt, response))])
    return 0


def _training_row(data: DataConfig, number: int) -> Row:
    """Row `number` of data.train.

    Raises:
        DataError: there is no such row.
    """
    from megarl.data.prompts import rows_of

    row = next(islice(rows_of(data.train), number, None), None) if number >= 0 else None
    if row is None:
        raise DataError(f"--row is {number}, but data.train has no such row, or data.train.keep leaves it out")
    return row


def _judged(sources: RewardSources, sample: Sample) -> list[tuple[str, str]]:
    """The reward of each source for `sample`, and their weighted sum."""
    (total,) = sources.score([sample])
    rows = [(label, f"{sample.rewards[label]:g} (weight {weight:g})") for label, weight, _ in sources.sources]
    failed = " (a response that could not be judged counts 0)" if sources.failures else ""
    return [*rows, ("reward", f"{total:g}{failed}")]


def _print_rows(rows: Sequence[tuple[str, Any]]) -> None:
    """A line for each row, the values below each other; control characters of a response are shown, not obeyed."""
    from megarl.observe.progress import aligned

    for line in aligned([(what, str(value)) for what, value in rows]):
        make_console().print(Text(line), soft_wrap=True)


def _text(prompt: Any) -> str:
    """A row's prompt as text: that of its messages, one after the other, where it is a conversation."""
    if not isinstance(prompt, list):
        return str(prompt)
    contents = [turn.get("content", turn.get("value", "")) if isinstance(turn, dict) else turn for turn in prompt]
    return "\n".join(str(content) for content in contents)


def _try_episode(arguments: argparse.Namespace) -> int:
    from megarl.data.row_media import open_media
    from megarl.data.tokenize import PromptBuilder, load_tokenizer
    from megarl.rewards import build_rewards
    from megarl.rollout.episodes import open_episodes
    from megarl.rollout.episodes.scripted import ScriptedTurns

    config = load_config(arguments.config, arguments.overrides)
    data, settings, number = config.data, config.rollout.episode, arguments.row
    if settings.kind == "agent":
        reason = "asks an endpoint of the run for its turns"
        raise ConfigError.of("rollout.episode.kind", "agent", reason, allowed="another kind for `megarl episodes try`")
    row = _training_row(data, number)
    path = models_here(config, weights=False).model.path
    tokenizer, sources = load_tokenizer(path), build_rewards(config.rewards, data)
    script = ScriptedTurns(tokenizer, [sys.stdin.read() if text == "-" else text for text in arguments.say])
    with TemporaryDirectory() as folder:
        media = open_media(data, path, tokenizer, folder)
        episodes = open_episodes(settings, data, tokenizer, config.rollout.max_new_tokens, media.model)
        try:
            builder = PromptBuilder(tokenizer, data, episodes.tool_schemas, media)
            (prompt,) = builder.build([*[None] * number, row], prefix="train")
            prompt = replace(prompt, group_id=f"{prompt.row_id}@0")
            sources.check([prompt])
            samples = asyncio.run(episodes.branches(prompt, 0, script))
            counts = {name: count for name, count in episodes.take_counts().items() if count}
        finally:
            episodes.close()
    turns_given, turns_asked = len(script.texts), script.asked
    note = (
        []
        if turns_asked == turns_given
        else [("note", f"the episode asked for turns: {turns_asked}; --say was given: {turns_given}")]
    )
    for sample in samples:
        rows = [("prompt", sample.prompt_text), *_turns(sample, turns_given), *_facts(sample, counts), *note]
        _print_rows([*rows, *_judged(sources, sample)])
    return 0


def _turns(sample: Sample, said: int) -> list[tuple[str, str]]:
    """Lines that say who said what; behind the policy's first `said` turns nothing was left to be said."""
    from megarl.observe.sample_media import turn_texts

    texts = turn_texts(asdict(sample)) or [f"assistant: {sample.response_text}"]
    rows, policy_turns = [], 0
    for role, _, text in (text.partition(": ") for text in texts):
        policy_turns += role == "assistant"
        rows.append((role, text if role != "assistant" or policy_turns <= said else "(asked, but no --say is left)"))
    return rows


def _facts(sample: Sample, counts: dict[str, int]) -> list[tuple[str, Any]]:
    tokens = f"{len(sample.response_ids)} behind the prompt, {sum(sample.sampled_mask)} of them the policy's"
    rows = [("finish_reason", sample.finish_reason), ("tokens", tokens)]
    rows += [("counts", ", ".join(f"{name} {count}" for name, count in counts.items()))] if counts else []
    rows += [("turn rewards", ", ".join(f"{gained:g}" for gained in sample.turn_rewards))] if any(sample.turn_rewards) else []
    return rows + ([("turn states", ", ".join(sample.turn_states))] if sample.turn_states else [])
