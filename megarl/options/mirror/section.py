"""The field `run.mirror`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Section

FIELDS = (
    AddedField(
        "RunConfig",
        "mirror",
        str | None,
        None,
        "Second place of checkpoints and records: a folder of another file system, or `s3://BUCKET/PREFIX`. null: none.",
    ),
)


def mirror_of(run: Section) -> str | None:
    """The second place that a section `run` names."""
    return getattr(run, "mirror")  # noqa: B009 - a field that this option adds
