"""The two ends that a conversion reads: a Hugging Face folder and a distributed checkpoint, each as matrices by name.

Both are checked whole, by headers and metadata, before anything is written. Either may be a config alone: then its matrices
have sizes and no place, which is all that a dry run needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.format.dist_format import DistFolder, StoredChunk
from megarl.checkpoint.format.naming import (
    ModelNames,
    Place,
    StoredRows,
    default_dtype,
    is_vocabulary,
    model_names,
    stored_rows,
    without_quantization,
)
from megarl.config.yaml_tree import read_yaml, tree_leaves
from megarl.convert.blocks import Extent, Matrix, Part, rows_and_cols
from megarl.errors import CheckpointError, ConfigError, ModelError
from megarl.models.adapters import IN_CHECKPOINTS
from megarl.models.chat_template_file import template_of_run
from megarl.models.fused_experts import BLOCKS, SCALES, FusedExperts
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import without_mxfp4, without_prediction_layers
from megarl.models.hf_folder import HFFolder, fused_of
from megarl.models.packings import SCALE_SUFFIX, Copy
from megarl.models.registry import load_hf_config, sequence_classifier
from megarl.models.safetensors_layout import Entry
from megarl.models.vision import TOWER
from megarl.models.weight_formats import WeightFormat, mxfp4_in, stored_format
from megarl.models.weight_map import PREDICTION, BoundRule, WeightMap
from megarl.models.weight_tensors import kept_dtype

HF_SUBFOLDER = "hf"
"""Where a distributed checkpoint keeps config.json, tokenizer and the like."""
_OUTPUT = "output_layer.weight"
_MODEL_KEYS = ("decoder.", "embedding.", "output_layer.", PREDICTION, TOWER)

_TRAINING_KEYS = ("optimizer", "chained_", "opt_param_scheduler", "rng_state", "rerun_state", "iteration", "args")
"""Beginnings of the keys of training state in checkpoints of megarl and of megatron-core."""


@dataclass(frozen=True)
class _Source:
    """Fields of both sources. `companions` is the folder of config.json, tokenizer and the like."""

    path: Path
    hf_config: dict[str, Any]
    names: ModelNames
    companions: Path

    @property
    def template(self) -> Path | None:
        """The chat template of the run that a checkpoint is of, where it is another than in `companions`."""
        return None

    @property
    def fused(self) -> FusedExperts | FusedRows | None:
        """Tensors that Hugging Face folders of the model store together, if any."""
        return fused_of(self.hf_config)


@dataclass(frozen=True)
class HFSource(_Source):
    """A Hugging Face folder: the `matrices` in it, by name, and, by the weight's name, those that are `quantised`.

    `experts` are the matrices that are stored together in one of `matrices`, by tensor and expert.
    """

    matrices: dict[str, Matrix]
    experts: dict[tuple[str, int], Matrix] = field(default_factory=dict)
    quantised: dict[str, Matrix] = field(default_factory=dict)

    def param_parts(self, rule: BoundRule, rows: int) -> tuple[tuple[Part, ...], torch.dtype]:
        """The `rows` rows of a parameter as one tensor-parallel rank would hold it, and their dtype."""
        first, dtype = self._part(rule.hf_names[0], 0, rows)
        if rule.tp_axis == 1:
            return (first,), dtype
        pieces = rule.pieces(0, 1, rows if is_vocabulary(rule) else None)
        of = ((piece.hf_name, piece.start, piece.stop - piece.start) for piece in pieces)
        return tuple(self._part(name, start, n)[0] if name else Part(None, start, n) for name, start, n in of), dtype

    def hf_parts(self, rule: BoundRule) -> Iterator[tuple[str, tuple[int, ...], tuple[Part, ...], torch.dtype]]:
        """(name, shape, rows, dtype) of each Hugging Face tensor that a parameter holds."""
        for name, shape in rule.hf_shapes.items():
            part, dtype = self._part(name, 0, rows_and_cols(shape)[0])
            yield name, shape, (part,), dtype

    def _part(self, name: str, start: int, rows: int) -> tuple[Part, torch.dtype]:
        """Rows of a tensor, and their dtype."""
        fused = self.fused
        if isinstance(fused, FusedRows) and (within := fused.place(name)) is not None:
            matrix = self.matrices[within.stored]
            return Part(matrix, within.start + start, rows), matrix.dtype
        place = fused.place(name) if isinstance(fused, FusedExperts) and self.experts else None
        if not isinstance(fused, FusedExperts) or place is None:
            matrix = self.quantised.get(name) or self.matrices[name]
            return Part(matrix, start, rows), _value_dtype(matrix)
        matrix = self.experts[place.stored, place.expert]
        if matrix.format is not None:
            transposed = False
        elif place.is_bias:
            transposed = not fused.check(place.stored, (fused.experts, matrix.rows))
        else:
            transposed = fused.check(place.stored, (fused.experts, matrix.rows, matrix.cols))
        return Part(matrix, place.start + start * place.step, rows, transposed, place.step), _value_dtype(matrix)

    def files(self) -> list[Path]:
        """Every file that is read."""
        names = {extent.file for matrix in self.matrices.values() for extent in matrix.extents}
        return [self.path / name for name in sorted(names)]

    def left_out(self) -> list[str]:
        """Names of what is stored, but no weight of the model: it is not converted."""
        weight_map = self.names.weight_map
        known = {*weight_map.hf_shapes(), *(copy for copy, _ in weight_map.copies), *(stored for stored, _ in self.experts)}
        known |= {stored + part for stored, _ in self.experts for part in (BLOCKS, SCALES)}
        known |= {part.name for matrix in self.quantised.values() for part in (matrix, *matrix.beside)}
        fused = self.fused
        parts = fused.names_of if isinstance(fused, FusedRows) else lambda name: [name]
        return [name for name in self.matrices if not known.issuperset(parts(name))]

    def training_state(self) -> list[str]:
        """Names of what a checkpoint has to train on with, such as an optimizer's moments; a Hugging Face folder has none."""
        return []


