"""A checkpoint of adapters, written by ranks, becomes the PEFT folder that these ranks write themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megarl.cli import main
from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from tests.families import build_folder
from tests.world import World

LORA = {"rank": 3, "alpha": 5.0, "rslora": True}
WITH_OUTPUT = ("all-linear", "lm_head")


def save(rank: int, world_size: int, folder: Path, step: Path, value_head: bool) -> None:
    """Two updates, then the checkpoint of the policy and its export."""
    from megarl.megatron.hf_export import write_role
    from tests.megatron.moments import role_in, update
    from tests.megatron.saving import save_role

    lora = Lora(3, 5.0, rslora=True, targets=WITH_OUTPUT[: 1 if value_head else 2])
    role = role_in(Layout(tp=2), folder, lora=lora, lora_seed=3, head="value" if value_head else "log_probs")
    if not value_head:
        update(role, rank)
        update(role, rank)
    save_role(role, str(step / "policy"))
    write_role(role, str(step / "exported"), adapters=True)


@pytest.mark.parametrize("value_head", [False, True])
def test_a_checkpoint_of_adapters_is_exported_as_the_run_would(tmp_path: Path, value_head: bool) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    build_folder("qwen2", folder)
    step = run / "checkpoints" / "step_000002"
    step.mkdir(parents=True)
    with World(2) as world:
        world.call(save, folder, step, value_head, size=2)
    targets = list(WITH_OUTPUT[: 1 if value_head else 2])
    config = {"model": {"path": str(folder)}, "policy": {"lora": LORA | {"sync": "adapters", "targets": targets}}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["convert", "export", str(step / "policy"), str(tmp_path / "out")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (step / "exported" / name).read_bytes()
    chosen = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert ("lm_head" in chosen) is not value_head


def test_a_checkpoint_whose_scale_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    build_folder("qwen2", folder)
    with World(2) as world:
        world.call(save, folder, tmp_path, False, size=2)
    arguments = [str(tmp_path / "policy"), str(tmp_path / "out"), "--hf-config", str(folder)]
    assert main(["convert", "export", *arguments]) == 2
    assert "holds adapters alone, whose scale is in the config of their run" in capsys.readouterr().err
    assert main(["convert", "reshard", str(tmp_path / "policy"), str(tmp_path / "out")]) == 2
    assert "`megarl convert export` writes them as a PEFT folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
