"""Checks of `run.mirror`: one sentence per contradiction."""

from __future__ import annotations

from pathlib import Path

from megarl.config import AnyConfig
from megarl.errors import ConfigError
from megarl.options.mirror.section import mirror_of
from megarl.system.redaction import redacted


def check(config: AnyConfig) -> None:
    """Refuse a second place that cannot be one."""
    run, mirror = config.run, mirror_of(config.run)
    if mirror is None:
        return
    scheme, is_address, rest = mirror.partition("://")
    bucket = rest.partition("/")[0]
    allowed = "a folder outside run.folder, or s3://BUCKET/PREFIX with a bucket that is there"
    if is_address and "@" in bucket:
        raise ConfigError.of("run.mirror", redacted(mirror), "has a key in it", allowed="without; AWS_* variables have it")
    if not mirror.strip() or (is_address and (scheme != "s3" or not bucket or "?" in rest)):
        raise ConfigError.of("run.mirror", mirror, allowed=allowed)
    if not is_address and Path(run.folder).resolve() in (Path(mirror).resolve(), *Path(mirror).resolve().parents):
        raise ConfigError.of("run.mirror", mirror, f"is in run.folder, '{run.folder}'", allowed=allowed)


check_supervised = check