@dataclass(frozen=True)
class DistSource(_Source):
    """A distributed checkpoint; `dist` is None where only its config is known. `skipped` keys are no weights of the model."""

    dist: DistFolder | None = None
    skipped: tuple[str, ...] = ()

    @property
    def template(self) -> Path | None:
        return template_of_run(self.path)

    @property
    def holds_adapters(self) -> bool:
        """Return whether it is of a role that trains adapters, and has these alone."""
        return any(key.startswith(IN_CHECKPOINTS) for key in self.skipped)

    def param_parts(self, rule: BoundRule, rows: int) -> tuple[tuple[Part, ...], torch.dtype]:
        """See `HFSource`. Vocabularies may be padded otherwise than stored."""
        matrix = self.matrix(rule)
        real_rows = min(rows, self.names.vocab_size) if is_vocabulary(rule) else rows
        padding = (Part(None, 0, rows - real_rows),) if rows > real_rows else ()
        return (Part(matrix, 0, real_rows), *padding), matrix.dtype

    def hf_parts(self, rule: BoundRule) -> Iterator[tuple[str, tuple[int, ...], tuple[Part, ...], torch.dtype]]:
        matrix = self.matrix(rule)
        parts_by_name: dict[str, list[tuple[int, Part]]] = {name: [] for name in rule.hf_names}
        at = 0
        for piece in rule.pieces(0, 1):
            rows = matrix.rows if rule.tp_axis == 1 else piece.stop - piece.start
            if piece.hf_name is not None:
                parts_by_name[piece.hf_name].append((piece.start, Part(matrix, at, rows)))
            at += rows
        for name, shape in rule.hf_shapes.items():
            parts = sorted(parts_by_name[name], key=lambda item: item[0])
            yield name, shape, tuple(part for _, part in parts), matrix.dtype

    def files(self) -> list[Path]:
        if self.dist is None:
            return []
        names = {chunk.file for key in self.dist.keys.values() for chunk in key.chunks}
        return [self.path / name for name in (*sorted(names), ".metadata")]

    def left_out(self) -> list[str]:
        return [key for key in self.skipped if not key.startswith(_TRAINING_KEYS)]

    def training_state(self) -> list[str]:
        return [key for key in self.skipped if key.startswith(_TRAINING_KEYS)]

    def matrix(self, rule: BoundRule) -> Matrix:
        """A parameter as one tensor-parallel rank would hold it, with the padding that is stored.

        Raises:
            CheckpointError: it is missing, incomplete or of another shape than the config implies.
        """
        shape = self.names.shape(rule, self.names.vocab_size)
        if self.dist is None:
            rows, cols = rows_and_cols(shape)
            return Matrix(rule.megatron_name, kept_dtype(rule) or default_dtype(self.hf_config), rows, cols, ())
        place = self.names.place(rule)
        sections = [self._section(rule, place, part, shape) for part in stored_rows(rule, shape[0] if shape else 1)]
        if len(sections) == 1:
            return sections[0]
        first, moved = 0, []
        for part in sections:
            moved += [replace(extent, row=extent.row + first) for extent in part.extents]
            first += part.rows
        return Matrix(place.keys[0], sections[0].dtype, first, sections[0].cols, tuple(moved))

    def _section(self, rule: BoundRule, place: Place, part: StoredRows, shape: tuple[int, ...]) -> Matrix:
        """The rows of a parameter that have a key of their own: all, but of a parameter in sections."""
        assert self.dist is not None
        keys = [key + part.suffix for key in place.keys]
        shape = (part.rows, *shape[1:])[: len(shape)]
        key = next((key for key in keys if key in self.dist.keys), None)
        if key is None:
            raise CheckpointError(
                f"'{self.path}' has no '{keys[0]}', which the model's config.json implies for '{rule.megatron_name}'"
            )
        stored, depth = self.dist.keys[key], len(place.prefix)
        inner_shape = stored.shape[depth:]
        fits = inner_shape[1:] == shape[1:] and (
            inner_shape[0] >= shape[0] if is_vocabulary(rule) else inner_shape[:1] == shape[:1]
        )
        if stored.shape[:depth] != place.prefix_sizes or len(inner_shape) != len(shape) or not fits:
            raise CheckpointError(
                f"'{key}' in '{self.path}' has shape {list(stored.shape)}, but the model's config.json implies "
                f"{[*place.prefix_sizes, *shape]}"
            )
        rows, cols = rows_and_cols(inner_shape)
        extents = tuple(self._extents(key, place.prefix, inner_shape, stored.dtype))
        if sum(e.rows * e.cols for e in extents) != rows * cols:
            raise CheckpointError(f"'{key}' in '{self.path}' is incomplete or has chunks that overlap, at {list(place.prefix)}")
        return Matrix(key + (str(list(place.prefix)) if depth else ""), stored.dtype, rows, cols, extents)

    def stored_chunks(self) -> Iterator[tuple[str, Matrix]]:
        """Every chunk of the model's keys, named by its key and offsets; a key with several names under its first."""
        assert self.dist is not None
        for key in self.names.first_keys():
            for chunk in self.dist.keys[key].chunks if key in self.dist.keys else ():
                rows, cols = rows_and_cols((prod(chunk.sizes[:-1]), *chunk.sizes[-1:]))
                extent = Extent(chunk.file, self.dist.data_offset(key, chunk), 0, rows, 0, cols)
                yield f"{key}{list(chunk.offsets)}", Matrix(key, self.dist.keys[key].dtype, rows, cols, (extent,))

    def _extents(self, key: str, prefix: tuple[int, ...], own: tuple[int, ...], dtype: torch.dtype) -> Iterator[Extent]:
        assert self.dist is not None
        depth = len(prefix)
        for chunk, number in self._chunks_at.setdefault(key, self._by_prefix(key, depth)).get(prefix, ()):
            sizes, offsets = chunk.sizes[depth:], chunk.offsets[depth:]
            if sizes[2:] != own[2:]:
                raise CheckpointError(f"'{key}' in '{self.path}' is split along more than its first two axes")
            rest = prod(sizes)
            offset = self.dist.data_offset(key, chunk) + number * rest * dtype.itemsize
            deeper = prod(own[2:])
            col, cols = (offsets[1] * deeper, sizes[1] * deeper) if len(sizes) > 1 else (0, 1)
            yield Extent(chunk.file, offset, offsets[0] if offsets else 0, sizes[0] if sizes else 1, col, cols)

    def _by_prefix(self, key: str, depth: int) -> dict[tuple[int, ...], list[tuple[StoredChunk, int]]]:
        """A key's chunks by each index of the leading axes that they hold, with its number among those."""
        assert self.dist is not None
        chunks_by_prefix: dict[tuple[int, ...], list[tuple[StoredChunk, int]]] = {}
        for chunk in self.dist.keys[key].chunks:
            ranges = [range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)]
            for number, prefix in enumerate(product(*ranges)):
                chunks_by_prefix.setdefault(prefix, []).append((chunk, number))
        return chunks_by_prefix

    @cached_property
    def _chunks_at(self) -> dict[str, dict[tuple[int, ...], list[tuple[StoredChunk, int]]]]:
        return {}


