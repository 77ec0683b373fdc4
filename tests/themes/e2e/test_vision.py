"""Runs that see, from rows with pictures to exported weights, with real ranks and real SGLang servers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from megarl.cli import main
from megarl.config import Config, SupervisedConfig, engine_kinds, parse_config
from megarl.config.load import parse_supervised_config
from megarl.data.sample import Sample, read_record
from megarl.errors import ConfigError
from megarl.observe import read_metrics
from megarl.rollout.engines import registry
from megarl.rollout.engines.registry import check_engine
from megarl.trainers.rl.train import train as train_rl
from megarl.trainers.supervised.train import train as train_supervised
from tests.rollout.test_sglang_seeing import served_folder
from tests.themes.e2e.records import curve, tensors
from tools.model import tiny_vision

pytestmark = pytest.mark.usefixtures("local_ray")
SHAPES = str(Path(__file__).parents[3] / "examples" / "vision" / "shapes.py") + ":count_shapes"


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of examples/vision before its warm-up."""
    folder = tmp_path_factory.mktemp("models") / "tiny-vision"
    tiny_vision.make(folder)
    return folder


def rl_config(model: Path, folder: Path, **sections: Any) -> Config:
    rows = {"source": "python", "name": SHAPES, "args": {"rows": 32}}
    reward = folder / "reward.py"  # tells almost any two responses apart
    reward.write_text("def reward(samples):\n    return [float(sum(sample.response_ids) % 7) for sample in samples]\n")
    tree: dict[str, Any] = {
        "run": {"name": "run", "folder": str(folder), "steps": 2, "save_every": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"layout": {"dp": 2}, "threads_per_rank": 1, "optimizer": {"lr": 0.01}, "max_tokens_per_micro_batch": 256},
        "data": {"train": rows, "prompt_key": "problem", "chat_template": "never", "max_prompt_tokens": 32},
        "rollout": {"engine": "sglang", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4, "threads": 1},
        "rewards": [{"name": f"{reward}:reward"}],
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


def towers(folder: Path) -> dict[str, torch.Tensor]:
    """The tower's tensors in a folder's file, by the name that they have in it."""
    return {
        name.split("visual.")[1]: value for name, value in load_file(folder / "model.safetensors").items() if "visual." in name
    }


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [
        ({"layout": {"tp": 2, "sequence_parallel": True}, "freeze": ["vision"]}, {}),
        pytest.param({"layout": {"pp": 2}}, {"name": "ppo"}, marks=pytest.mark.exhaustive),
        pytest.param({"layout": {"cp": 2}}, {"name": "reinforce_plus_plus"}, marks=pytest.mark.exhaustive),
    ],
    ids=["frozen tower", "a critic that sees", "context parallel"],
)
def test_engines_and_trainer_see_the_same_and_frozen_towers_keep_their_bytes(
    policy: dict[str, Any], algorithm: dict[str, Any], seeing_model: Path, tmp_path: Path
) -> None:
    own = {"threads_per_rank": 1, "optimizer": {"lr": 0.01}, "max_tokens_per_micro_batch": 256}
    config = rl_config(seeing_model, tmp_path, policy=own | policy, algorithm=algorithm)
    train_rl(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    assert rows[0]["policy/grad_norm"] > 0
    [checkpoint] = (Path(config.run_folder) / "checkpoints").glob("step_*/policy")
    out = tmp_path / "exported"
    assert main(["convert", "export", str(checkpoint), str(out)]) == 0
    before, after = towers(seeing_model), towers(out)
    assert before.keys() == after.keys()
    frozen = "vision" in policy.get("freeze", ())
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (frozen and not name.startswith("merger.")), name
    assert (out / "preprocessor_config.json").read_bytes() == (seeing_model / "preprocessor_config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.exhaustive  # its engine and its layouts are in tests/rollout/test_sglang_seeing.py and tests/themes/parallel
def test_a_model_of_another_make_with_experts_is_trained_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_folder("glm4v_moe", tmp_path / "model", monkeypatch)
    own = {"layout": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "threads_per_rank": 1, "optimizer": {"lr": 0.01}}
    own["max_tokens_per_micro_batch"] = 256
    config = rl_config(model, tmp_path, policy=own | {"freeze": ["vision"]})
    train_rl(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    assert rows[0]["policy/grad_norm"] > 0
    [checkpoint] = (Path(config.run_folder) / "checkpoints").glob("step_*/policy")
    assert main(["convert", "export", str(checkpoint), str(tmp_path / "exported")]) == 0
    after = towers(tmp_path / "exported")
    for name, value in towers(model).items():
        assert torch.equal(value, after[name]) == (not name.startswith(("merger.", "downsample."))), name


@pytest.mark.exhaustive  # its layouts are in tests/themes/parallel, its answers in tests/rollout/test_embedded_seeing.py
def test_a_model_whose_tokens_have_one_position_is_trained_beside_the_embedded_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served_folder("kimi_k25", tmp_path / "model", monkeypatch)
    embedded = {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4}
    layout = {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}
    config = rl_config(model, tmp_path, policy={"layout": layout, "freeze": ["vision"]}, rollout=embedded)
    train_rl(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    [checkpoint] = (Path(config.run_folder) / "checkpoints").glob("step_*/policy")
    assert main(["convert", "export", str(checkpoint), str(tmp_path / "exported")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "exported"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.startswith(("vision_tower.", "mm_projector.")):
            assert torch.equal(value, after[name]) == name.startswith("vision_tower."), name


@pytest.mark.exhaustive  # the run in an environment below, and tests/megatron/test_seeing.py for checkpoints with a tower
def test_a_resumed_run_on_pictures_is_the_uninterrupted_one(seeing_model: Path, tmp_path: Path) -> None:
    """Four steps of RLOO in one run, and in one that stops after two and goes on."""
    embedded = {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4}
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        for steps in stops:
            config = rl_config(seeing_model, tmp_path, algorithm={"advantage": "rloo"}, rollout=embedded)
            changes = {"name": name, "steps": steps, "resume": "auto"}
            train_rl(config.model_copy(update={"run": config.run.model_copy(update=changes)}))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert [row["step"] for row in curve(whole)] == [1, 2, 3, 4]
    assert all(row["policy/grad_norm"] > 0 for row in curve(whole))
    assert curve(parts) == curve(whole)
    expected, found = (tensors(folder / "checkpoints" / "step_000004" / "policy") for folder in (whole, parts))
    assert found.keys() == expected.keys()
    assert any("visual" in key for key in expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def walk_config(model: Path, folder: Path, name: str, **sections: Any) -> Config:
    """The environment of examples/vision/walk.yaml, which shows a picture after every turn."""
    folder.mkdir(exist_ok=True)
    walk = str(Path(SHAPES).parent / "walk.py")
    rows = {"source": "python", "name": f"{walk}:walks", "args": {"last": 16}}
    data = {"train": rows, "prompt_key": "question", "chat_template": "always", "max_prompt_tokens": 32}
    rollout = {
        "engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 96, "threads": 1,
        "episode": {"kind": "environment", "tools": [f"{walk}:Walk"], "max_turns": 3},
    }  # fmt: skip
    run = {"name": name, "folder": str(folder), "steps": 2, "save_every": 1, "resume": "auto"}
    return rl_config(
        model, folder, run=run | sections.pop("run", {}), data=data, rollout=rollout | sections.pop("rollout", {}), **sections
    )


def pictures_told(config: Config) -> list[int]:
    """Of every logged sample how many pictures its environment showed between turns."""
    lines = (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()
    samples = [
        read_record(Sample, {n: v for n, v in json.loads(line).items() if n not in ("step", "training")}) for line in lines
    ]
    for sample in samples:
        assert all((Path(config.run_folder) / "media" / f"{media.digests[0]}.png").is_file() for media in sample.media)
    return [len(sample.response_media) for sample in samples]


# tests/rollout/test_sglang_seeing.py asks SGLang about such pictures, tests/themes/parallel/test_seeing.py has the trainer's
# side, and the test below a run on another engine
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"tp": 2, "sequence_parallel": True}],
    ids=["dp2", "tp2+sp"],
)
def test_sglang_and_the_trainer_see_the_same_pictures_between_turns(
    layout: dict[str, Any], seeing_model: Path, tmp_path: Path
) -> None:
    own = {"layout": layout, "threads_per_rank": 1, "optimizer": {"lr": 0.01}, "max_tokens_per_micro_batch": 256}
    config = walk_config(seeing_model, tmp_path, "run", rollout={"engine": "sglang"}, policy=own | {"share_prefix": True})
    train_rl(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    assert rows[0]["policy/grad_norm"] > 0
    assert sum(row["episode/turns"] for row in rows) > 2 * 16  # further turns, each behind a picture that was told
    assert max(pictures_told(config)) <= 2


def as_it_was(whole: Path, parts: Path, after: int) -> None:
    """Make `parts` the folder of a run that was killed behind the checkpoint of a step; later ones it does not have."""
    shutil.copytree(whole, parts)
    for checkpoint in (parts / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > after:
            shutil.rmtree(checkpoint)
    assert (parts / "checkpoints" / f"step_{after:06}" / "state.json").exists()


@pytest.mark.slow
def test_a_resumed_run_in_an_environment_with_pictures_is_the_same(seeing_model: Path, tmp_path: Path) -> None:
    """Three steps in one run, and in one that goes on from the checkpoint of the first."""
    train_rl(walk_config(seeing_model, tmp_path / "whole", "walk", run={"steps": 3, "keep_checkpoints": 0}))
    as_it_was(tmp_path / "whole" / "walk", tmp_path / "parts" / "walk", after=1)
    train_rl(walk_config(seeing_model, tmp_path / "parts", "walk", run={"steps": 3}))
    whole, parts = (list(read_metrics(tmp_path / name / "walk" / "metrics.jsonl")) for name in ("whole", "parts"))
    exact = ("policy/grad_norm", "reward/mean", "mismatch/log_prob_max")
    assert [[row[name] for name in exact] for row in whole] == [[row[name] for name in exact] for row in parts]


def supervised_config(model: Path, folder: Path, steps: int) -> SupervisedConfig:
    return parse_supervised_config(
        {
            "run": {"name": "sft", "folder": str(folder), "steps": steps, "save_every": 2, "resume": "auto"},
            "model": {"path": str(model), "dtype": "float32"},
            "policy": {"layout": {"dp": 2}, "threads_per_rank": 1, "optimizer": {"lr": 0.01, "betas": [0.9, 0.95]}},
            "objective": {"name": "sft"},
            "data": {
                "train": {"source": "python", "name": SHAPES, "args": {"rows": 8}},
                "rows_per_step": 8,
                "prompt_key": "problem",
                "response_key": "answer",
                "chat_template": "never",
                "max_tokens": 64,
            },
        }
    )


@pytest.mark.slow
def test_supervised_losses_are_transformers_and_a_resumed_run_is_the_same(
    seeing_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four full-batch updates in one run, and in one that goes on from the checkpoint of the second."""
    train_supervised(supervised_config(seeing_model, tmp_path / "whole", 4))
    as_it_was(tmp_path / "whole" / "sft", tmp_path / "parts" / "sft", after=2)
    train_supervised(supervised_config(seeing_model, tmp_path / "parts", 4))
    whole, parts = (list(read_metrics(tmp_path / name / "sft" / "metrics.jsonl")) for name in ("whole", "parts"))
    exact = ("train/loss", "train/grad_norm")
    assert [[row[name] for name in exact] for row in whole] == [[row[name] for name in exact] for row in parts]

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(seeing_model, dtype=torch.float32, attn_implementation="eager")
    given, answers = tiny_vision.inputs(AutoTokenizer.from_pretrained(seeing_model), tiny_vision.examples(0, 8))
    with FlopCounterMode(display=False) as counter:
        log_probs = model(**given, logits_to_keep=2).logits.log_softmax(-1)
    loss = -(log_probs[:, 0].gather(1, answers[:, None])[:, 0] + log_probs[:, 1, tiny_vision.EOS]).sum() / 16
    loss.backward()
    of_tower = sum(counter.get_flop_counts()[f"{type(model).__name__}.model.visual"].values())
    # of a forward pass; torch counts all pairs of a causal decoder's attention
    assert whole[0]["policy/tower_flops_share"] == pytest.approx(of_tower / counter.get_total_flops(), rel=0.02)
    assert all(0 < row["policy/tower_forward_s"] < row["time/update_s"] for row in whole)
    assert re.search(r"  tower 0\.\d+  ", capsys.readouterr().out)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert whole[0]["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert whole[0]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sglang", pytest.param("embedded", marks=pytest.mark.exhaustive)])
def test_a_run_on_native_videos_sees_them_alike_in_engine_and_trainer(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a video in the model's own kind and a picture, on two ranks of Qwen3-VL."""
    model = served_folder("qwen3_vl", tmp_path / "model", monkeypatch)
    size = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}, "patch_size": 16, "temporal_patch_size": 2}
    (model / "video_preprocessor_config.json").write_text(json.dumps(size | {"merge_size": 2}))
    frames = [str(model / "media" / f"frame{number}.png") for number in range(4)]
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"problem": f"w{n} <video> w{n + 1} <image> w5", "videos": [frames[n % 2 :]], "images": frames[:1]} for n in range(8)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "train": {"source": "jsonl", "path": str(rows)}, "prompt_key": "problem", "chat_template": "never",
        "max_prompt_tokens": 128, "video": "native",
    }  # fmt: skip
    rollout = {"engine": engine, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "threads": 1}
    config = rl_config(model, tmp_path, data=data, rollout=rollout)
    train_rl(config)
    found = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in found] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 and row["policy/grad_norm"] > 0 for row in found)
    records = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    kinds = {(media["kind"], media["grid"][0]) for record in records for media in record["media"]}
    assert kinds == {("video", 1), ("image", 1)}


@pytest.mark.parametrize(("limit", "pixels"), [("min_pixels", 700), ("max_pixels", 10**5)])
def test_limits_that_an_engine_would_not_keep_are_refused(limit: str, pixels: int, seeing_model: Path, tmp_path: Path) -> None:
    sentence = rf"^data.{limit} is {pixels}, which SGLang does not do: .* it must be from 784 to 50176$"
    with pytest.raises(ConfigError, match=sentence):
        check_engine(rl_config(seeing_model, tmp_path, data={limit: pixels}), "cpu")


def test_native_videos_are_refused_with_engines_that_compute_them_otherwise(
    seeing_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("sglang", "embedded"):
        check_engine(rl_config(seeing_model, tmp_path, data={"video": "native"}, rollout={"engine": engine}), "cpu")
    blind = replace(engine_kinds.SGLANG, sees_videos=False)  # as an engine of a user's own may be
    monkeypatch.setattr(registry, "capabilities_of", lambda rollout: blind)
    sentence = r"^data.video is 'native', which is not how rollout.engine = 'sglang' computes videos; it must be 'frames', or"
    with pytest.raises(ConfigError, match=sentence):
        check_engine(rl_config(seeing_model, tmp_path, data={"video": "native"}), "cpu")


def test_engines_that_do_not_see_are_refused(seeing_model: Path, tmp_path: Path) -> None:
    elsewhere = {"weight_transport": "folder", "servers": {"urls": ["http://engine:1"]}}
    config = rl_config(seeing_model, tmp_path, rollout=elsewhere)
    with pytest.raises(ConfigError, match=r"^rollout.engine is 'sglang', which .* pictures.*; it must be 'embedded', or"):
        check_engine(config, "cpu")
