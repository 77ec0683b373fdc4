"""What a user is given to read cannot run code: a config, a checkpoint, a tokenizer, a model folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

import megarl
from megarl.checkpoint.format.dist_format import DistFolder
from megarl.checkpoint.format.safe_pickle import check_pickles, read_metadata
from megarl.cli import main
from megarl.convert.sources import open_dist
from megarl.data.hub_dataset import read_configurations
from megarl.data.tokenize import load_tokenizer
from megarl.errors import CheckpointError, EngineError, ModelError
from megarl.models.hf_folder import HFFolder
from megarl.models.safetensors_layout import read_entries
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.runs.manifest import seal
from megarl.runs.resuming import differences_at_resume
from tests.config import smallest
from tests.rollout.tiny import TINY, save_tiny


class Malice:
    """Its pickle touches a file where it is read."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.touched),)


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    """A place that nothing may have made."""
    return tmp_path / "touched"


@pytest.fixture
def role(tmp_path: Path) -> Path:
    """A role's folder of a checkpoint, with a tensor, an object like the random numbers' state, and what is common."""
    folder = tmp_path / "step_000001" / "policy"
    rng = {"python": (3, (1, 2), None), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    save({"weight": torch.ones(3), "rng": rng}, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    torch.save({"seed": 3, "layout": {"tp": 1, "vpp": None}}, folder / "common.pt")
    return folder


def test_what_a_run_saves_is_harmless(role: Path) -> None:
    check_pickles(role.parent)
    assert "weight" in DistFolder(role).keys


def test_metadata_that_would_run_code_is_refused(role: Path, touched: Path) -> None:
    (role / ".metadata").write_bytes(pickle.dumps(Malice(touched)))
    for read in (lambda: check_pickles(role.parent), lambda: DistFolder(role)):
        with pytest.raises(CheckpointError, match=r"\.metadata' is not read, as that could run code .* it names posix.mkdir"):
            read()
    assert not touched.exists()


@pytest.mark.parametrize("name", ["builtins eval", "torch load", "torch.hub load", "torch.distributed.checkpoint.planner io"])
def test_metadata_may_not_reach_functions_through_known_modules(role: Path, name: str) -> None:
    module, _, attribute = name.partition(" ")
    (role / ".metadata").write_bytes(f"c{module}\n{attribute}\n(V1\ntR.".encode())
    with pytest.raises(CheckpointError, match="could run code"):
        check_pickles(role)


def test_metadata_takes_no_more_memory_than_its_size(role: Path) -> None:
    """A number of five bytes had the unpickler of C make room for so many values: 34 GB for a file of 1 kB."""
    whole = (role / ".metadata").read_bytes()
    ends = (b"r\xff\xff\xff\xff.", b"p4000000000\n.", b"\x8e" + b"\xff" * 7 + b"\x0f.")
    for damaged in (whole[:-1] + end for end in ends):
        (role / ".metadata").write_bytes(damaged)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for read in (check_pickles, DistFolder):
            with pytest.raises(CheckpointError, match=r"'.*\.metadata' is damaged: it cannot be read"):
                read(role)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


def test_metadata_may_not_lead_out_of_its_folder(role: Path) -> None:
    metadata = pickle.loads((role / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../../etc/passwd"
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        check_pickles(role)


def build(target: bytes, name: bytes, value: bytes, *, slots: bool) -> bytes:
    """A pickle's operations that set attribute `name` of what `target` makes, as its state or as that of its slots."""
    state = b"}V" + name + b"\n" + value + b"s"
    return target + (b"(N" + state + b"t" if slots else state) + b"b"


DESCRIPTION = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)R"


@pytest.mark.parametrize(
    ("operations", "what"),
    [
        (build(b"cpathlib\nPosixPath\n", b"is_file", b"cbuiltins\nset\n", slots=True), "Path"),
        (build(b"cpathlib\nPosixPath\n", b"name", b"V../../../etc/passwd\n", slots=True), "Path"),
        (build(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"version", b"N", slots=True), "Metadata"),
        (build(DESCRIPTION, b"chunks", b"]", slots=True), "BytesStorageMetadata"),
        (build(DESCRIPTION, b"chunks", b"]", slots=False), "BytesStorageMetadata"),
        (build(b"cbuiltins\nset\n)R", b"add", b"N", slots=False), "set"),
    ],
    ids=["method_of_a_class", "property_of_a_class", "field_of_a_class", "slot", "no_field", "no_description"],
)
def test_metadata_sets_no_more_than_the_fields_of_descriptions(
    role: Path, touched: Path, monkeypatch: pytest.MonkeyPatch, operations: bytes, what: str
) -> None:
    """`Path.is_file` became `set` for the whole process, so `common.pt` was not looked at; so did the check of `..`."""
    monkeypatch.setattr(Path, "is_file", Path.is_file)  # restored, should the test fail
    monkeypatch.setattr(Path, "name", Path.name)
    before = Path.is_file, Path.name
    torch.save({"seed": Malice(touched)}, role / "common.pt")
    (role / ".metadata").write_bytes(operations + b"0" + (role / ".metadata").read_bytes())
    with pytest.raises(CheckpointError, match=rf"could run code .* it sets (attributes|more than the fields) of .*{what}"):
        check_pickles(role.parent)
    assert (Path.is_file, Path.name) == before


def test_metadata_makes_no_room_for_the_bytes_that_it_says_it_has(role: Path) -> None:
    (role / ".metadata").write_bytes(pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (1 << 28).to_bytes(8, "little") + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"metadata' is damaged: .*it holds an array of bytes"):
            check_pickles(role.parent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 24


def test_what_megatron_core_adds_to_metadata_is_read(role: Path) -> None:
    metadata = pickle.loads((role / ".metadata").read_bytes())
    metadata.mcore_data = {"weight": {"nd_reformulated_orig_global_shape": (3,)}}
    metadata.all_local_plans = [SavePlan([])]
    (role / ".metadata").write_bytes(pickle.dumps(metadata))
    read = read_metadata(role / ".metadata")
    assert (read.mcore_data, read.all_local_plans) == (metadata.mcore_data, metadata.all_local_plans)


def test_common_state_that_would_run_code_is_refused(role: Path, touched: Path) -> None:
    torch.save({"seed": Malice(touched)}, role / "common.pt")
    with pytest.raises(CheckpointError, match=r"common.pt' is not read, as that could run code .* it names posix.mkdir"):
        check_pickles(role.parent)
    assert not touched.exists()


def hide_an_object(role: Path, content: bytes, of: str = "rng.numpy", **described: Any) -> None:
    """`content` in the place of all objects whose keys begin with `of`; their descriptions get the attributes `described`."""
    metadata = pickle.loads((role / ".metadata").read_bytes())
    shard = role / next(iter(metadata.storage_data.values())).relative_path
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + content)
    for index, place in metadata.storage_data.items():
        if index.fqn.startswith(of) and isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            place.relative_path, place.offset, place.length = shard.name, start, len(content)
            for name, value in described.items():
                setattr(metadata.state_dict_metadata[index.fqn] if name == "chunks" else place, name, value)
    (role / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def test_a_saved_object_that_would_run_code_is_refused(role: Path, touched: Path) -> None:
    hide_an_object(role, saved(Malice(touched)))
    with pytest.raises(CheckpointError, match=r"could run code .* it names posix.mkdir"):
        check_pickles(role.parent)
    assert not touched.exists()


def test_an_object_that_passes_itself_off_as_a_tensor_is_looked_at(role: Path, touched: Path) -> None:
    """An attribute `chunks` of its description once had it taken for a tensor, whose loading cannot run code."""
    hide_an_object(role, saved(Malice(touched)), chunks=[])
    with pytest.raises(CheckpointError, match="could run code"):
        check_pickles(role.parent)
    assert not touched.exists()


def test_an_object_that_is_unpacked_before_it_is_read_is_refused(role: Path) -> None:
    """torch would unpack it first, into something else than what is looked at."""
    hide_an_object(role, saved([1]), transform_descriptors=["stream.zstd/1"])
    with pytest.raises(CheckpointError, match=r"is damaged: .* stored transformed"):
        check_pickles(role.parent)


def test_comparing_logits_runs_no_object_of_a_checkpoint(
    tmp_path: Path, touched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """megatron-core reads a layer's extra state without a check."""
    model, role = save_tiny(tmp_path / "model", TINY), tmp_path / "dist"
    (tmp_path / "prompts").write_text("[5, 3, 0]\n")
    assert main(["convert", "import", str(model), str(role)]) == 0
    hide_an_object(role, saved(Malice(touched)), of="decoder.")
    code = main(["convert", "verify", str(model), str(role), "--prompts", str(tmp_path / "prompts")])
    assert not touched.exists()
    assert code == 2
    assert "could run code of whoever made it: it names posix.mkdir" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_pickles_that_are_none_are_damage(role: Path, damage: str) -> None:
    for file in (".metadata", "common.pt"):
        before = (role / file).read_bytes()
        (role / file).write_bytes({"cut": before[: len(before) // 2], "text": b"hello there", "empty": b""}[damage])
        with pytest.raises(CheckpointError, match=r"damaged|could run code") as caught:
            check_pickles(role.parent)
        assert "\n" not in str(caught.value)
        (role / file).write_bytes(before)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"])
def test_yaml_tags_run_nothing(tag: str, tmp_path: Path, touched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(f"run: {tag} ['{touched}']\n")
    assert main(["config", str(tmp_path / "c.yaml")]) == 2
    (tmp_path / "good.yaml").write_text("model: {path: x}\n")
    assert main(["config", str(tmp_path / "good.yaml"), f"run={tag} ['{touched}']"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert not touched.exists()


def with_code(folder: Path, touched: Path) -> Path:
    """The folder claims classes of its own, whose module touches a file when it is imported."""
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(touched)!r})\nclass Own: pass\n")
    claims = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None], "AutoModelForCausalLM": "own.Own"}
    for file in ("config.json", "tokenizer_config.json"):
        path = folder / file
        tree = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(tree | {"auto_map": claims, "tokenizer_class": "Own", "model_type": "own"}))
    return folder


def test_a_model_folders_own_code_is_not_run(tmp_path: Path, touched: Path) -> None:
    folder = with_code(save_tiny(tmp_path / "model", TINY), touched)
    with pytest.raises(ModelError, match="no tokenizer that can be loaded"):
        load_tokenizer(str(folder))
    with pytest.raises(EngineError, match="cannot be loaded"):
        EmbeddedEngine(folder)
    assert not touched.exists()


def test_a_tokenizer_that_is_code_is_refused_unless_there_is_a_tokenizer_json(tmp_path: Path, touched: Path) -> None:
    """As in the folders of Kimi-K2 and Moonlight."""
    folder = with_code(save_tiny(tmp_path / "model", TINY), touched)
    with pytest.raises(
        ModelError, match=r"names code of the folder \(own\.Own\), which megarl never runs; put a tokenizer.json"
    ):
        load_tokenizer(str(folder))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(str(folder)).encode("b a c") == [1, 0, 2]
    assert not touched.exists()


def test_weights_that_are_a_pickle_are_not_read(tmp_path: Path, touched: Path) -> None:
    folder = save_tiny(tmp_path / "model", TINY)
    (folder / "model.safetensors").unlink()
    torch.save(Malice(touched), folder / "pytorch_model.bin")
    with pytest.raises((EngineError, Exception)) as caught:
        EmbeddedEngine(folder)
    assert not isinstance(caught.value, AssertionError)
    assert not touched.exists()


def test_a_blob_that_is_no_tensor_is_not_unpickled(role: Path, touched: Path) -> None:
    from megarl.checkpoint.format.torch_save_format import find_tensor

    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Malice(touched)))
        archive.writestr("archive/version", "3\n")
    blob.seek(0)
    with pytest.raises(CheckpointError):
        find_tensor(blob, 0, len(blob.getvalue()), torch.float32, (3,))
    assert not touched.exists()


def test_importing_megarl_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("yaml", "torch", "rich", "sitecustomize", "megarl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    program = str(Path(sys.executable).parent / "megarl")
    done = subprocess.run([program, "config"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["../secret.safetensors", "{outside}", "inner/model.safetensors", "a\0b", "\udc80", "..", ""])
def test_an_index_of_weights_names_files_of_its_folder_alone(place: str, tmp_path: Path) -> None:
    """A folder from somebody else could have had a model made of any weights that the user of the run may read."""
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    outside = tmp_path / "secret.safetensors"
    for file in (outside, folder / "inner" / "model.safetensors"):
        save_file({"a": torch.zeros(2)}, file)
    index = {"weight_map": {"a": place.replace("{outside}", str(outside))}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (HFFolder.entries, lambda opened: opened.get_slice("a")):
        with pytest.raises(ModelError, match=r"names the file .*; it must be a file of this folder"):
            read(HFFolder(folder))


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="is no file of weights"):
        HFFolder(tmp_path).entries()
    with pytest.raises(ModelError, match="is no file of weights"):
        read_entries(tmp_path / "model.safetensors")


def test_names_from_files_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_bytes(b'run: {name: a}\n"\\e]0;title\\a\\e[2J\\x7f\\u202e": 1\n')
    assert main(["config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "\\x1b]0;title\\x07\\x1b[2J\\x7f\\u202e is not a config field" in said
    assert all(character.isprintable() or character == "\n" for character in said)


@pytest.mark.parametrize("count", [9, 30])
def test_aliases_that_explode_are_refused_at_once(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine lines of nine aliases each are 387 million entries when they are written out."""
    lines = ['a0: &a0 ["lol", "lol"]']
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, count)]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    (tmp_path / "merged.yaml").write_text(
        "\n".join(["x0: &x0 {a: 1}", *(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}" for n in range(1, 8))])
    )
    for file in ("c.yaml", "merged.yaml"):
        assert main(["config", str(tmp_path / file)]) == 2
        assert len(capsys.readouterr().err) < 3000


ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]) + "\n"
MERGES = "\n".join(["x0: &x0 {a: 1}", *(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}" for n in range(1, 8))]) + "\n"
HOSTILE = {
    "aliases": ALIASES, "merges": MERGES, "deep": "a: " + "[" * 10_000, "mapping": "[3]: 4\n", "tag": "!!python/name:os.mkdir\n"
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.timeout(60)
def test_yaml_of_others_is_read_by_the_loader_that_has_limits(kind: str, role: Path, touched: Path) -> None:
    """A checkpoint's config, which a resume compares and a conversion looks into, and the card of a data set."""
    text = HOSTILE[kind]
    checkpoint = touched.parent / "of_others"
    checkpoint.mkdir()
    (checkpoint / "config.yaml").write_text(text)
    seal(checkpoint, {})
    [said] = differences_at_resume(checkpoint, smallest.config(), 1)
    assert said.startswith("the config has changed since the checkpoint, whose own cannot be read: ")
    assert len(said) < 1000
    assert read_configurations(f"---\nconfigs: [{{config_name: a}}]\n{text}\n---\n") == []
    run = touched.parent / "run"
    inside = run / "checkpoints" / "step_000001" / "policy"
    shutil.copytree(role, inside)
    (run / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"nothing says which model .*config\.yaml' is not valid YAML"):
        open_dist(inside)


def test_no_other_loader_reads_yaml() -> None:
    package = Path(megarl.__file__).parent
    bare = re.compile(r"\byaml\.(\w*_load|load|load_all|\w*Loader)\b")
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if bare.search(file.read_text())}
    assert found == {"config/yaml_tree.py"}


def test_what_unpickles_is_known_and_looked_at_first() -> None:
    """`roles.py` looks at a run's checkpoint before its ranks load it, `logits.py` before its process does."""
    package = Path(megarl.__file__).parent
    unchecked = r"dist_checkpointing\.load\w*\(|FileSystemReader\(|torch\.load\((?!.*weights_only=True)|pickle\.loads?\("
    reads = re.compile(unchecked)
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if reads.search(file.read_text())}
    # what the scoring process itself sends, what the ranks of a group send each other, and senders that have a server's token
    own = {"rewards/sandbox/judge_child.py", "platform/peer_memory.py", "weights/intake_ranks.py"}
    assert found - own == {"convert/logits.py", "megatron/box_reader.py", "megatron/role_checkpoint.py"}
    for looks in ("workers/roles.py", "convert/logits.py"):
        assert "check_pickles(" in (package / looks).read_text()