ConversionSource = HFSource | DistSource
"""The sources that a conversion reads; their methods of the same name give the same of either."""


def open_hf(path: str | Path, *, config_only: bool = False) -> HFSource:
    """A Hugging Face folder, checked against its config; with `config_only`, what its config.json implies.

    Raises:
        ModelError: the folder is damaged or incomplete, contradicts its config, or is of an unknown architecture.
    """
    folder = Path(path)
    config = load_hf_config(folder)
    is_mxfp4 = _has_mxfp4(config)
    config = without_mxfp4(config) if is_mxfp4 else config
    plain = without_quantization(config)
    names = model_names(plain, prediction=without_prediction_layers(plain) != plain)
    experts: dict[tuple[str, int], Matrix] = {}
    try:
        format = stored_format(config)
    except ModelError as error:
        raise ModelError(f"'{folder}': {error}") from None
    if config_only:
        matrices, quantised = _matrices_of_config(names.weight_map, config, format)
    else:
        read = HFFolder(folder)
        names = model_names(plain, prediction=model_names(plain).weight_map.has_prediction(read.names))
        matrices, quantised = _matrices_of_folder(read, format, names.weight_map, mxfp4=is_mxfp4)
        experts = _experts_of(read)
    return HFSource(folder, plain, names, folder, matrices, experts, quantised)


