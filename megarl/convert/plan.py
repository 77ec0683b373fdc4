"""The files that a conversion writes, decided before it writes anything: every file, its size, and where each tensor
lies in it.

Work is cut into tasks, one tensor each, that no two processes share and whose bytes depend on nothing but the source and the
options. So any number of workers and machines may run them in any order, and again after a kill.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.format.dist_format import COMMON, StoredChunk, StoredKey, empty_object, write_metadata
from megarl.checkpoint.format.naming import Chunk, chunks_of, stage_of_layers, stored_rows
from megarl.checkpoint.format.torch_save_format import frame
from megarl.config.layout import Layout
from megarl.convert.blocks import BLOCK_BYTES, Extent, Matrix, Part, Task, rows_and_cols
from megarl.convert.sources import HF_SUBFOLDER, ConversionSource
from megarl.errors import CheckpointError
from megarl.models.check_layouts import read_shape
from megarl.models.fused_experts import ExpertPlace
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import without_prediction_layers
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, copy_companions
from megarl.models.packings import Copy, padded_vocab
from megarl.models.safetensors_layout import header_and_entries
from megarl.models.weight_formats import WeightFormat, format_called
from megarl.models.weight_map import PREDICTION
from megarl.models.weight_tensors import kept_dtype
from megarl.observe.record_lines import object_line

RECORD = "megarl_conversion.json"
"""File of a converted folder that says where it came from, its layout, and the checksum of every tensor written."""
MAX_SHARD_BYTES = 5 * 2**30
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ALIGNMENT = 64

Fixed = tuple[str, int, bytes]
"""(file, byte, content) of bytes that do not come from the source: headers and frames."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion: `tasks` fill `files` (sizes by name); `fixed` are each task's own headers; `finish` writes the rest."""

    kind: str
    source: ConversionSource
    options: dict[str, Any]
    files: dict[str, int]
    tasks: list[Task]
    fixed: list[tuple[Fixed, ...]]
    finish: Callable[[Path, Mapping[str, str]], None] = field(repr=False)

    @property
    def bytes_written(self) -> int:
        """Bytes of all files that hold tensors."""
        return sum(self.files.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read: a source's own, each once."""
        return sum(part.rows * part.cols * part.source.dtype.itemsize for part in self._parts() if part.source)

    @property
    def largest_tensor_bytes(self) -> int:
        """Bytes of the largest tensor that is written."""
        return max(task.nbytes for task in self.tasks)

    @property
    def block_bytes(self) -> int:
        """Bytes of tensors that one worker holds at most: a block as it is stored, converted, and a box cut out of it."""
        targets = [task.target for task in self.tasks]
        widest = 4 * max(matrix.width * (matrix.format.rows_per_scale if matrix.format else 1) for matrix in targets)
        whole = max((part.source.nbytes for part in self._parts() if part.transposed and part.source), default=0)
        return 4 * max(BLOCK_BYTES, widest) + whole

    def _parts(self) -> Iterator[Part]:
        return (part for task in self.tasks for part in task.parts)


def gib(nbytes: float) -> str:
    """Bytes in GiB, in MiB below one."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def plan_dist(kind: str, source: ConversionSource, layout: Layout, dtype: str | None) -> ConversionPlan:
    """Write a distributed checkpoint for `layout`, each rank's chunks one after another in a file of its own.

    `dtype` is a key of `DTYPES`, or None to keep the source's.

    Raises:
        LayoutError: the layout does not divide the model.
        ModelError, CheckpointError: the source is incomplete.
    """
    names = source.names
    model = read_shape("the model", str(source.companions))
    # sequence parallelism splits no weights, and training experts under tensor parallelism needs it
    replace(layout, sequence_parallel=layout.tp > 1).check_model(**model.layout_sizes)
    stages = stage_of_layers(layout, names.weight_map.num_layers)
    padded = padded_vocab(names.vocab_size, layout.tp)
    none = empty_object()
    ends: dict[str, int] = {_file_of(0): len(none)}
    laid: dict[str, _KeyLayout] = {}
    tasks, fixed = [], []
    for rule in names.weight_map.bound_rules():
        shape = names.shape(rule, padded)
        rows, cols = rows_and_cols(shape)
        parts, stored = source.param_parts(rule, rows)
        place = names.place(rule)
        target_dtype = stored if dtype is None else kept_dtype(rule) or DTYPES[dtype]
        sections = stored_rows(rule, rows)
        extents, frames, chunk_names = [], [], []
        for chunk in chunks_of(rule, rows, cols, layout, names.weight_map, stages):
            section = next(part for part in reversed(sections) if part.first <= chunk.row)
            keys = tuple(key + section.suffix for key in place.keys)
            own_shape = (section.rows, *shape[1:])
            key = laid.setdefault(keys[0], _KeyLayout(target_dtype, (*place.prefix_sizes, *own_shape), keys))
            offsets, sizes = _box(place.prefix, own_shape, replace(chunk, row=chunk.row - section.first))
            around = frame(key.dtype, sizes)
            file = _file_of(chunk.rank)
            start = ends.get(file, 0) + -ends.get(file, 0) % _ALIGNMENT
            ends[file] = start + around.length
            key.chunks.append(StoredChunk(offsets, sizes, file, start, around.length))
            extents.append(Extent(file, start + len(around.prefix), chunk.row, chunk.rows, chunk.col, chunk.cols))
            frames += [(file, start, around.prefix), (file, ends[file] - len(around.suffix), around.suffix)]
            chunk_names.append(f"{keys[0]}{list(offsets)}")
        tasks.append(Task(Matrix(place.keys[0], key.dtype, rows, cols, tuple(extents)), parts, tuple(chunk_names)))
        fixed.append(tuple(frames))

    def finish(folder: Path, checksums: Mapping[str, str]) -> None:
        with (folder / _file_of(0)).open("r+b") as file:
            file.write(none)
        keys = {name: StoredKey(k.dtype, k.shape, tuple(k.chunks)) for k in laid.values() for name in k.names}
        write_metadata(folder, keys, dict.fromkeys(names.extra_states(), (_file_of(0), 0, len(none))))
        torch.save({}, folder / COMMON)
        config = folder / HF_SUBFOLDER
        config.mkdir(exist_ok=True)
        (config / "config.json").write_text(json.dumps(source.hf_config, indent=2) + "\n")
        copy_companions(source.companions, config, source.template)
        _write_record(folder, kind, source, options, checksums)

    options = {"layout": _stated(layout), "dtype": dtype}
    return ConversionPlan(kind, source, options, ends, tasks, fixed, finish)


def plan_hf(kind: str, source: ConversionSource, dtype: str | None, max_shard_bytes: int = MAX_SHARD_BYTES) -> ConversionPlan:
    """Write a Hugging Face folder. `dtype` is a key of `DTYPES`, the name of a format, or None to keep the source's.

    Raises:
        ModelError, CheckpointError: the source is incomplete, or the format does not go with the model.
    """
    outlined = list(_hf_outputs(source, dtype))
    shards: list[list[_Tensor]] = [[]]
    shard_bytes = 0
    for tensor in outlined:
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += tensor.nbytes
    files: dict[str, int] = {}
    tasks: list[Task] = []
    fixed: list[tuple[Fixed, ...]] = []
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header, entries = header_and_entries((name, dtype, shape) for tensor in shard for name, dtype, shape in tensor.stored())
        files[file] = len(header) + sum(entry.nbytes for entry in entries.values())
        for tensor in shard:
            matrices = []
            for name, stored_dtype, shape in tensor.stored():
                rows, cols = tensor.rows_and_cols if tensor.format is None else rows_and_cols(shape)
                extent = Extent(file, entries[name].offset, 0, rows, 0, cols)
                matrices.append(Matrix(name, stored_dtype, rows, cols, (extent,)))
                file_of[name] = file
            target = replace(matrices[0], format=tensor.format, beside=tuple(matrices[1:]))
            fixed.append(((file, 0, header),) if tensor is shard[0] else ())
            tasks.append(Task(target, tensor.parts, tuple(matrix.name for matrix in matrices)))

    def finish(folder: Path, checksums: Mapping[str, str]) -> None:
        if len(shards) > 1:
            total = sum(task.nbytes for task in tasks)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config = _exported_config(source, outlined, _format_of(dtype))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companions(source.companions, folder, source.template)
        _write_record(folder, kind, source, options, checksums)

    options = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
    return ConversionPlan(kind, source, options, files, tasks, fixed, finish)


@dataclass
class _KeyLayout:
    """A key while its chunks are laid out."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    names: tuple[str, ...]
    chunks: list[StoredChunk] = field(default_factory=list)


@dataclass(frozen=True)
class _Tensor:
    """A Hugging Face tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rows_of_last_axis: bool = False
    """Whether the parts' columns are its last axis, and not all but its first: experts that are stored together."""
    format: WeightFormat | None = None

    @property
    def rows_and_cols(self) -> tuple[int, int]:
        """The matrix whose rows the parts are."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.rows_of_last_axis else rows_and_cols(self.shape)

    def stored(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of what the file holds for it: itself, or what its format stores in its place."""
        if self.format is None:
            return [(self.name, self.dtype, self.shape)]
        parts = self.format.parts(Copy(self.shape))
        return [(self.name + part.suffix, getattr(torch, part.dtype), part.packing.hf_shapes[0]) for part in parts]

    @property
    def nbytes(self) -> int:
        """Bytes of all of that."""
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self.stored())


