"""Ways of context-parallel ranks to exchange tokens under Transformer Engine's attention, and which models each way computes.

megatron-core's field `cp_comm_type` says which way; megarl's streams are packed. The rules are those of Transformer Engine
2.20: `attn_forward_func_with_cp` in dot_product_attention/context_parallel.py, `get_attention_backend` in utils.py beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.layout import closest, divisors
from megarl.errors import LayoutError

DEFAULT = "p2p"
"""The way where no config says one."""
OF_WINDOWS = {"a2a": (2, 10), "all_gather": (2, 18)}
"""The ways that compute windows, and the first version of Transformer Engine in which each takes packed sequences."""
OF_SINKS = {"a2a": (2, 10)}
"""The same of sinks. With these packed sequences need cuDNN 9.18, too."""
NOT_ARRANGED = "a2a+p2p"
"""It needs groups within groups of context-parallel ranks, which megarl does not make."""


def check_exchange(
    ways: str | Sequence[str] | None, *, tp: int, cp: int, heads: int, kv_heads: int, windows: bool, sinks: bool
) -> None:
    """Raise LayoutError where Transformer Engine's attention cannot compute a model over `cp` ranks by these `ways`.

    `ways` is `cp_comm_type`: one for all layers, or one for each. `heads` and `kv_heads` are those of the model.
    """
    if cp == 1:
        return
    asked, fit = ways_of(ways), OF_SINKS if sinks else OF_WINDOWS if windows else None
    by = f"by megatron.cp_comm_type = {', '.join(map(repr, asked))}"
    if NOT_ARRANGED in asked:
        reason = f"megarl does not arrange {by}: it makes no groups within groups of ranks"
        raise LayoutError.of("cp", cp, reason, allowed="1, or set megatron.cp_comm_type to 'p2p', 'a2a' or 'all_gather'")
    if fit is not None and not {*asked} <= fit.keys():
        reason = (
            f"Transformer Engine's attention does not support for the {'sinks' if sinks else 'sliding windows'} of this model"
        )
        others = f"set megatron.cp_comm_type to {' or '.join(map(repr, fit))}, or model.layer_spec to 'reference'"
        raise LayoutError.of("cp", cp, f"{reason} {by}", allowed=f"1, or {others}")
    if "a2a" in asked:
        _check_heads(tp, cp, heads, kv_heads)


def oldest_engine(ways: str | Sequence[str] | None, *, windows: bool, sinks: bool) -> tuple[int, int] | None:
    """The first version of Transformer Engine that computes such packed sequences by these ways; None: any does."""
    if not (windows or sinks):
        return None
    return max((OF_WINDOWS[way] for way in ways_of(ways) if way in OF_WINDOWS), default=None)


def ways_of(ways: str | Sequence[str] | None) -> list[str]:
    """The different ones among the ways of all layers."""
    return sorted({ways or DEFAULT} if ways is None or isinstance(ways, str) else {*ways})


def _check_heads(tp: int, cp: int, heads: int, kv_heads: int) -> None:
    """By a2a each rank gets whole heads of those of a tensor rank, an even number of which is shared out."""
    of_rank = [max(1, count // tp) for count in (heads, kv_heads)]
    fit = [size for size in divisors(of_rank[1]) if of_rank[0] % size == 0]
    if any(count % 2 for count in of_rank):
        fit = [1]
    if cp not in fit:
        reason = (
            f"does not share out the {of_rank[0]} query heads and {of_rank[1]} KV heads of a tensor rank in even numbers, as "
            "megatron.cp_comm_type = 'a2a' does"
        )
        raise LayoutError.of("cp", cp, reason, allowed=closest(fit, cp))
