"""Tar files of adapters, and files encrypted for who asked for them."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from megarl.options.serve.downloads import adapter_files, encrypt_files, tar_bytes, tar_of
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.values import RequestError

PATH = CheckpointPath("a:train:0", "weights", "final")


def files_in(folder: Path, sizes: dict[str, int]) -> dict[str, Path]:
    for index, (name, size) in enumerate(sizes.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes([index + 1]) * size)
    return {name: folder / name for name in sizes}


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 2**20, 2**20 + 1])
def test_a_tar_file_has_every_byte_and_the_announced_length(tmp_path: Path, size: int) -> None:
    files = files_in(tmp_path, {"adapter_config.json": 3, "adapter_model.safetensors": size, "x" * 150 + "/ä.bin": 5})
    content = b"".join(tar_of(files, 1_800_000_000.0))
    assert len(content) == tar_bytes(files, 1_800_000_000.0)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {entry.name: tar.extractfile(entry) for entry in tar.getmembers()}
        assert {entry.mtime for entry in tar.getmembers()} == {1_800_000_000}
        assert {name: file.read() for name, file in found.items() if file} == {
            name: path.read_bytes() for name, path in files.items()
        }


def test_the_adapters_of_a_training_checkpoint_are_those_nearest_to_its_folder() -> None:
    files = {
        "state/0.bin": 1,
        "adapters/adapter_config.json": 1,
        "adapters/adapter_model.safetensors": 1,
        "z/old/adapter_config.json": 1,
    }
    assert adapter_files(PATH, files) == {
        "adapter_config.json": "adapters/adapter_config.json",
        "adapter_model.safetensors": "adapters/adapter_model.safetensors",
    }
    with pytest.raises(RequestError, match="has no adapters to download"):
        adapter_files(PATH, {"state/0.bin": 1, "my_adapter_config.json": 1})


def test_encrypted_files_open_for_their_reader_alone(tmp_path: Path) -> None:
    pyrage = pytest.importorskip("pyrage")
    reader, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    files = files_in(tmp_path, {"adapter_config.json": 3, "deep/model.safetensors": 100_000})
    plain = {name: path.read_bytes() for name, path in files.items()}
    encrypt_files(tmp_path, [str(reader.to_public())])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "adapter_config.json.age",
        "deep/model.safetensors.age",
    ]
    for name, content in plain.items():
        encrypted = (tmp_path / f"{name}.age").read_bytes()
        assert pyrage.decrypt(encrypted, [reader]) == content
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(encrypted, [other])


def test_wrong_recipients_are_refused_before_anything_is_encrypted(tmp_path: Path) -> None:
    pyrage = pytest.importorskip("pyrage")
    files = files_in(tmp_path, {"a": 3})
    good = str(pyrage.x25519.Identity.generate().to_public())
    for recipients, sentence in (
        ([], "has 0 entries"),
        ([good] * 33, "has 33 entries"),
        ([good, "age1no"], "'age1no', which is neither"),
    ):
        with pytest.raises(RequestError, match=sentence):
            encrypt_files(tmp_path, recipients)
    assert files["a"].exists()


def test_without_its_package_encryption_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(RequestError, match="needs the package pyrage on the server: install it, or leave them out"):
        encrypt_files(tmp_path, ["age1x"])