def _format_of(dtype: str | None) -> WeightFormat | None:
    return None if dtype is None or dtype in DTYPES else format_called(dtype, f"--dtype {dtype}")


def _hf_outputs(source: ConversionSource, dtype: str | None) -> Iterator[_Tensor]:
    fused, format = source.fused, _format_of(dtype)
    if format is not None:
        format.check_model(source.hf_config)
    together: dict[str, list[Part]] = defaultdict(list)  # of several stored tensors, whose parts may come in turns
    copies: dict[str, list[str]] = {}
    for copy, original in source.names.weight_map.copies:
        copies.setdefault(original, []).append(copy)
    for rule in source.names.weight_map.bound_rules():
        for name, shape, parts, stored in source.hf_parts(rule):
            target_dtype = stored if dtype is None else kept_dtype(rule) or DTYPES.get(dtype, torch.bfloat16)
            place = fused.place(name) if fused is not None else None
            if format is not None and format.applies_to(rule.megatron_name):
                yield from (
                    _Tensor(output_name, target_dtype, shape, parts, format=format)
                    for output_name in (name, *copies.get(name, ()))
                )
            elif place is None or fused is None:
                yield from (_Tensor(output_name, target_dtype, shape, parts) for output_name in (name, *copies.get(name, ())))
            elif isinstance(fused, FusedRows):
                together[place.stored] += parts
                if place.stop == fused.rows(place.stored):
                    stack, joined = fused.is_stack(place.stored), tuple(together.pop(place.stored))
                    shape = fused.shape(place.stored)
                    yield _Tensor(place.stored, target_dtype, shape, joined, rows_of_last_axis=stack)
            elif isinstance(place, ExpertPlace) and place.start == 0:  # up is beside gate, in the same matrix
                [part] = parts
                alternating = part.step < place.step  # not yet in the source
                rows = part.cols if fused.transposed else fused.shape(place.stored)[1]
                transposed = part.transposed != fused.transposed
                matrices = together[place.stored]
                matrices.append(Part(part.source, 0, rows, transposed, alternating=alternating))
                if len(matrices) == fused.experts:
                    shape, joined = fused.shape(place.stored), tuple(together.pop(place.stored))
                    yield _Tensor(place.stored, target_dtype, shape, joined, rows_of_last_axis=True)


