"""`megarl convert` and its actions; tools/checkpoint_convert runs them alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from megarl.config.layout import Layout
from megarl.errors import ConfigError, counted, nearest
from megarl.option_list import functions, part
from megarl.system.safe_console import SafeConsole

DIFFERENT = 1
MOST_SHOWN = 20


def add_convert(commands: Any) -> None:
    """Add the group `convert` to the subparsers `commands`."""
    group = commands.add_parser(
        "convert",
        help="move weights between Hugging Face folders and Megatron distributed checkpoints",
        description="Move weights between Hugging Face folders and Megatron distributed checkpoints, on a machine without a "
        "GPU. An interrupted command is continued by the same command.",
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    taking_in = actions.add_parser("import", help="Hugging Face folder to distributed checkpoint", description=_import.__doc__)
    taking_in.add_argument(
        "source", metavar="HF", help="Hugging Face folder (bf16, fp32, FP8 in blocks, MXFP8, or INT4 experts)"
    )
    giving_out = actions.add_parser("export", help="distributed checkpoint to Hugging Face folder", description=_export.__doc__)
    giving_out.add_argument(
        "source", metavar="DIST", help="distributed checkpoint, such as <run>/checkpoints/step_000010/policy"
    )
    resharding = actions.add_parser("reshard", help="distributed checkpoint for another layout", description=_reshard.__doc__)
    resharding.add_argument("source", metavar="DIST", help="distributed checkpoint")
    for action in (taking_in, resharding):
        action.add_argument("--layout", metavar="tp=4,pp=2", default="", help="sizes of the layout (default: one rank)")
    for action, dtypes, run in (
        (taking_in, ("bf16", "fp32"), _import),
        (giving_out, ("bf16", "fp32", "fp8-block", "mxfp8", "int4-32", "int4-64", "int4-128"), _export),
        (resharding, ("bf16", "fp32"), _reshard),
    ):
        action.add_argument("target", metavar="OUT", help="folder to write; it appears when it is complete")
        action.add_argument("--dtype", choices=dtypes, help="dtype of the weights (default: as they are stored)")
        _add_work_options(action)
        action.set_defaults(run=run)

    added = [add_action(actions) for add_action in functions("convert_action", "add_action")]

    merging = actions.add_parser("merge", help="merge a PEFT adapter into its model", description=_merge.__doc__)
    merging.add_argument("--base", metavar="FOLDER", required=True, help="Hugging Face folder of the model")
    merging.add_argument("--adapter", metavar="FOLDER", required=True, help="PEFT folder of low-rank adapters")
    merging.add_argument("--out", metavar="FOLDER", required=True, help="folder to write; it appears when it is complete")
    merging.set_defaults(run=_merge)
    for action in (*added, merging):
        action.set_defaults(run=_writing(action.get_default("run")))

    verify = actions.add_parser("verify", help="compare two folders, or one with its own record", description=_verify.__doc__)
    verify.add_argument("left", metavar="A", help="Hugging Face folder or distributed checkpoint")
    verify.add_argument(
        "right", metavar="B", nargs="?", help="second folder (default: the checksums in A's megarl_conversion.json)"
    )
    verify.add_argument(
        "--prompts", metavar="FILE", type=Path, help="also compare logits: a prompt a line, text or JSON token ids"
    )
    verify.add_argument("--checksums", action="store_true", help="print the checksums of every tensor")
    verify.set_defaults(run=_verify)
    for action in (giving_out, resharding, verify):
        action.add_argument(
            "--hf-config", metavar="FOLDER", help="folder of config.json and tokenizer (default: the checkpoint's own)"
        )

    inspect = actions.add_parser("inspect", help="what a folder of weights is", description=_inspect.__doc__)
    inspect.add_argument("path", metavar="FOLDER", help="Hugging Face folder or distributed checkpoint")
    inspect.add_argument("--keys", action="store_true", help="list every tensor")
    inspect.set_defaults(run=_inspect)
    for action in (taking_in, giving_out, resharding, *added, merging, verify, inspect):
        action.add_argument("--architecture", metavar="FILE.py:NAME", help="model family of your own (docs/add_a_model.md)")
        action.set_defaults(run=_knowing(action.get_default("run")))


def _knowing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run`, once the user's own architecture is known."""

    def known(arguments: argparse.Namespace) -> int:
        from megarl.models.registry import use_architecture

        use_architecture(arguments.architecture)
        return run(arguments)

    return known


