"""Every example is a config that loads, and says at its top what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import AnyConfig, load_any
from megarl.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def load(path: Path) -> AnyConfig:
    """The example's config; the test is skipped where an option that it needs was deleted."""
    try:
        return load_any(path)
    except ConfigError as error:
        if "which this installation does not have" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_example_loads(path: Path) -> None:
    assert path.read_text().startswith("# ")
    load(path)


def test_run_names_are_distinct() -> None:
    names = [load(path).run.name for path in EXAMPLES]
    assert len(names) == len(set(names))