def open_dist(
    path: str | Path, hf_config_from: str | Path | None = None, *, config_only: bool = False, adapters: bool = False
) -> DistSource:
    """A distributed checkpoint; its model is that of `hf_config_from`, of its own hf/ folder, or of its run's config.

    With `adapters` it may hold these alone.

    Raises:
        CheckpointError: it is damaged, or nothing says which model it is.
        ModelError: the model's config cannot be used.
    """
    folder = Path(path)
    dist = None if config_only else DistFolder(folder)
    if dist is not None and not adapters and any(key.startswith(IN_CHECKPOINTS) for key in dist.keys):
        raise CheckpointError(f"'{folder}' holds adapters alone; `megarl convert export` writes them as a PEFT folder")
    companions = folder if config_only else _config_folder(folder, hf_config_from)
    config = without_quantization(load_hf_config(companions))
    if dist is not None and _OUTPUT in dist.keys and dist.keys[_OUTPUT].shape[0] == 1:
        config = sequence_classifier(config)
    if dist is None:
        has_prediction = without_prediction_layers(config) != config
    else:
        has_prediction = any(key.startswith(PREDICTION) for key in dist.keys)
    names = model_names(config, prediction=has_prediction)
    skipped: tuple[str, ...] = ()
    if dist is not None:
        rules = names.weight_map.bound_rules()
        known = {key + part.suffix for rule in rules for part in stored_rows(rule, 0) for key in names.place(rule).keys}
        skipped = tuple(key for key in dist.keys if key not in known)
        unknown = next((key for key in skipped if key.startswith(_MODEL_KEYS)), None)
        if unknown is not None:
            raise CheckpointError(
                f"'{unknown}' in '{folder}' has no place in the model that '{companions / 'config.json'}' describes"
            )
    return DistSource(folder, config, names, companions, dist, skipped)


