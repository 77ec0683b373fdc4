"""What a role's checkpoint may lack, and what the user is told where it lacks something else."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.errors import CheckpointError
from megarl.megatron import scaling_state
from tests.families import build_folder
from tests.megatron.moments import role_in
from tests.megatron.saving import load_role, save_role
from tests.world import World


def entries_of_other_layers(rank: int, world_size: int, folder: Path, checkpoint: str) -> str:
    """Save a role and ask the checkpoint for objects that its layers do not have; the error that is one."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from megarl.megatron.box_reader import BoxReader

    role = role_in(Layout(), folder)
    save_role(role, checkpoint)
    reader = BoxReader(checkpoint)
    scales = {f"norm._extra_state{number}": _object(f"decoder.norm._extra_state{number}") for number in ("", 1)}
    assert reader.kept(scales) == {}
    generators = ShardedObject("rng", {}, (1,), (0,), replica_id=0)
    assert reader.kept(scales | {"rng": generators}) == {"rng": generators}
    with pytest.raises(CheckpointError) as error:
        reader.kept(scales | {"router.state": _object("decoder.router.state")})
    return str(error.value)


def _object(key: str) -> object:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(key, torch.empty(0), (1,), (0,), replica_id=0)


def test_only_the_state_of_fp8_scaling_may_be_missing(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    sentence = world.call(entries_of_other_layers, tmp_path / "model", str(tmp_path / "checkpoint"), size=1)[0]
    assert sentence == f"'{tmp_path}/checkpoint' has no 'decoder.router.state': it is a checkpoint of another model or role"


def read_without_generators(rank: int, world_size: int, folder: Path, checkpoint: str) -> str:
    from megarl.megatron import role_checkpoint

    role = role_in(Layout(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(role_checkpoint, "sharded_rng_state", lambda: _object("something else"))
        save_role(role, checkpoint)
    with pytest.raises(CheckpointError) as error:
        load_role(role, checkpoint)
    return str(error.value)


def test_what_torch_cannot_read_is_one_sentence(world: World, tmp_path: Path) -> None:
    """torch raises a BaseException, which would end a rank without an answer."""
    build_folder("llama", tmp_path / "model")
    sentence = world.call(read_without_generators, tmp_path / "model", str(tmp_path / "checkpoint"), size=1)[0]
    assert sentence.startswith(f"'{tmp_path}/checkpoint' cannot be read: ")
    assert "rng" in sentence
    assert "\n" not in sentence


def read_another_model(rank: int, world_size: int, folders: list[Path], checkpoint: str) -> str:
    from megatron.core import parallel_state

    save_role(role_in(Layout(), folders[0]), checkpoint)
    parallel_state.destroy_model_parallel()
    with pytest.raises(CheckpointError) as error:
        load_role(role_in(Layout(), folders[1]), checkpoint)
    return str(error.value)


def test_a_tensor_that_is_missing_is_one_sentence(world: World, tmp_path: Path) -> None:
    folders = [tmp_path / family for family in ("llama", "mixtral")]
    for folder in folders:
        build_folder(folder.name, folder)
    sentence = world.call(read_another_model, folders, str(tmp_path / "checkpoint"), size=1)[0]
    assert sentence.startswith(f"'{tmp_path}/checkpoint' has no tensor '")
    assert "\n" not in sentence


class Code:
    """Unpickled, it would run something, that no other test replaces (Ray's progress bars replace `print`)."""

    def __reduce__(self) -> Any:
        return os.getlogin, ()


def in_a_storage(content: object) -> object:
    """Pickled, it says that `content` is a tensor's storage."""
    saved = io.BytesIO()
    torch.save(content, saved)

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (saved.getvalue(),)

    return Storage()


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({"recipe": Code()}, "it names posix.getlogin"),
        ({"scale_fwd": in_a_storage(Code())}, "made of something else than numbers"),
        (b"no pickle", "is no state of FP8 scaling"),
    ],
    ids=["code", "code in a tensor", "no pickle"],
)
def test_a_state_of_fp8_scaling_runs_no_code(
    state: object, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformer Engine unpickles it without asking, once it is told that it may."""
    monkeypatch.delenv(scaling_state.PERMISSION, raising=False)
    content = state if isinstance(state, bytes) else pickle.dumps(state)
    entry = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(CheckpointError) as error, scaling_state.permitted({"decoder.norm._extra_state": entry}, "somewhere"):
        pass
    assert str(error.value).startswith("'somewhere' is not read, as its 'decoder.norm._extra_state' is no state of FP8 scaling")
    assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert not capsys.readouterr().out
    assert scaling_state.PERMISSION not in os.environ


def test_what_is_a_state_of_fp8_scaling_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scaling_state.PERMISSION, "0")
    content = pickle.dumps({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}})
    state = {"a._extra_state": torch.frombuffer(bytearray(content), dtype=torch.uint8), "b._extra_state": torch.empty(0)}
    with scaling_state.permitted(state, "somewhere"):
        assert os.environ[scaling_state.PERMISSION] == "1"
    assert os.environ[scaling_state.PERMISSION] == "0"
