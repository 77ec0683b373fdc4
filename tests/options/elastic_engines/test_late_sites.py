"""What comes late from a site, or late to it, costs neither the run nor the site anything."""

from __future__ import annotations

import threading

import pytest

from megarl.options.elastic_engines.sites import gate
from megarl.options.elastic_engines.sites.far_engine import FarEngine
from megarl.options.elastic_engines.sites.far_members import FarMembers
from tests.options.elastic_engines.test_members import WAIT_S
from tests.options.elastic_engines.test_members import site as site  # a fixture
from tests.options.elastic_engines.test_sites import FarSite, TwoSites
from tests.options.elastic_engines.test_sites import two as two  # a fixture

pytest.importorskip("zstandard")


def test_a_site_that_was_told_to_try_again_is_not_admitted_later(two: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, is_told, is_seen_to = FarMembers._admit, threading.Event(), threading.Event()
    errors: list[Exception] = []

    def busy(self: FarMembers, engine: FarEngine) -> None:
        is_told.wait(WAIT_S)
        try:
            admit(self, engine)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            is_seen_to.set()

    with monkeypatch.context() as while_busy:
        while_busy.setattr(gate, "ADMITTED_S", 0.05)
        while_busy.setattr(FarMembers, "_admit", busy)
        one = FarSite(two.url, two.model)
        one.wait()
        assert str(one.error).endswith("the run is busy; try again")
        is_told.set()
        assert is_seen_to.wait(WAIT_S)
    assert errors == []
    assert two.far.numbers == set()
    two.site.update(0)
    two.come()
    assert two.site.running._error is None
