"""SGLang's own server arguments: misspelt ones are known before a server is started."""

from __future__ import annotations

import pytest

from megarl.config.rollout_checks import SET_ELSEWHERE
from megarl.errors import ConfigError
from megarl.rollout.engine_args import check_engine_args, server_arguments


def test_a_misspelt_argument_is_refused_with_the_nearest_one() -> None:
    check_engine_args(["mem_fraction_static", "max_running_requests", "port"])
    with pytest.raises(ConfigError, match=r"has mem_fraction_statc, .*did you mean 'mem_fraction_static'"):
        check_engine_args(["mem_fraction_statc"])


def test_what_megarl_sets_itself_are_arguments_of_sglang() -> None:
    assert set(SET_ELSEWHERE) <= server_arguments()


def test_without_sglang_the_names_are_left_to_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.engine_args.server_arguments", frozenset)
    check_engine_args(["anything"])
