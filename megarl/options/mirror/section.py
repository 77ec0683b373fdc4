"""The field `run.mirror`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField

DESCRIPTION = "Second place of checkpoints and records: a folder of another file system, or `s3://BUCKET/PREFIX`. null: none."
MIRROR: AddedField[str | None] = AddedField("RunConfig", "mirror", str | None, None, DESCRIPTION)
FIELDS = (MIRROR,)
mirror_of = MIRROR.of
"""The second place that a section `run` names."""
