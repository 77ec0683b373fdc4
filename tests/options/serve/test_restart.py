"""A server that is killed or stopped, and the next one in its folder: clients go on, and learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.options.serve.reference import ReferenceTrainer
from tests.options.serve.served import serving
from tests.options.serve.test_bad_input import Http, body

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Again(Http):
    """The client of a server before, at the next one."""

    def __init__(self, served: Any, before: Http) -> None:
        import httpx

        self._http = httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": "tml-local"}, timeout=60)
        self.session = before.session


def steps(http: Http, model: str, numbers: range) -> list[Any]:
    """Passes and steps in turn, odd numbers passes."""
    sent = [http.send(body(model, n, 4 + n % 3)) if n % 2 else http.step(model, n, learning_rate=0.05) for n in numbers]
    return [http.answer(future) for future in sent]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("snapshot_every_s", [0.0, 1e9])
@pytest.mark.parametrize("last", [3, 4])
def test_models_go_on_after_a_restart_bit_for_bit(
    tmp_path: Path, *, is_killed: bool, snapshot_every_s: float, last: int
) -> None:
    with serving(tmp_path / "whole", journal=False) as served:
        http = Http(served)
        expected = steps(http, http.model(seed=7), range(1, 9))
    with serving(tmp_path / "cut", snapshot_every_s=snapshot_every_s, crash=is_killed) as served:
        before = Http(served)
        model = before.model(seed=7)
        first = steps(before, model, range(1, last + 1))
        unfetched = (
            before.send(body(model, last + 1, 4 + (last + 1) % 3))
            if last % 2 == 0
            else before.step(model, last + 1, learning_rate=0.05)
        )
        passed = before.answer(
            before.post("save_weights_for_sampler", model_id=model, seq_id=last + 2, sampling_session_seq_id=0)
        )
        forgotten = before.answer(before.post("save_weights", model_id=model, seq_id=last + 3, path="kept"))
    with serving(tmp_path / "cut", snapshot_every_s=snapshot_every_s) as served:
        http = Again(served, before)
        assert http.answer(unfetched) == expected[last]
        again = http.post("save_weights", model_id=model, seq_id=last + 3, path="kept")
        assert forgotten["path"].endswith("/weights/kept")
        assert http.answer(again) == forgotten
        asked = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
        sampler = passed["sampling_session_id"]
        assert isinstance(
            http.answer(
                http.post("asample", sampling_session_id=sampler, seq_id=0, prompt=asked, sampling_params={"max_tokens": 2})
            ),
            bytes,
        )
        rest = [
            http.send(body(model, n + 2, 4 + n % 3)) if n % 2 else http.step(model, n + 2, learning_rate=0.05)
            for n in range(last + 2, 9)
        ]
        assert [*first, expected[last], *(http.answer(future) for future in rest)] == expected
        assert http.post("session_heartbeat", session_id=http.session).status_code == 200


def test_a_model_whose_journal_is_damaged_is_lost_alone(tmp_path: Path) -> None:
    with serving(tmp_path, crash=True) as served:
        before = Http(served)
        models = [before.model(number, seed=7) for number in range(2)]
        answers = [steps(before, model, range(1, 3)) for model in models]
    trainer = ReferenceTrainer()
    create = trainer.create

    def fail(model: str, choice: Any) -> None:
        if model == models[0]:
            raise ValueError("no")
        create(model, choice)

    trainer.create = fail  # type: ignore[method-assign]
    with serving(tmp_path, trainer=trainer) as served:
        http = Again(served, before)
        assert "could not be brought back after a restart" in http.answer(http.step(models[0], 3))["error"]
        assert isinstance(http.answer(http.send(body(models[1], 3))), bytes)
        assert any("ValueError" in line for line in served.said)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("last", [3, 4, 5])
@pytest.mark.parametrize("how", ["bad datum", "no loss"])
def test_a_step_behind_a_pass_that_failed_is_none_after_a_restart_too(tmp_path: Path, how: str, last: int) -> None:
    """The server is killed before the pass is refused, between it and the step, or behind that."""
    bad: dict[str, Any] = {"advantages": np.full(4, np.nan, np.float32)} if how == "bad datum" else {"loss": "custom"}
    kind = [body, lambda model, n, tokens: body(model, n, 4, **bad)]

    def sent(http: Http, model: str, numbers: range) -> list[Any]:
        futures = [
            http.step(model, n, learning_rate=0.05) if n in (2, 5, 7) else http.send(kind[n == 4](model, n, 4 + n % 3))  # type: ignore[operator]
            for n in numbers
        ]
        return [http.answer(future) for future in futures]

    with serving(tmp_path / "whole", journal=False) as served:
        http = Http(served)
        expected = sent(http, http.model(seed=7), range(1, 8))
    assert ["error" in answer for answer in expected if isinstance(answer, dict)] == [False, True, True, False]
    with serving(tmp_path / "cut", crash=True) as served:
        before = Http(served)
        model = before.model(seed=7)
        first = sent(before, model, range(1, last + 1))
    with serving(tmp_path / "cut") as served:
        assert [*first, *sent(Again(served, before), model, range(last + 1, 8))] == expected
