"""Which models Transformer Engine's attention computes over context-parallel ranks, by the ways that ranks exchange tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.errors import ConfigError, LayoutError
from megarl.models.check_layouts import check_models
from megarl.models.context_exchange import check_exchange, oldest_engine
from tests.families import build_folder

SIZES: dict[str, Any] = {"tp": 2, "heads": 16, "kv_heads": 8}
KINDS = {"plain": (False, False), "windows": (True, False), "sinks": (False, True), "both": (True, True)}
TAKEN = {
    "plain": {"p2p", "a2a", "all_gather"},
    "windows": {"a2a", "all_gather"},
    "sinks": {"a2a"},
    "both": {"a2a"},
}
"""What `attn_forward_func_with_cp` of Transformer Engine 2.20 asserts, read there, of packed sequences."""


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_sinks_are_computed_by_the_ways_that_transformer_engine_has(kind: str) -> None:
    windows, sinks = KINDS[kind]
    for way in ("p2p", "a2a", "all_gather", "a2a+p2p"):
        for ways in (way, [way], [way, "a2a"]):
            check_exchange(ways, cp=1, windows=windows, sinks=sinks, **SIZES)
            if way in TAKEN[kind]:
                check_exchange(ways, cp=2, windows=windows, sinks=sinks, **SIZES)
                continue
            with pytest.raises(
                LayoutError, match=rf"^cp is 2, which .* by megatron\.cp_comm_type = .*'{way.replace('+', '.')}'"
            ):
                check_exchange(ways, cp=2, windows=windows, sinks=sinks, **SIZES)


def test_the_way_is_p2p_where_none_is_named_and_the_others_are() -> None:
    with pytest.raises(LayoutError) as caught:
        check_exchange(None, cp=4, windows=True, sinks=False, **SIZES)
    assert str(caught.value) == (
        "cp is 4, which Transformer Engine's attention does not support for the sliding windows of this model by "
        "megatron.cp_comm_type = 'p2p'; it must be 1, or set megatron.cp_comm_type to 'a2a' or 'all_gather', or "
        "model.layer_spec to 'reference'"
    )


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "cp", "allowed"),
    [
        (1, 16, 8, 16, "1, 2, 4 or 8"),
        (2, 16, 8, 8, "1, 2 or 4"),
        (1, 12, 4, 3, "1, 2 or 4"),
        (1, 6, 3, 3, "1"),
        (8, 16, 4, 2, "1"),
    ],
)
def test_heads_that_a2a_cannot_share_out_are_named(tp: int, heads: int, kv_heads: int, cp: int, allowed: str) -> None:
    with pytest.raises(LayoutError, match=rf"cp is {cp}, which does not share out the .* it must be {allowed}$"):
        check_exchange("a2a", tp=tp, cp=cp, heads=heads, kv_heads=kv_heads, windows=True, sinks=False)
    check_exchange("all_gather", tp=tp, cp=cp, heads=heads, kv_heads=kv_heads, windows=True, sinks=False)


def test_the_first_version_that_takes_packed_sequences_is_that_of_all_ways() -> None:
    assert oldest_engine("a2a", windows=True, sinks=True) == (2, 10)
    assert oldest_engine(["a2a", "all_gather"], windows=True, sinks=False) == (2, 18)
    assert oldest_engine("a2a", windows=False, sinks=False) is None


@pytest.mark.parametrize(("family", "ways"), [("mistral", ("a2a", "all_gather")), ("gpt_oss", ("a2a",)), ("llama", ("p2p",))])
def test_a_config_says_the_way_by_a_field_of_megatron_core(family: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Of the policy; a role that has no section of its own is computed as the policy is."""
    build_folder(family, tmp_path / "model")

    def check(way: str | None, spec: str = "transformer_engine") -> None:
        tree: dict[str, Any] = {
            "run": {"name": "run"},
            "model": {"path": str(tmp_path / "model"), "layer_spec": spec},
            "policy": {"layout": {"cp": 2}, "megatron": {} if way is None else {"cp_comm_type": way}},
            "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
            "rollout": {"engine": "embedded"},
            "rewards": [{"name": "exact_number"}],
        }
        check_models(parse_config(tree))

    for way in ("p2p", "a2a", "all_gather", None):
        check(way, "reference")
        if (way or "p2p") in ways or family == "llama":
            check(way)
            continue
        with pytest.raises(ConfigError, match=rf"^policy\.layout\.cp is 2, which Transformer Engine.* = '{way or 'p2p'}'"):
            check(way)
