"""Rows of tables of what options add to a layer (benchmarks/results/budget.json), and change of an engine's log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from results import Figures, result

HEAD = ("layers of", "option", "launches", "waits", "allocations", "MB", "launches of the rest", "waits of the rest")


def budget_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head of the table and its rows; numbers of several parts of a step have strokes between them."""
    return HEAD, [*_rows(result("budget")["parts"])]


def _rows(cells: Figures) -> Iterator[tuple[str, ...]]:
    for name, parts in cells.items():
        kind, option = name.rsplit(", ", 1)
        layer = [parts[part] for part in ("scoring", "training", "optimizer")]
        rest = [parts[f"rest of {part}"] for part in ("scoring", "update")]
        numbers = [_numbers(layer, what) for what in ("launches", "waits", "allocations")]
        megabytes = " / ".join(f"{one['bytes'] / 1e6:,.0f}" for one in layer)
        yield (kind, option, *numbers, megabytes, *(_numbers(rest, what) for what in ("launches", "waits")))


def _numbers(parts: list[Figures], what: str) -> str:
    return " / ".join(str(one.get(what, 0)) for one in parts)


def precision_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and rows of how far engines of each precision are from the trainer."""
    rows = []
    for name, one in result("engine_precisions")["precisions"].items():
        mean, most = (f"{value:.1e}" if value < 1e-3 else f"{value:.2g}" for value in (one["mean_abs"], one["p99"]))
        rows.append((name, mean, most, f"{one['k3']:.1e}"))
    return ("engine", "mean difference", "of 99 % at most", "k3"), rows