def _value_dtype(matrix: Matrix) -> torch.dtype:
    return matrix.dtype if matrix.format is None else torch.bfloat16


def _matrices_of_config(
    weight_map: WeightMap, config: dict[str, Any], format: WeightFormat | None
) -> tuple[dict[str, Matrix], dict[str, Matrix]]:
    """Matrices as `_matrices_of_folder` gives them, of the folder that a config implies."""
    matrices, quantised = {}, {}
    for rule in weight_map.bound_rules():
        for name, shape in rule.hf_shapes.items():
            if format is None or not format.applies_to(rule.megatron_name):
                rows, cols = rows_and_cols(shape)
                matrices[name] = Matrix(name, kept_dtype(rule) or default_dtype(config), rows, cols, ())
                continue
            stored = []
            for part in format.parts(Copy(shape)):
                rows, cols = rows_and_cols(part.packing.hf_shapes[0])
                stored.append(Matrix(name + part.suffix, getattr(torch, part.dtype), rows, cols, ()))
            matrices |= {matrix.name: matrix for matrix in stored}
            quantised[name] = replace(stored[0], format=format, beside=tuple(stored[1:]))
    return matrices, quantised


def _has_mxfp4(config: dict[str, Any]) -> bool:
    """Return whether experts are MXFP4, in a family that has them so."""
    fused = fused_of(config)
    return isinstance(fused, FusedExperts) and fused.alternating and without_mxfp4(config) is not config


def _matrices_of_folder(
    folder: HFFolder, format: WeightFormat | None, weight_map: WeightMap, *, mxfp4: bool
) -> tuple[dict[str, Matrix], dict[str, Matrix]]:
    """(the matrices that a folder stores, the weights among them that are quantised, by the weight's name)."""
    matrices: dict[str, Matrix] = {}
    entries = folder.entries()
    for name, (file, entry) in entries.items():
        stacked = isinstance(folder.fused, FusedRows) and folder.fused.is_stack(name)  # of matrices, whose rows are counted
        rows, cols = (prod(entry.shape[:-1]), entry.shape[-1]) if stacked else rows_and_cols(entry.shape)
        matrices[name] = Matrix(name, entry.dtype, rows, cols, (Extent(file, entry.offset, 0, rows, 0, cols),))
    shapes = {name: entry.shape for name, (_, entry) in entries.items()}
    quantised: dict[str, Matrix] = {}
    for rule in weight_map.bound_rules() if format is not None else ():
        for name, shape in rule.hf_shapes.items() if format is not None and format.applies_to(rule.megatron_name) else ():
            assert format is not None
            values, scales, *_ = format.parts(Copy(shape))
            if values.suffix or name + scales.suffix in matrices:
                quantised[name] = _quantised(folder, matrices, shapes, name, shape, format)
    beside = {part.name: matrix.name for matrix in quantised.values() for part in matrix.beside}
    folder.check(weight_map, ignore={*beside, *(matrix.name for matrix in quantised.values())}, instead=quantised.keys())
    for name, matrix in matrices.items():
        if mxfp4 and name.endswith((BLOCKS, SCALES)):
            continue
        if matrix.dtype.itemsize == 1 and name not in quantised and name not in beside:
            raise ModelError(f"tensor '{name}' in '{folder.path}' is {matrix.dtype}, but there is no '{name}{SCALE_SUFFIX}'")
    return matrices, quantised


