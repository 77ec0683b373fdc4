"""The documentation builds as a site without a warning: no dead link, no page that is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material (pip install 'megarl[docs]')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "quickstart.html", "python.html", "watching.html", "evidence/costs.html"):
        assert (tmp_path / "site" / page).is_file()
    assert "AdvantageInputs" in (tmp_path / "site" / "python.html").read_text()
