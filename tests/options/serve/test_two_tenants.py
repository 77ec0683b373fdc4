"""Two tenants on one server hear what each hears alone, bit for bit: of the service, with the reference trainer."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.options.serve.served import BASE, serving
from tests.options.serve.test_tenants import file_of
from tests.options.serve.two_tenants import Learned, check_alike, learned_by


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tenants_side_by_side_hear_what_each_hears_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    path, keys = file_of(tmp_path, "anna", "ben")
    found: dict[str, dict[str, Learned]] = {}
    for names in (("anna", "ben"), ("anna",), ("ben",)):
        with serving(tmp_path / "-".join(names), tenants=path) as served:
            found["-".join(names)] = learned_by(served.url, BASE, keys, names)
            if len(names) == 2:
                turns = [call[1].split(":")[0] for call in served.trainer.calls if call[0] == "backward"]
    check_alike(found["anna-ben"], found["anna"] | found["ben"])
    assert sum(one != other for one, other in itertools.pairwise(turns)) > 4, "their passes were computed in turn"
