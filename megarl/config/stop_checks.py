"""Checks of the texts and token ids that end a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.schema import Config
from megarl.errors import ConfigError

UNDECIDED = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are no whole character, or not yet."""


def stops_of(config: Config) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """The sections that have stops of their own, with these: texts and token ids."""
    yield "rollout", config.rollout.stop, config.rollout.stop_token_ids
    for index, evaluation in enumerate(config.evaluations):
        yield f"evaluations[{index}]", evaluation.stop or (), evaluation.stop_token_ids or ()


def check_config_stops(config: Config) -> None:
    """Check the stops of all sections.

    Raises:
        ConfigError: as `check_stops`, or responses are to have `max_new_tokens` tokens in any case.
    """
    for section, texts, token_ids in stops_of(config):
        check_stops(section, texts, token_ids)
        if config.rollout.ignore_eos and (texts or token_ids):
            field = f"{section}.{'stop' if texts else 'stop_token_ids'}"
            raise ConfigError.needs(field, "responses that may end early", f"remove rollout.ignore_eos, or remove {field}")


def check_stops(section: str, stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
    """Refuse what can never end a response, or ends every one, in the fields `stop` and `stop_token_ids` of `section`.

    Raises:
        ConfigError: names the field and the place in its list.
    """
    for index, text in enumerate(stop):
        if reason := why_no_stop(text):
            field, shown = f"{section}.stop[{index}]", ascii(text)[1:-1] if text else text
            raise ConfigError.of(field, shown, reason, allowed="a text of at least one character")
    for index, token in enumerate(stop_token_ids):
        if token < 0:
            raise ConfigError.of(f"{section}.stop_token_ids[{index}]", token, allowed="a token id, 0 or more")


def why_no_stop(text: str) -> str:
    """The reason why `text` is none; empty: it is one."""
    if not text:
        return "would end every response at once"
    if UNDECIDED in text:
        return "has the character U+FFFD, which stands for bytes that are no text"
    half = next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    return "" if half is None else f"cannot be encoded: its character {half} is half of a surrogate pair"
