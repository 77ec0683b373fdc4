"""Damaged and contradictory input: each is one sentence that names file and tensor, exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl import cli
from megarl.config.layout import Layout
from megarl.models.hf_folder import INDEX_FILE, HFFolder, write_hf_folder
from megarl.option_list import OPTIONS
from tests.convert.conftest import imported, tensors

NORM = "model.norm.weight"


@pytest.fixture
def folder(families: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, in several files."""
    source = HFFolder(families("llama"))
    write_hf_folder(tmp_path / "hf", tensors(families("llama")).items(), source.config, max_shard_bytes=20_000)
    return tmp_path / "hf"


@pytest.fixture
def checkpoint(families: Callable[[str], Path], tmp_path: Path) -> Path:
    """A distributed checkpoint of the tiny Llama."""
    imported(families("llama"), tmp_path / "dist", Layout(tp=2, pp=2))
    return tmp_path / "dist"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence that a command ends with."""
    assert cli.main(["convert", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("megarl: ")
    assert output.err.count("\n") == 1, output.err
    return output.err


def import_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that importing the folder ends with; nothing is written."""
    target = folder.parent / "out"
    sentence = refused(capsys, "import", folder, target)
    assert not target.exists()
    assert not list(folder.parent.glob(".out*"))
    return sentence


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the folder anew as a single file with other tensors."""
    found = {name: value.clone() for name, value in tensors(folder).items()}
    change(found)
    for file in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
        file.unlink()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def test_commands_that_take_a_model_take_a_run_that_exported_one(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(checkpoint, run / "checkpoints" / "step_000002" / "policy")
    (run / "checkpoints" / "step_000002" / "state.json").touch()
    adding = ("--adapter", tmp_path / "adapter", "--out", out)
    for named, arguments in (
        ("HF", ("import", run, out)),
        *([("HF", ("add-draft", run, out))] if "prediction" in OPTIONS else []),
        *([("--base", ("merge", "--base", run, *adding))] if "lora" in OPTIONS else []),
        ("--model", ("inspect", tmp_path / "rows.jsonl", "--model", run)),
    ):
        group = "data" if named == "--model" else "convert"
        assert cli.main([group, *map(str, arguments)]) == 2
        expected = f"{named} is '{run}', a run or checkpoint without an exported model; `megarl convert export {run} FOLDER`"
        assert capsys.readouterr().err == f"megarl: {expected} writes one\n"
    shutil.copytree(folder, run / "model")
    assert cli.main(["convert", "import", str(run), str(out)]) == 0
    assert cli.main(["convert", "verify", str(folder), str(out)]) == 0


@pytest.mark.parametrize("cut", [0, 5, 300, -1])
def test_a_file_that_is_cut_short(folder: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:cut])
    assert f"{victim.name}' is damaged" in import_refused(folder, capsys)


def test_a_bit_flipped_in_a_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anywhere in what describes the tensors (before that come `__metadata__` and its text, which mean nothing here)."""
    victim = sorted(folder.glob("*.safetensors"))[0]
    content = victim.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for place in (*range(8), *range(content.index(b'"dtype"'), 8 + len(content[8 : 8 + length].rstrip()), 41)):
        victim.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        sentence = import_refused(folder, capsys)
        assert victim.name in sentence or "has no tensor" in sentence or "config.json" in sentence


def test_an_index_without_an_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_index(folder, lambda weight_map: weight_map.pop(NORM))
    assert f"tensor '{NORM}' in '{folder}' is in 'model-" in (sentence := import_refused(folder, capsys))
    assert "has no entry for it" in sentence


def test_an_index_with_a_wrong_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = sorted(folder.glob("*.safetensors"))[0].name
    edit_index(folder, lambda weight_map: weight_map.update({"model.layers.9.absent": first}))
    sentence = import_refused(folder, capsys)
    assert f"'model.layers.9.absent' in '{folder}' is in '{first}' by {INDEX_FILE}, but not in the file" in sentence


def test_a_file_that_the_index_names_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"lacks '{victim.name}', which {INDEX_FILE} names" in import_refused(folder, capsys)


def test_a_tensor_in_two_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(folder.glob("*.safetensors"))
    name = next(iter(HFFolder(folder).entries()))
    extra = {name: torch.zeros(2), "other": torch.zeros(2)}
    save_file(extra, folder / "more.safetensors")
    edit_index(folder, lambda weight_map: weight_map.update({"other": "more.safetensors"}))
    assert f"tensor '{name}' in '{folder}' is in '{files[0].name}' and again in 'more.safetensors'" in import_refused(
        folder, capsys
    )


