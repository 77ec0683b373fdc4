"""What scoring, training and an optimizer step ask of a GPU, layer by layer, with and without options; counted without a GPU.

    python benchmarks/budget.py [--only llama] [--check]

It writes benchmarks/results/budget.json. The process is told that it has a GPU (`tests/pretended_gpu.py`), so of every tensor
it is known whether it is in main memory. Models, micro-batches and the loss are those of `roofline.py`, in bfloat16.
Differences between one and two micro-batches, and between two layers and four, give what each costs. Triton, Transformer
Engine and compiled functions are not there: layers are the `reference` ones, whose operators are counted one by one. `--check`
compares with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.launches import FREE, READS, _bytes, _place  # noqa: E402
from benchmarks.measured_code import code_of  # noqa: E402
from benchmarks.roofline import KINDS, PROMPTS, RESPONSES, build_folder, micro_batch, objective, start  # noqa: E402
from megarl.observe.summary import machine, versions  # noqa: E402
from megarl.option_list import part  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "budget.json"
WHAT = ("launches", "waits", "copies", "allocations", "bytes")
"""Operators that start kernels; operators for whose result the host stands still until the GPU has done all (a wait for a
stream or an event is none); tensors copied between it and main memory without that; tensors with memory of their own; bytes
read and written."""
PARTS = ("scoring", "training", "optimizer")
"""A forward pass of a micro-batch without gradients; forward and backward; an optimizer step. Each of one layer."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"recompute": "full"},
    "adapters": {"lora": True},
}
"""Fields of `ModelOptions`."""


CELLS = [(kind, option) for kind in KINDS for option in OPTIONS]


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Counts of each of `WHAT`, and under `waits at …` where the host waits."""
    from tests.pretended_gpu import INDEXED, OnGpu, watchers

    counts: Counter[str] = Counter()

    def is_here(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not isinstance(value, OnGpu)

    def watch(function: Any, args: Any, kwargs: Any, found: Any) -> None:
        name = function._schema.name.partition("::")[2]
        waits = name in READS and isinstance(args[0], OnGpu)
        waits |= name in INDEXED and any(is_here(place) for place in args[1])
        if name in ("_to_copy", "copy_") and is_here(found) != is_here(source := args[0 if name == "_to_copy" else 1]):
            to_host = not is_here(source)
            waits |= to_host and not kwargs.get("non_blocking", len(args) > 2 and args[2])
            counts["copies"] += not waits
            counts["allocations"] += name == "_to_copy" and not to_host
        elif function.namespace == "aten":
            old = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args, kwargs)}
            counts["allocations"] += sum(tensor.untyped_storage().data_ptr() not in old for tensor in _tensors(found))
            if name not in FREE and not function.is_view:
                counts["launches"] += 1
                counts["bytes"] += _bytes(args, kwargs, found)
        if waits:
            counts["waits"] += 1
            counts[f"waits at {name} at {_place()[0]}"] += 1

    watchers.append(watch)
    try:
        yield counts
    finally:
        watchers.remove(watch)


def _tensors(*of: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_iter(of) if isinstance(value, torch.Tensor)]


def steps(folder: Path, option: str) -> dict[str, Counter[str]]:
    """Counts of a role's scoring and of its update by one micro-batch and by two."""
    from megarl.config.layout import Layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    given = {"dtype": "bfloat16"} | OPTIONS[option]
    if given.pop("lora", False):
        given["lora"] = part("lora", "weight_map", "policy.lora").Lora(rank=8, alpha=16.0)
    role = RankModel(ModelOptions(str(folder), Layout(), **given), OptimizerOptions(lr=1e-3))
    role.update([micro_batch(0)], objective())  # what is made once is made here
    found = {}
    for count in (1, 2):
        mine = [micro_batch(PROMPTS * RESPONSES * number) for number in range(count)]
        with watched() as found[f"scoring {count}"]:
            role.forward(mine)
        with watched() as found[f"update {count}"]:
            role.update(mine, objective())
    return found


def measure(kind: str, option: str) -> dict[str, dict[str, int]]:
    """Of one layer, each of `PARTS`; then of all else in a step of one micro-batch (`rest of scoring`, `rest of update`)."""
    of: dict[int, dict[str, Counter[str]]] = {}
    for layers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            build_folder(KINDS[kind], layers, Path(folder))
            of[layers] = steps(Path(folder), option)

    def layer(what: str) -> Counter[str]:
        return Counter({name: (of[4][what][name] - of[2][what][name]) // 2 for name in of[4][what]})

    one, two = layer("update 1"), layer("update 2")
    scoring, twice = layer("scoring 1"), layer("scoring 2")
    training = Counter({name: two[name] - one[name] for name in two})
    found = {
        "scoring": Counter({name: twice[name] - scoring[name] for name in twice}),
        "training": training,
        "optimizer": Counter({name: one[name] - training[name] for name in one}),
        "rest of scoring": Counter({name: of[2]["scoring 1"][name] - 2 * scoring[name] for name in scoring}),
        "rest of update": Counter({name: of[2]["update 1"][name] - 2 * one[name] for name in one}),
    }
    return {name: {what: count for what, count in sorted(counts.items()) if count} for name, counts in found.items()}


def differences(found: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """What is not what the committed table has: launches, waits, with their places, and copies; and allocations that grew.

    Allocations vary by a few: autograd adds gradients in place where nobody else holds them at that moment.
    """
    problems = []
    for cell, parts in found.items():
        for name, now in parts.items():
            then = kept[cell][name]
            for what in ("launches", "waits", "copies", "allocations"):
                more = now.get(what, 0) - then.get(what, 0)
                if more > 8 if what == "allocations" else more:
                    places = ", ".join(f"{count} x {at}" for at, count in now.items() if at.startswith(f"{what} at "))
                    problems.append(f"{cell}: {what} of {name} were {then.get(what, 0)}, are {now.get(what, 0)}: {places}")
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="kinds of layers (default: all)")
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    given = parser.parse_args(arguments)
    from tests.pretended_gpu import the_gpu

    torch.set_num_threads(1)
    start("gloo")
    kept = json.loads(given.out.read_text())["parts"] if given.out.exists() else {}
    problems = []
    for kind, option in CELLS:
        if kind not in (given.only or KINDS):
            continue
        name = f"{kind}, {option}"
        with the_gpu():
            found = measure(kind, option)
        print(f"{name}: {json.dumps(found)}", flush=True)
        if given.check:
            problems += differences({name: found}, kept)
            continue
        kept[name] = found
        record = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "machine": machine(), "versions": versions()}
        record |= {"date": date.today().isoformat(), "code": code_of("budget"), "parts": kept}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