def _writing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run`, while no other command writes its target."""

    def alone(arguments: argparse.Namespace) -> int:
        from megarl.runs.owner import writing

        with writing(arguments.out if "out" in arguments else arguments.target):
            return run(arguments)

    return alone


def _add_work_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes (default: %(default)s)")
    action.add_argument(
        "--shard",
        metavar="i/n",
        default="0/1",
        help="convert only part i (from 0) of n; other machines convert the other parts into the same OUT",
    )
    action.add_argument("--dry-run", action="store_true", help="show what would be read and written; needs only config.json")
    action.add_argument("--rate", metavar="GB/S", type=float, help="disk rate for --dry-run (default: measured here)")


def _import(arguments: argparse.Namespace) -> int:
    """Write a megatron-core distributed checkpoint of a Hugging Face model, each rank's part in a file of its own."""
    from megarl.convert.plan import plan_dist
    from megarl.convert.sources import open_hf
    from megarl.models.from_hub import model_in

    layout = parse_layout(arguments.layout)
    source = open_hf(model_in(arguments.source, "HF"), config_only=arguments.dry_run)
    return _carry_out(plan_dist("import", source, layout, arguments.dtype), arguments)


def _export(arguments: argparse.Namespace) -> int:
    """Write a Hugging Face folder, with tokenizer and chat template, of the weights in a distributed checkpoint.

    Of a run that trains adapters it is a PEFT folder.
    """
    from megarl.convert.plan import plan_hf

    source = _open_dist(arguments, adapters=True)
    if source.holds_adapters:
        from megarl.runs.owner import writing

        with writing(arguments.target):
            written = part("lora", "convert", f"'{arguments.source}'").export_adapters(source, arguments.target)
        print(f"{arguments.target}: {written:,} adapters, as a PEFT folder")
        return 0
    return _carry_out(plan_hf("export", source, arguments.dtype), arguments)


def _reshard(arguments: argparse.Namespace) -> int:
    """Write the weights in a distributed checkpoint again, for another layout. Optimizer state is left out."""
    from megarl.convert.plan import plan_dist

    layout = parse_layout(arguments.layout)
    return _carry_out(plan_dist("reshard", _open_dist(arguments), layout, arguments.dtype), arguments)


def _merge(arguments: argparse.Namespace) -> int:
    """Write a model with low-rank adapters (LoRA) added to its weights; they keep their dtypes."""
    from megarl.models.from_hub import model_in

    merge = part("lora", "merge", "megarl convert merge")
    layers = merge.merge_adapters(model_in(arguments.base, "--base"), arguments.adapter, arguments.out)
    print(f"{layers:,} adapters of {arguments.adapter} merged into {arguments.out}")
    return 0


def _open_dist(arguments: argparse.Namespace, *, adapters: bool = False) -> Any:
    from megarl.checkpoint.format.dist_format import is_dist_checkpoint
    from megarl.convert.sources import open_dist
    from megarl.runs.folders import weights_in

    weights = weights_in(arguments.source)
    config_only = arguments.dry_run and not is_dist_checkpoint(weights)
    return open_dist(weights, arguments.hf_config, config_only=config_only, adapters=adapters)


def _carry_out(plan: Any, arguments: argparse.Namespace) -> int:
    from megarl.convert.inspect import describe, measure_rate
    from megarl.convert.plan import gib
    from megarl.convert.run import run_plan
    from megarl.observe.progress import aligned

    index, count = parse_shard(arguments.shard)
    if arguments.workers < 1:
        raise ConfigError(f"--workers is {arguments.workers}; it must be at least 1")
    if arguments.dry_run:
        rate = measure_rate(Path(arguments.target).absolute()) if arguments.rate is None else arguments.rate * 1e9
        if rate <= 0:
            raise ConfigError(f"--rate is {arguments.rate}; it must be more than 0")
        print("\n".join(aligned(describe(plan, rate, shards=count, rate_is_measured=arguments.rate is None))))
        return 0
    with _progress(f"{plan.kind} {arguments.target}") as progress:
        outcome = run_plan(plan, Path(arguments.target), workers=arguments.workers, shard=(index, count), progress=progress)
    rate_text = f"{outcome.bytes_written / max(1e-9, outcome.seconds) / 1e9:.2f} GB/s"
    reused = f", {gib(outcome.bytes_kept)} kept from before" if outcome.bytes_kept else ""
    print(f"{gib(outcome.bytes_written)} written in {outcome.seconds:.1f} s ({rate_text}){reused}")
    if state := plan.source.training_state():
        entries = counted(len(state), "entry", "entries")
        print(f"training state ({entries}, such as {state[0]}) is no part of a model: it stays in {arguments.source}")
    if left_out := plan.source.left_out():
        print(f"left out, because they are no weights of the model: {_listed(left_out)}")
    if outcome.finished:
        print(f"{arguments.target} is complete")
    else:
        print(f"shard {index} of {count} is done; {arguments.target} waits for {', '.join(map(str, outcome.waiting_for))}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Compare names, shapes, dtypes and every value of two folders; with one folder, what it holds with what was written to it.
    Exit code 1 if they differ."""
    from megarl.convert.plan import gib
    from megarl.convert.verify import check_record, compare, open_any
    from megarl.runs.folders import weights_in

    if arguments.right is None and arguments.prompts is not None:
        raise ConfigError("--prompts compares two folders, but only one is named")
    left = open_any(weights_in(arguments.left), arguments.hf_config)
    right = open_any(weights_in(arguments.right), arguments.hf_config) if arguments.right is not None else None
    with _progress("verify") as progress:
        tally = compare(left, right, progress) if right is not None else check_record(left, progress)
    if right is not None and arguments.prompts is not None:
        from megarl.convert.logits import compare_logits

        report = compare_logits(left, right, arguments.prompts)
        print(
            f"logits of {report.tokens} tokens, megatron-core against transformers in float32: max abs difference "
            f"{report.largest_difference:.3g}, logits up to {report.largest_logit:.3g}, same best token {report.same_best:.1%}"
        )
        if not report.agrees:
            tally.differences.append(f"logits differ by {report.largest_difference:.3g}")
    if arguments.checksums:
        for name, (first, second) in tally.checksums.items():
            print(f"{first} {second} {name}")
    for warning in tally.warnings[:MOST_SHOWN]:
        print(f"warning: {warning}")
    for difference in tally.differences[:MOST_SHOWN]:
        print(f"differs: {difference}")
    if len(tally.differences) > MOST_SHOWN:
        print(f"differs: {len(tally.differences) - MOST_SHOWN} more")
    what = "same" if not tally.differences else f"{len(tally.differences)} differences"
    print(f"{what}: {tally.tensors:,} tensors, {gib(tally.nbytes)} compared")
    return DIFFERENT if tally.differences else 0


def _inspect(arguments: argparse.Namespace) -> int:
    """Say what a folder of weights is: model, layout, dtypes, bytes."""
    from megarl.convert.inspect import inspect
    from megarl.convert.plan import gib
    from megarl.observe.progress import aligned
    from megarl.runs.folders import weights_in

    rows, tensors = inspect(weights_in(arguments.path))
    print("\n".join(aligned(rows)))
    if arguments.keys:
        width = max((len(tensor.name) for tensor in tensors), default=0)
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces = f"{tensor.pieces} chunks" if tensor.pieces > 1 else ""
            print(f"{tensor.name:<{width}}  {dtype:<13} {gib(tensor.nbytes):>12}  {list(tensor.shape)}  {pieces}".rstrip())
    return 0


def parse_layout(text: str) -> Layout:
    """The layout that `tp=4,pp=2` says.

    Raises:
        ConfigError: a name is unknown or comes twice, or a size is no integer.
        LayoutError: the sizes do not fit each other.
    """
    known = [field.name for field in fields(Layout) if field.name != "sequence_parallel"]
    sizes: dict[str, int] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = item.partition("=")
        if name not in known:
            raise ConfigError(f"--layout has '{item}'; it must set only {', '.join(known)}{nearest(name, known)}")
        if name in sizes or not value.isdigit():
            what = "comes twice" if name in sizes else f"is {value!r}; it must be a whole number"
            raise ConfigError(f"--layout: {name} {what}")
        sizes[name] = int(value)
    return Layout(**sizes)  # type: ignore[arg-type]


def parse_shard(text: str) -> tuple[int, int]:
    """(index, count) of `0/3`.

    Raises:
        ConfigError: it is no such pair.
    """
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--shard is '{text}'; it must be i/n with i from 0 to n - 1, such as 0/3")
    return int(index), int(count)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere. It starts with the first call: workers are forked before it has a thread."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=SafeConsole(stderr=True), transient=True)
    task = bar.add_task(what, total=None, start=False)

    def show(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
