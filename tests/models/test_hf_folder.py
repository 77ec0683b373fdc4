"""Model folders: what is written is what was given, whole or not at all; what is damaged is a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from megarl.models.weight_tensors import hf_from_shards, shard_from_hf


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A tiny Llama in several shards."""
    model = tiny("llama")
    write_hf_folder(tmp_path / "model", model.tensors.items(), model.hf_config, max_shard_bytes=8192)
    return tmp_path / "model"


@pytest.mark.parametrize("max_shard_bytes", [4000, 8192, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_folder_reads_back_byte_equal_in_shards_of_bounded_size(
    tiny: Any, tmp_path: Path, max_shard_bytes: int, dtype: torch.dtype
) -> None:
    model = tiny("qwen2")
    tensors = {name: tensor.to(dtype) for name, tensor in model.tensors.items()}
    write_hf_folder(tmp_path / "m", tensors.items(), model.hf_config, max_shard_bytes=max_shard_bytes)
    read = HFFolder(tmp_path / "m")
    assert read.config == json.loads(json.dumps(model.hf_config))
    assert sorted(read.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read.get_slice(name)[:], tensor)
        assert (read.shape(name), read.dtype(name)) == (tuple(tensor.shape), dtype)
    largest = max(tensor.nbytes for tensor in tensors.values())
    files = list((tmp_path / "m").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 2**30)
    assert all(file.stat().st_size < max(max_shard_bytes, largest) + 4096 for file in files)  # 4096: the header


def test_transformers_loads_a_written_folder(tiny: Any, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny("llama").tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_map_checks_a_whole_folder(tiny: Any, folder: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    HFFolder(folder).check(weight_map)
    for tensors, message in (
        ({k: v for k, v in model.tensors.items() if k != "model.norm.weight"}, "has no tensor 'model.norm.weight'"),
        (model.tensors | {"model.norm.weight": torch.zeros(31)}, r"shape \[31\], but config.json implies \[32\]"),
        (model.tensors | {"model.extra": torch.zeros(1)}, "'model.extra' in '.*' has no place"),
    ):
        path = tmp_path / str(len(tensors)) / message[:9]
        write_hf_folder(path, tensors.items(), model.hf_config)
        with pytest.raises(ModelError, match=message):
            HFFolder(path).check(weight_map)


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_model_may_repeat_its_embedding_but_not_contradict_it(tiny: Any, tmp_path: Path, differs: bool) -> None:
    model = tiny("llama", tied=True)
    output = model.tensors["model.embed_tokens.weight"] + (1.0 if differs else 0.0)
    write_hf_folder(tmp_path / "m", [*model.tensors.items(), ("lm_head.weight", output)], model.hf_config)
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    if differs:
        with pytest.raises(ModelError, match=r"tie_word_embeddings=true, but 'lm_head\.weight' differs"):
            HFFolder(tmp_path / "m").check(weight_map)
    else:
        HFFolder(tmp_path / "m").check(weight_map)


def test_tokenizer_and_generation_files_travel_along(tiny: Any, folder: Path, tmp_path: Path) -> None:
    carried = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "merges.txt")
    for name in (*carried, "README.md", "optimizer.pt"):
        (folder / name).write_text(name)
    model = tiny("llama")
    write_hf_folder(tmp_path / "copy", model.tensors.items(), model.hf_config, extra_files_from=folder)
    assert {file.name for file in (tmp_path / "copy").iterdir()} == {*carried, "config.json", SINGLE_FILE}
    assert all((tmp_path / "copy" / name).read_text() == name for name in carried)


def test_a_failed_write_leaves_nothing_behind(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(model.tensors.items())[:5]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_hf_folder(tmp_path / "m", broken(), model.hf_config, max_shard_bytes=4000)
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' comes twice"):
        write_hf_folder(tmp_path / "m", [*model.tensors.items(), ("model.norm.weight", torch.zeros(32))], model.hf_config)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_model_is_not_overwritten_and_a_new_one_has_the_usual_modes(
    tiny: Any, folder: Path, tmp_path: Path
) -> None:
    model = tiny("llama")
    with pytest.raises(ModelError, match="exists already; name a new or an empty folder"):
        write_hf_folder(folder, model.tensors.items(), model.hf_config)
    (tmp_path / "empty").mkdir()
    ordinary_file = tmp_path / "ordinary"
    ordinary_file.touch()
    ordinary = ((tmp_path / "empty").stat().st_mode, ordinary_file.stat().st_mode)
    write_hf_folder(tmp_path / "empty", model.tensors.items(), model.hf_config)
    assert ((tmp_path / "empty").stat().st_mode, (tmp_path / "empty" / SINGLE_FILE).stat().st_mode) == ordinary


def test_damaged_folders_are_sentences(folder: Path, tmp_path: Path) -> None:
    read = HFFolder(folder)
    with pytest.raises(ModelError, match=r"no tensor 'model.norm.weigth' \(did you mean 'model.norm.weight'\?\)"):
        read.get_slice("model.norm.weigth")
    victim = sorted(folder.glob("*.safetensors"))[0]
    name = next(n for n, file in json.loads((folder / INDEX_FILE).read_text())["weight_map"].items() if file == victim.name)
    content = victim.read_bytes()
    for cut in (0, 4, 200, len(content) - 1):
        victim.write_bytes(content[:cut])
        with pytest.raises(ModelError, match=rf"{victim.name}' is damaged or cut short"):
            HFFolder(folder).get_slice(name)
    victim.unlink()
    with pytest.raises(ModelError, match=f"lacks '{victim.name}'"):
        HFFolder(folder).get_slice(name)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match="no valid safetensors index"):
        HFFolder(folder).names  # noqa: B018
    (folder / INDEX_FILE).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        HFFolder(folder).names  # noqa: B018
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json' is not valid JSON"):
        HFFolder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a JSON list; it must be an object"):
        HFFolder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        HFFolder(folder)
    with pytest.raises(ModelError, match="does not exist"):
        HFFolder(tmp_path / "absent")


@pytest.mark.real
def test_the_real_model_survives_sharding_and_export_byte_for_byte(real_model: Path, tmp_path: Path) -> None:
    source = HFFolder(real_model)
    weight_map = architecture_for(source.config).weight_map(source.config)
    source.check(weight_map)

    def exported() -> Iterator[tuple[str, Tensor]]:
        for rule in weight_map.bound_rules():
            yield from hf_from_shards(rule, [shard_from_hf(rule, source.get_slice, rank, 3, 49155) for rank in range(3)])

    write_hf_folder(tmp_path / "copy", exported(), source.config, extra_files_from=real_model, max_shard_bytes=200 * 2**20)
    copy = HFFolder(tmp_path / "copy")
    assert copy.config == source.config
    assert sorted(copy.names) == sorted(source.names)
    for name in source.names:
        assert torch.equal(copy.get_slice(name)[:], source.get_slice(name)[:]), name
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "copy" / file).read_bytes() == (real_model / file).read_bytes()
