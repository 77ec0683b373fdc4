"""Two tenants train beside each other on one server, by clients of their own: each learns what it learns alone, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.options.serve.tenants import new_key
from tests.options.serve.two_tenants import WORK, Learned, check_alike, learned_by
from tests.themes.e2e.test_serve import NAME, config_of, serving


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_tenants_side_by_side_learn_what_each_learns_alone(tiny_model: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    made = {name: new_key(name) for name in WORK}
    keys = {name: key for name, (key, _) in made.items()}
    (tmp_path / "tenants.yaml").write_text("".join(entry for _, entry in made.values()))
    base = config_of(tiny_model, tmp_path)
    policy = base["policy"] | {"layout": layout}
    serve = base["serve"] | {"tenants": str(tmp_path / "tenants.yaml"), "live_models": 1}
    found: dict[str, dict[str, Learned]] = {}
    for names in (("anna", "ben"), ("anna",), ("ben",)):
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        with serving(tiny_model, folder, policy=policy, serve=serve, run={"folder": str(folder), "name": "served"}) as server:
            found["-".join(names)] = learned_by(server.url, NAME, keys, names)
    check_alike(found["anna-ben"], found["anna"] | found["ben"])
