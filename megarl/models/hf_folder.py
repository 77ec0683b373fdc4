"""Hugging Face model folders: lazy, sliced reading of safetensors, and atomic writing with bounded shards.

No transformers, no megatron: a folder is `config.json`, safetensors files and the files that travel along.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import ModelError, nearest
from megarl.models.chat_template_file import carry_template
from megarl.models.expert_tensors import ExpertSlice, RowSlice, joined
from megarl.models.fused_experts import BLOCKS, SCALES, ExpertPlace, FusedExperts
from megarl.models.fused_rows import FusedRows, MatrixPlace
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.safetensors_layout import Entry, read_entries, read_json_without_duplicates
from megarl.models.transformers_names import with_prefix
from megarl.models.weight_formats import mxfp4_in
from megarl.models.weight_map import WeightMap
from megarl.models.weight_tensors import gathered
from megarl.system.atomic_files import whole_folder

SINGLE_FILE = "model.safetensors"
NAME_BYTES = 255
"""Most bytes of a file's name on Linux."""
INDEX_FILE = "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
"""Files copied beside exported weights: tokenizer, chat template, generation and processor settings."""

# Tensors that some checkpoints carry and no model reads: tables that follow from the config.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_TIED_OUTPUT, _EMBEDDING = "lm_head.weight", "embedding.word_embeddings.weight"


class HFFolder:
    """A model folder opened for reading. Files are opened when first needed and mapped, not read.

    Tensors have the names that the hub gives them, also where another version of transformers wrote others.
    """

    def __init__(self, path: str | Path) -> None:
        """Read config and index.

        Raises:
            ModelError: the folder, its config or its weights are missing or damaged.
        """
        self.path = Path(path)
        self.config: dict[str, Any] = load_hf_config(path)
        self._files: dict[str, Any] = {}

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The name of each tensor in its file, by the hub's."""
        return {self._hub_name(name): name for name in self._file_of_stored}

    @cached_property
    def _file_of(self) -> Mapping[str, str]:
        if len(self._stored) != len(self._file_of_stored):
            twice = next(name for name in self._file_of_stored if self._stored[self._hub_name(name)] != name)
            raise ModelError(f"tensor '{twice}' in '{self.path}' is there again as '{self._stored[self._hub_name(twice)]}'")
        return {name: self._file_of_stored[stored] for name, stored in self._stored.items()}

    @cached_property
    def fused(self) -> FusedExperts | FusedRows | None:
        """Tensors that are stored together, if any."""
        return fused_of(self.config)

    @cached_property
    def _other_names(self) -> tuple[tuple[str, str], ...]:
        try:
            return architecture_for(self.config).other_names
        except ModelError:  # whose names nobody knows
            return ()

    def _hub_name(self, stored: str) -> str:
        return with_prefix(stored, self._other_names)

    @cached_property
    def _file_of_stored(self) -> Mapping[str, str]:
        index = self.path / INDEX_FILE
        if not index.exists():
            if not (self.path / SINGLE_FILE).exists():
                raise ModelError(
                    f"model folder '{self.path}' has neither {SINGLE_FILE} nor {INDEX_FILE}; weights must be safetensors"
                )
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        try:
            weight_map = read_json_without_duplicates(index)["weight_map"]
            file_of = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"'{index}' is no valid safetensors index: {error!r}") from None
        for file in dict.fromkeys(file_of.values()):
            # lone surrogates are not printable
            if file in ("", "..") or file != Path(file).name or not file.isprintable() or len(file.encode()) > NAME_BYTES:
                raise ModelError(f"'{index}' names the file {file!r}; it must be a file of this folder")
        return file_of

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor in the folder; those that are stored together are named each."""
        return tuple(self._file_of) if self.fused is None else tuple(chain(*map(self.fused.names_of, self._file_of)))

    def get_slice(self, name: str) -> Any:
        """A safetensors slice of a tensor: index it (`[a:b]`, `[:, a:b]`) to read that part; `[:]` for all.

        Raises:
            ModelError: there is no such tensor, or its file is missing or damaged.
        """
        place = self.fused.place(name) if self.fused is not None else None
        if isinstance(place, MatrixPlace) and isinstance(self.fused, FusedRows):
            source = self.get_slice(place.stored)
            self.fused.check(place.stored, tuple(source.get_shape()))
            return RowSlice(source, place)
        if isinstance(place, ExpertPlace) and isinstance(self.fused, FusedExperts):
            source = self._stored_experts(place.stored)
            as_on_the_hub = self.fused.check(place.stored, tuple(source.get_shape()))
            return ExpertSlice(source, place, as_on_the_hub=as_on_the_hub)
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"model folder '{self.path}' has no tensor '{name}'{nearest(name, self._file_of)}")
        try:
            return self._open(file).get_slice(self._stored[name])
        except SafetensorError as error:
            raise ModelError(f"'{self.path / file}' does not give tensor '{name}': {error}") from None

    def _stored_experts(self, stored: str) -> Any:
        if stored not in self._file_of and stored + BLOCKS in self._file_of:
            mxfp4 = mxfp4_in(f"'{stored + BLOCKS}' in '{self.path}'")
            return mxfp4.Mxfp4Tensor(self.get_slice(stored + BLOCKS), self.get_slice(stored + SCALES), stored)
        return self.get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, reading at most one row of it."""
        source = self.get_slice(name)
        return (source[:1] if source.get_shape() else source[...]).dtype

    def entries(self) -> dict[str, tuple[str, Entry]]:
        """(file, where it lies in the file) of every stored tensor, with the index checked against the files' own headers.

        Raises:
            ModelError: a file is missing or damaged, a tensor is in two files, or index and files contradict each other.
        """
        entries: dict[str, tuple[str, Entry]] = {}
        for file in dict.fromkeys(self._file_of.values()):
            if not (self.path / file).exists():
                raise ModelError(f"model folder '{self.path}' lacks '{file}', which {INDEX_FILE} names")
            for stored, entry in read_entries(self.path / file).items():
                name = self._hub_name(stored)
                if name in entries:
                    raise ModelError(f"tensor '{name}' in '{self.path}' is in '{entries[name][0]}' and again in '{file}'")
                if self._file_of.get(name) != file:
                    where = self._file_of.get(name)
                    claim = f"says '{where}'" if where else "has no entry for it"
                    raise ModelError(f"tensor '{name}' in '{self.path}' is in '{file}', but {INDEX_FILE} {claim}")
                entries[name] = (file, entry)
        for name, file in self._file_of.items():
            if name not in entries:
                raise ModelError(f"tensor '{name}' in '{self.path}' is in '{file}' by {INDEX_FILE}, but not in the file")
        return entries

    def check(self, weight_map: WeightMap, ignore: Collection[str] = (), instead: Collection[str] = ()) -> None:
        """Check that the folder holds the tensors of a map, in their shapes, and no others but those to `ignore`.

        The latter stand for the tensors in `instead`.

        A tied model's folder may hold the output layer a second time if it equals the embedding.

        Raises:
            ModelError: the first tensor that is missing, left over or of another shape.
        """
        expected = weight_map.hf_shapes()
        for copy, original in weight_map.copies:
            if copy in self.names and not torch.equal(self.get_slice(copy)[:], self.get_slice(original)[:]):
                raise ModelError(
                    f"tensor '{copy}' in '{self.path}' differs from '{original}', but the layer for multi-token prediction "
                    "shares it with the decoder"
                )
        for name, shape in expected.items():
            if name not in instead and self.shape(name) != shape:
                raise ModelError(
                    f"tensor '{name}' in '{self.path}' has shape {list(self.shape(name))}, "
                    f"but config.json implies {list(shape)}"
                )
        for name in self.names:
            if name in expected or name in ignore or name.endswith(_DERIVED_SUFFIXES) or weight_map.leaves_out(name):
                continue
            if name == _TIED_OUTPUT and architecture_for(self.config).text_config(self.config).get("tie_word_embeddings"):
                [embedding] = weight_map.rule_for(_EMBEDDING).hf_names
                if torch.equal(self.get_slice(name)[:], self.get_slice(embedding)[:]):
                    continue
                raise ModelError(
                    f"config.json in '{self.path}' has tie_word_embeddings=true, but '{_TIED_OUTPUT}' differs from "
                    f"'{embedding}'; tie_word_embeddings must be false"
                )
            raise ModelError(f"tensor '{name}' in '{self.path}' has no place in the model that config.json describes")

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise ModelError(f"'{path}' is no file of weights")
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ModelError(f"model folder '{self.path}' lacks '{file}', which {INDEX_FILE} names") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"'{path}' is damaged or cut short: {error}") from None
        return self._files[file]