def _box(prefix: tuple[int, ...], shape: tuple[int, ...], chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of a chunk of a parameter of this shape in its key's tensor."""
    rest = shape[2:]
    own_sizes = (chunk.rows, *shape[1:]) if rest else (chunk.rows, chunk.cols)
    offsets = (*prefix, *(chunk.row, chunk.col)[: len(shape)], *(0 for _ in rest))
    return offsets, (*(1 for _ in prefix), *own_sizes[: len(shape)])


def _exported_config(source: ConversionSource, tensors: Iterable[_Tensor], format: WeightFormat | None) -> dict[str, Any]:
    """The source's config, with the dtype that most bytes have, and what says how weights are quantised."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    weight_map = source.names.weight_map
    has_prediction = any(rule.megatron_name.startswith(PREDICTION) for rule in weight_map.rules)
    config = dict(source.hf_config) if has_prediction else without_prediction_layers(source.hf_config)
    field_name = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[field_name] = str(max(sizes, key=lambda found: sizes[found])).removeprefix("torch.")
    if format is None:
        return config
    return config | {"quantization_config": format.quantization_config(source.names.weight_map)}


def _write_record(
    folder: Path, kind: str, source: ConversionSource, options: dict[str, Any], checksums: Mapping[str, str]
) -> None:
    record = {"made_by": f"megarl convert {kind}", "source": str(source.path), **options, "xxh3_64": dict(checksums)}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Read back what is noted of a converted folder: `xxh3_64` by name of tensor, `made_by`, `source`, perhaps `layout`.

    Raises:
        CheckpointError: it is damaged, or of something else.
        FileNotFoundError: there is none.
    """
    try:
        record = object_line((folder / RECORD).read_bytes())
        checksums, layout = record.get("xxh3_64"), record.get("layout")
        if not isinstance(checksums, dict) or not all(isinstance(checksum, str) for checksum in checksums.values()):
            raise ValueError("it has no checksums")
        if not isinstance(layout, dict | None):
            raise ValueError("its layout is no object")
        return record
    except ValueError as error:
        raise CheckpointError(f"'{folder / RECORD}' is damaged or not of a conversion ({error})") from None


def _stated(layout: Layout) -> dict[str, Any]:
    return {name: value for name, value in vars(layout).items() if value != getattr(Layout(), name)}


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"
