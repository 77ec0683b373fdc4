"""Which runs share prefixes; and what a step tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.errors import ConfigError
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape
from megarl.observe.rank_record import RankRecord, UpdateFlops
from megarl.runs.timeline import throughput
from megarl.workers import role_specs
from megarl.workers.role_specs import shares_prefixes

LLAMA = Path(__file__).resolve().parents[2] / "examples/models/llama-3.1-70b"
FLOPS = FlopsModel.of(ModelShape.read(LLAMA))


def config(share: Any, prompt: int, response: int, group: int) -> Config:
    found = parse_config(
        {
            "model": {"path": str(LLAMA)},
            "policy": {"share_prefix": share, "max_tokens_per_micro_batch": 65600},
            "algorithm": {"name": "grpo"},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}, "max_prompt_tokens": prompt},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": group, "max_new_tokens": response},
            "rewards": [{"name": "exact_number"}],
        }
    )
    assert isinstance(found, Config)
    return found


SIZES = ((4096, 2048, 8), (64, 65536, 2))
"""Prompts, responses and groups for which sharing pays, and does not."""


@pytest.mark.parametrize("sizes", SIZES)
def test_the_reference_attention_shares_unless_the_config_says_no(sizes: tuple[int, int, int]) -> None:
    assert shares_prefixes(config(True, *sizes), "reference", FLOPS)
    assert shares_prefixes(config("auto", *sizes), "reference", FLOPS)
    assert not shares_prefixes(config(False, *sizes), "reference", FLOPS)


def test_other_layers_share_nothing_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_specs, "parts", lambda place: ())
    assert not shares_prefixes(config("auto", *SIZES[0]), "local", FLOPS)
    assert not shares_prefixes(config(False, *SIZES[0]), "local", FLOPS)
    with pytest.raises(ConfigError, match=r"share_prefix is 'true', .*'local' needs the option shared_prefixes, .* auto or"):
        shares_prefixes(config(True, *SIZES[0]), "local", FLOPS)


def test_a_step_tells_the_tokens_that_it_computed_and_those_that_it_saved() -> None:
    found = throughput(UpdateFlops(10, 0, 60, 80), [RankRecord([("update", 0.0, 1.0)], 0, 0.0)], None)
    assert (found["policy/computed_tokens"], found["policy/shared_tokens"]) == (60, 0.25)