def write_hf_folder(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    extra_files_from: str | Path | None = None,
    max_shard_bytes: int = 5 * 2**30,
    template: str | Path | None = None,
) -> None:
    """Write a model folder that appears whole or not at all.

    Tensors are taken one at a time and at most `max_shard_bytes` (or one tensor) are held. `COMPANIONS` in
    `extra_files_from` are copied along; a file `template` takes the place of the chat template there. Experts that the hub
    stores together are, however they come.

    Raises:
        ModelError: `path` is a file or a folder with something in it, or a tensor comes twice.
    """
    fused = fused_of(config)
    with new_folder(path, "config.json", config) as staging:
        _write_shards(staging, tensors if fused is None else joined(fused, tensors), max_shard_bytes)
        if extra_files_from is not None:
            copy_companions(Path(extra_files_from), staging, Path(template) if template is not None else None)


@contextmanager
def new_folder(path: str | Path, config_file: str, config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to fill that has `config` as JSON in `config_file`; it becomes `path` if the block succeeds.

    Raises:
        ModelError: `path` is a file or a folder with something in it.
    """
    target = Path(path)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"model folder '{target}' exists already; name a new or an empty folder")
    with whole_folder(target) as staging:
        (staging / config_file).write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        yield staging
        file_mode = (staging / config_file).stat().st_mode & 0o777  # the umask's; safetensors writes private files
        for file in filter(Path.is_file, staging.iterdir()):
            os.chmod(file, file_mode)


def fused_of(config: Mapping[str, Any]) -> FusedExperts | FusedRows | None:
    """Tensors that folders of a model store together, if any; also of models that megarl does not know."""
    try:
        family = architecture_for(dict(config))
    except ModelError:
        return None
    read = family.fused_experts or family.fused_rows
    return read(dict(config)) if read is not None else None


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    seen: dict[str, int] = {}

    def each_once() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in seen:
                raise ModelError(f"tensor '{name}' comes twice; each tensor is exported once")
            seen[name] = tensor.nbytes
            yield name, tensor.detach().cpu().contiguous()

    for shard in gathered(each_once(), max_shard_bytes, lambda named: named[1].nbytes):
        save_file(dict(shard), folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append([name for name, _ in shard])
        del shard  # before the next ones are gathered
    if not shards:
        save_file({}, folder / "0.part", metadata={"format": "pt"})
        shards.append([])
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE_FILE)
        return
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(seen.values())}, "weight_map": dict(sorted(file_of.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path, template: Path | None = None) -> None:
    """Copy the `COMPANIONS` that a folder has into another; a file `template` takes the place of the chat template."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
            else:
                shutil.copy(file, target / file.name)
    carry_template(template, target)