def test_a_name_that_comes_twice_in_the_index_or_in_a_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = (folder / INDEX_FILE).read_text()
    (folder / INDEX_FILE).write_text(index.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "elsewhere", ', 1))
    assert f"{INDEX_FILE}' names '{NORM}' twice" in import_refused(folder, capsys)
    (folder / INDEX_FILE).write_text(index)
    victim = sorted(folder.glob("*.safetensors"))[0]
    content = victim.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    twice = header[:-1] + b',"__metadata__":{}}'
    victim.write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + length :])
    assert f"{victim.name}' names the tensor '__metadata__' twice" in import_refused(folder, capsys)


def test_a_tensor_of_another_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensors(folder, lambda found: found.update({NORM: torch.zeros(31)}))
    assert f"tensor '{NORM}' in '{folder}' has shape [31], but config.json implies [32]" in import_refused(folder, capsys)


def test_a_config_that_contradicts_the_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, part in (
        ({"num_hidden_layers": 5}, "has no tensor 'model.layers.4."),
        ({"num_hidden_layers": 3}, "has no place in the model"),
        ({"num_key_value_heads": 4}, "but config.json implies [32, 32]"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is 'GPT2LMHeadModel'; it must be one of"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert part in import_refused(folder, capsys)


def test_a_distributed_checkpoint_that_is_damaged(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def export_refused() -> str:
        sentence = refused(capsys, "export", checkpoint, checkpoint.parent / "out")
        assert not list(checkpoint.parent.glob("*out*"))
        return sentence

    victim = checkpoint / "__1_0.distcp"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1])
    assert "__1_0.distcp' is cut short: '" in export_refused()
    victim.write_bytes(b"\0" * len(content))
    assert "__1_0.distcp' is damaged: where '" in (sentence := export_refused())
    assert "there is no saved tensor" in sentence
    victim.unlink()
    assert "lacks '__1_0.distcp', which holds '" in export_refused()
    victim.write_bytes(content)
    metadata = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert ".metadata' is damaged: it cannot be read" in export_refused()
    without = pickle.loads(metadata)
    without.state_dict_metadata.pop("decoder.final_layernorm.weight")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(without))
    assert "has no 'decoder.final_layernorm.weight'" in export_refused()
    part = pickle.loads(metadata)
    part.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(part))
    assert "'decoder.layers.mlp.linear_fc2.weight' in '" in (sentence := export_refused())
    assert "is incomplete or has chunks that overlap, at [3]" in sentence
    (checkpoint / ".metadata").write_bytes(metadata)
    config = json.loads((checkpoint / "hf" / "config.json").read_text())
    (checkpoint / "hf" / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    assert "has shape [4, 48, 32], but the model's config.json implies [4, 96, 32]" in export_refused()
    shutil.rmtree(checkpoint / "hf")
    assert "name a Hugging Face folder with --hf-config" in export_refused()
    (checkpoint / ".metadata").unlink()
    assert "is no megatron-core distributed checkpoint" in export_refused()


def test_a_chunk_that_holds_another_tensor(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    places = {index.fqn: info for index, info in metadata.storage_data.items() if index.offset is not None}
    norm, embedding = places["decoder.final_layernorm.weight"], places["embedding.word_embeddings.weight"]
    norm.relative_path, norm.offset, norm.length = embedding.relative_path, embedding.offset, embedding.length
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    sentence = refused(capsys, "export", checkpoint, checkpoint.parent / "out")
    assert "where 'decoder.final_layernorm.weight' should be, there is torch.float32 [66, 32], but" in sentence


def test_options_that_cannot_be(folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out"
    for arguments, part in (
        (("import", folder, out, "--layout", "tq=2"), "--layout has 'tq=2'; it must set only tp, pp"),
        (("import", folder, out, "--layout", "tp=2,tp=2"), "--layout: tp comes twice"),
        (("import", folder, out, "--layout", "tp=x"), "--layout: tp is 'x'; it must be a whole number"),
        (("import", folder, out, "--layout", "tp=8"), "tp is 8"),
        (("import", folder, out, "--shard", "3/3"), "--shard is '3/3'; it must be i/n"),
        (("import", folder, out, "--workers", "0"), "--workers is 0"),
        (("import", folder, out, "--dtype", "fp8-block"), "invalid choice"),
        (("import", folder, checkpoint), "exists already"),
        (("import", folder.parent / "absent", out), "does not exist"),
        (("export", folder, out), "is no megatron-core distributed checkpoint"),
        (("verify", folder, "--prompts", "x"), "--prompts compares two folders"),
        (("verify", folder), "has no megarl_conversion.json"),
        (("inspect", folder.parent), "has no config.json"),
        (("improt", folder, out), "improt"),
    ):
        assert part in refused(capsys, *arguments)
    assert not out.exists()
