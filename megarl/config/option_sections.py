"""Fields that options add to the config's sections: `FIELDS` of an option's `section.py` become fields of a core section."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar, cast

from pydantic import Field, create_model

from megarl.config.section import Section
from megarl.option_list import OPTIONS, parts

AnySection = TypeVar("AnySection", bound=Section)
Value = TypeVar("Value")

OPTION_OF_FIELD = {
    **dict.fromkeys(("algorithm.distillation", "teacher"), "distillation"),
    **dict.fromkeys(("critic.lora", "policy.lora"), "lora"),
    **dict.fromkeys(("policy.mtp", "rollout.speculative"), "prediction"),
    **dict.fromkeys([f"resources.{name}" for name in ("compare_replicas", "shrink", "slow_ranks", "spares")], "elastic"),
    "data.curriculum": "curriculum",
    "policy.indexer": "sparse_attention",
    "policy.routing": "routing_replay",
    "ptx": "ptx",
    "reward_model": "reward_model",
    "rollout.disaggregation": "disaggregation",
    "rollout.host_cache_gb": "host_cache",
    "rollout.kv_cache_dtype": "fp8_cache",
    "rollout.max_engines": "elastic_engines",
    "rollout.episode.agent": "agents",
    "rollout.episode.mcp": "tools",
    "rollout.episode.openenv": "environments",
    "rollout.episode.sandbox": "sandboxes",
    "rollout.schedule.lent_engines": "lending",
    "rollout.sites": "elastic_engines",
    "run.mirror": "mirror",
    "serve": "serve",
    "trackers": "telemetry",
}
"""The option that each added field belongs to, also where an installation lacks it: for the sentence that says so."""
SINGLE_FIELDS = (
    "resources.compare_replicas", "resources.shrink", "resources.slow_ranks", "resources.spares", "rollout.host_cache_gb",
    "rollout.kv_cache_dtype", "rollout.max_engines", "rollout.schedule.lent_engines",
)  # fmt: skip
"""Those of `OPTION_OF_FIELD` that are no sections."""


class AddedField(NamedTuple, Generic[Value]):
    """A field that an option adds to the section class called `parent`."""

    parent: str
    name: str
    annotation: Any
    default: Value
    description: str

    def of(self, section: Section) -> Value:
        """The value of the field in a section of its class."""
        return cast(Value, getattr(section, self.name))


def with_options(section: type[AnySection]) -> type[AnySection]:
    """Decorate a section: returns the class of the same name that has the fields of the installed options, too."""
    added = [field for module in parts("section") for field in module.FIELDS if field.parent == section.__name__]
    fields: dict[str, Any] = {
        field.name: (field.annotation, Field(default=field.default, description=field.description)) for field in added
    }
    if not fields:
        return section
    return create_model(section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields)


OPTION_OF_KIND = {"tools": "tools", "environment": "environments", "agent": "agents"}
"""The option that each kind of episode belongs to."""


def absent_kind(kind: str) -> str | None:
    """The sentence on `rollout.episode.kind`, if the kind belongs to an option that this installation does not have."""
    option = OPTION_OF_KIND.get(kind)
    if option is None or option in OPTIONS:
        return None
    return f"rollout.episode.kind is '{kind}', which needs the option {option}, which this installation does not have"


def absent_option(field: str) -> str | None:
    """The sentence on the config field `field`, if it belongs to an option that this installation does not have."""
    option = OPTION_OF_FIELD.get(field)
    if option is None or option in OPTIONS:
        return None
    if field in SINGLE_FIELDS:
        return f"{field} needs the option {option}, which this installation does not have"
    return f"section `{field.rpartition('.')[2]}` needs the option {option}, which this installation does not have ({field})"