def _quantised(
    folder: HFFolder,
    found: dict[str, Matrix],
    shapes: dict[str, tuple[int, ...]],
    name: str,
    shape: tuple[int, ...],
    format: WeightFormat,
) -> Matrix:
    """The weight `name` with what belongs to it, which must be there, in the dtype and shape that the format implies."""
    parts = []
    for part in format.parts(Copy(shape)):
        stored, dtype, expected_shape = name + part.suffix, getattr(torch, part.dtype), part.packing.hf_shapes[0]
        if stored not in found:
            raise ModelError(f"'{folder.path}' has no tensor '{stored}', which config.json implies ({format.name})")
        if (found[stored].dtype, shapes[stored]) != (dtype, expected_shape):
            raise ModelError(
                f"tensor '{stored}' in '{folder.path}' is {found[stored].dtype} {list(shapes[stored])}, but {format.name} of a "
                f"weight of {list(shape)} needs {dtype} {list(expected_shape)}"
            )
        parts.append(found[stored])
    return replace(parts[0], format=format, beside=tuple(parts[1:]))


def _experts_of(folder: HFFolder) -> dict[tuple[str, int], Matrix]:
    """The matrix of each expert in the tensors that hold all experts' of a block."""
    fused, matrices = folder.fused, {}
    if not isinstance(fused, FusedExperts):
        return {}
    entries = folder.entries()
    for name in entries:
        if fused.names_of(name) in ([name], []):
            continue
        stored = name.removesuffix(BLOCKS)
        for expert in range(fused.experts):
            matrices[stored, expert] = _expert_of(entries, name, expert)
            if stored != name:
                exponents = _expert_of(entries, stored + SCALES, expert)
                mxfp4 = mxfp4_in(f"'{name}' in '{folder.path}'").Mxfp4()
                matrices[stored, expert] = replace(matrices[stored, expert], format=mxfp4, beside=(exponents,))
    return matrices


def _expert_of(entries: dict[str, tuple[str, Entry]], name: str, expert: int) -> Matrix:
    file, entry = entries[name]
    rows, cols = rows_and_cols(entry.shape[1:])
    extent = Extent(file, entry.offset + expert * rows * cols * entry.dtype.itemsize, 0, rows, 0, cols)
    return Matrix(f"{name}[{expert}]", entry.dtype, rows, cols, (extent,))


def _config_folder(folder: Path, named: str | Path | None) -> Path:
    if named is not None:
        return Path(named)
    subfolder = folder / HF_SUBFOLDER
    if (subfolder / "config.json").is_file():
        return subfolder
    config_folder = _config_folder_of_run(folder)
    if config_folder is None:
        raise CheckpointError(
            f"nothing says which model '{folder}' is: it has no {HF_SUBFOLDER}/config.json and is in no run's folder; name a "
            "Hugging Face folder with --hf-config"
        )
    return config_folder


def _config_folder_of_run(folder: Path) -> Path | None:
    """The model folder that a run's config names for the role whose checkpoint this is (`<run>/checkpoints/step_N/<role>`)."""
    run = folder.resolve().parents[2] if len(folder.resolve().parents) > 2 else None
    if run is None or not (run / "config.yaml").is_file():
        return None
    try:
        config = dict(tree_leaves(read_yaml(run / "config.yaml")))
    except ConfigError as error:
        raise CheckpointError(f"nothing says which model '{folder}' is: {error}; name a folder with --hf-config") from None
    role = folder.resolve().name
    named = config.get(f"{role}.{'init_from' if role == 'critic' else 'path'}") or config.get("model.path")
    if not isinstance(named, str):
        return None
    if not (Path(named) / "config.json").is_file():
        raise CheckpointError(
            f"'{folder}' belongs to a run that started from '{named}' ({run / 'config.yaml'}), which is no model folder here; "
            "name one with --hf-config"
        )
    return Path(named)
