"""SGLang's own server arguments: misspelt ones are known before a server is started."""

from __future__ import annotations

import pytest

from megarl.config.engine_kinds import SGLANG
from megarl.errors import ConfigError
from megarl.rollout.engines.sglang.arguments import check_engine_args, server_arguments


def test_a_misspelt_argument_is_refused_with_the_nearest_one() -> None:
    check_engine_args(["mem_fraction_static", "max_running_requests"])
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_args\.mem_fraction_statc is no argument .*did you mean 'mem_fraction_static'"
    ):
        check_engine_args(["mem_fraction_statc"])


def test_what_megarl_sets_itself_are_arguments_of_sglang() -> None:
    assert SGLANG.set_elsewhere.keys() <= server_arguments()


def test_without_sglang_the_names_are_left_to_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.engines.sglang.arguments.server_arguments", frozenset)
    check_engine_args(["anything"])
