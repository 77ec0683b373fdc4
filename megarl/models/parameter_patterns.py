"""Parameters chosen by patterns over Hugging Face names of tensors, such as `model.layers.0.*`; importable without torch.

`*` stands for any text, dots included, `?` for one character and `[01]` for one of several, as in names of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from megarl.errors import ConfigError, nearest
from megarl.models.vision import part_of
from megarl.models.weight_map import BoundRule, WeightMap

ROUTER = "router"
"""The word for the routers of all layers, whatever a family calls their tensors."""
PARTS = ("vision", "projector", "language", ROUTER)
"""Words that stand for parts of a model; the first two are of a vision-language model only."""


@dataclass(frozen=True)
class ParameterPatterns:
    """`entries` are words of `PARTS` and patterns; a parameter is chosen if each tensor that it is made of is."""

    entries: tuple[str, ...]

    def choose(self, rule: BoundRule) -> bool:
        """Return whether the parameter is chosen; one of which only some tensors are is not."""
        return all(self._chosen(rule))

    def chosen_in_part(self, rule: BoundRule) -> bool:
        """Return whether some of the tensors are chosen, and others not: the parameter cannot be cut."""
        chosen = self._chosen(rule)
        return any(chosen) and not all(chosen)

    def _chosen(self, rule: BoundRule) -> list[bool]:
        if self.entries and (part_of(rule.megatron_name) in self.entries or (ROUTER in self.entries and is_router(rule))):
            return [True]
        return [any(pattern.match(name) for pattern in self._compiled) for name in rule.hf_names]

    @cached_property
    def _compiled(self) -> list[re.Pattern[str]]:
        return [re.compile(translate(entry)) for entry in self.entries if entry not in PARTS]


def is_router(rule: BoundRule) -> bool:
    """Return whether a parameter or buffer is of a router."""
    return ".router." in rule.megatron_name


def check_patterns(field: str, entries: Sequence[str], weight_map: WeightMap, *, sees: bool) -> Iterable[BoundRule]:
    """The parameters that `entries`, the value of `field`, choose of a model.

    Raises:
        ConfigError: an entry chooses nothing, or some tensors of a parameter that Megatron holds as one.
    """
    rules, patterns = [*weight_map.bound_rules()], ParameterPatterns(tuple(entries))
    names = {name for rule in rules for name in rule.hf_names}
    for entry in entries:
        if entry in ("vision", "projector") and not sees:
            reason = f"names '{entry}', a part of a vision-language model, and this one only reads"
            raise ConfigError.of(field, list(entries), reason, allowed=f"without '{entry}'")
        alone = ParameterPatterns((entry,))
        if not any(alone.choose(rule) or alone.chosen_in_part(rule) for rule in rules):
            reason = f"names '{entry}', a pattern of no tensor of the model{nearest(entry, names)}"
            raise ConfigError.of(
                field, list(entries), reason, allowed=f"words ({', '.join(PARTS)}) or patterns of its tensors' names"
            )
    for rule in rules:
        if patterns.chosen_in_part(rule):
            reason = f"names some of {', '.join(rule.hf_names)}, which Megatron holds as one parameter"
            raise ConfigError.of(field, list(entries), reason, allowed="patterns of all of them or of none")
    return [rule for rule in rules if patterns.choose(rule)]
