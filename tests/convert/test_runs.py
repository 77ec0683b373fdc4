"""Checkpoints of runs, with their optimizer state and critics, and the real model: what users convert."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.config.layout import Layout
from megarl.convert.sources import open_dist
from megarl.models.hf_folder import HFFolder
from tests.convert.conftest import assert_same_tensors, exported, imported, resharded, tensors
from tests.megatron.saving import load_role, save_role
from tests.world import World

LAYOUT = Layout(tp=2, pp=2)


def save_run(rank: int, world_size: int, path: str, step: str) -> dict[str, dict[str, torch.Tensor]]:
    """A policy and a critic after an update each, saved as a run saves them; their tensors as they are exported."""
    from megarl.data.stream import Response, Unit
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(LAYOUT, seed=1)
    batch = [[Unit(torch.tensor([1, 2, 3]), [Response(0, torch.tensor([4, 5, 6]), torch.ones(3, dtype=torch.bool))])]]
    found = {}
    heads: tuple[Any, ...] = (("policy", "log_probs"), ("critic", "value"))
    for name, head in heads:
        role = RankModel(ModelOptions(path, LAYOUT, head=head), OptimizerOptions(lr=1e-2))
        for _ in range(2):
            role.update(batch, lambda output, stream: (output.square().sum() + output.sum(), {}))
        save_role(role, f"{step}/{name}")
        found[name] = {tensor: value.clone() for tensor, value in role.export()}
    return found


@pytest.fixture(scope="module")
def run(world: World, families: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The step folder of a run that started from the tiny tied Llama, and what its roles export."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    step = folder / "checkpoints" / "step_000002"
    step.mkdir(parents=True)
    source = families("llama-tied")
    (folder / "config.yaml").write_text(f"model: {{path: '{source}'}}\ncritic: {{init_from: null}}\n")
    answers = world.call(save_run, str(source), str(step), size=4)
    weights = {name: {k: v for answer in answers for k, v in answer[name].items()} for name in ("policy", "critic")}
    return {"step": step, "weights": weights, "source": source}


def test_a_runs_policy_is_exported_with_its_model_found_by_the_runs_own_config(run: dict[str, Any], tmp_path: Path) -> None:
    source = open_dist(run["step"] / "policy")
    assert source.left_out() == []
    assert source.training_state()
    assert all(name.startswith("optimizer.") for name in source.training_state())
    exported(run["step"] / "policy", tmp_path / "hf")
    found, expected = tensors(tmp_path / "hf"), run["weights"]["policy"]
    assert found.keys() == expected.keys()
    before = tensors(run["source"])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["model.norm.weight"], before["model.norm.weight"])
    assert HFFolder(tmp_path / "hf").config == HFFolder(run["source"]).config


def test_training_state_is_not_spoken_of_as_weights_that_are_left_out(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", "export", str(run["step"] / "policy"), str(tmp_path / "hf")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    entries = len(open_dist(run["step"] / "policy").training_state())
    assert f"training state ({entries} entries, such as optimizer." in said
    assert f"is no part of a model: it stays in {command[2]}\n" in said
    assert "left out" not in said
    assert cli.main(command) == 2  # the folder is there: nothing is said but why
    assert "training state" not in capsys.readouterr().out


def test_a_runs_critic_becomes_a_sequence_classifier_that_imports_and_reshards(run: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    exported(run["step"] / "critic", tmp_path / "hf")
    found, expected = tensors(tmp_path / "hf"), run["weights"]["critic"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["score.weight"].shape == (1, 32)
    assert found["score.weight"].abs().sum() > 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.score.weight, expected["score.weight"])
    imported(tmp_path / "hf", tmp_path / "dist", Layout(tp=4))
    resharded(tmp_path / "dist", tmp_path / "two", Layout(tp=2, pp=2))
    exported(tmp_path / "two", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")


def test_a_resharded_run_checkpoint_loads_into_a_role(world: World, run: dict[str, Any], tmp_path: Path) -> None:
    resharded(run["step"] / "policy", tmp_path / "one", Layout())
    [found] = world.call(load_and_export, str(run["source"]), str(tmp_path / "one"), size=1)
    assert found.keys() == run["weights"]["policy"].keys()
    assert all(torch.equal(found[name], value) for name, value in run["weights"]["policy"].items())


def load_and_export(rank: int, world_size: int, path: str, checkpoint: str) -> dict[str, torch.Tensor]:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    role = RankModel(ModelOptions(path, Layout(), trainable=False))
    load_role(role, checkpoint)
    return {name: value.clone() for name, value in role.export()}


def test_a_run_whose_model_has_moved_asks_for_it(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run["step"].parents[1] / "config.yaml"
    before = config.read_text()
    config.write_text("model: {path: models/gone}\n")
    arguments = ["convert", "export", str(run["step"] / "policy"), str(tmp_path / "hf")]
    assert cli.main(arguments) == 2
    assert "started from 'models/gone'" in capsys.readouterr().err
    assert cli.main([*arguments, "--hf-config", str(run["source"])]) == 0
    assert tensors(tmp_path / "hf").keys() == run["weights"]["policy"].keys()
    config.write_text(before)


def test_the_tool_is_the_command(run: dict[str, Any]) -> None:
    tool = Path(__file__).parents[2] / "tools" / "checkpoint_convert"
    answer = subprocess.run(
        [sys.executable, str(tool), "inspect", str(run["step"] / "policy")], check=True, capture_output=True, text=True
    )
    assert "optimizer state" in answer.stdout


# test_round_trip.py has every byte, test_verify.py the logits, and tests/megatron/test_real_model.py this model in ranks
@pytest.mark.exhaustive
@pytest.mark.real
def test_the_real_model_survives_import_verify_and_export_and_writes_the_same_text(
    real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "prompts").write_text("The capital of France is\nOnce upon a time\n")
    commands: tuple[tuple[Any, ...], ...] = (
        ("import", real_model, tmp_path / "dist", "--layout", "tp=3,pp=2"),
        ("verify", real_model, tmp_path / "dist", "--prompts", tmp_path / "prompts"),
        ("export", tmp_path / "dist", tmp_path / "back"),
    )
    for command in commands:
        assert cli.main(["convert", *map(str, command)]) == 0
    assert "same best token 100.0%" in capsys.readouterr().out
    assert_same_tensors(tmp_path / "back", real_model)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (real_model / file).read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == HFFolder(real_model).config
    texts = []
    for folder in (real_model, tmp_path / "back"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        texts.append(tokenizer.decode(answer[0]))
    assert texts[0] == texts[1]
