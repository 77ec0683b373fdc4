"""What a plan assumes of prompts' pictures, and how memory and seconds follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl import cli
from megarl.config import Config, load_config
from megarl.models.flops import FlopsModel, picture_flops
from megarl.models.shape import ModelShape
from megarl.options.pictures.plan_pictures import prompts_at_once, prompts_computed
from megarl.options.pictures.plan_towers import tower_activations
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import CapacityPlan, lengths_of, make_plan
from megarl.planning.prompt_pictures import pictures_of

ROOT = Path(__file__).parents[2]
PLAN = "tests/planning/plans/qwen2.5-vl-7b-grpo-8xh100.yaml"
H100 = gpu_named("h100")


def config_of(*overrides: str, path: str = PLAN) -> Config:
    return load_config(path, overrides)


def plan_of(*overrides: str, **lengths: Any) -> CapacityPlan:
    config = config_of(*overrides)
    return make_plan(config, H100, lengths=lengths_of(config, **lengths))


def parts(plan: CapacityPlan, name: str) -> dict[str, float]:
    return dict(next(phase for phase in plan.times.phases if phase.name == name).parts)


def test_without_rows_a_prompt_has_one_picture_of_half_the_largest_size_and_memory_is_for_the_largest() -> None:
    found = pictures_of(config_of())
    assert found.grids == (((1, 50, 50),),)  # 625 tokens of 28 x 28 pixels are 490,000
    assert found.most == ((1, 70, 72),)  # 1,260 are 987,840 of 1,000,000
    assert "data.max_pixels" in found.source
    assert pictures_of(config_of("data.max_pixels=null")).most_patches <= 2048 * 4
    assert "the longest prompt" in pictures_of(config_of("data.max_pixels=null")).source
    assert pictures_of(config_of("data.image_key=null")).per_prompt == 0
    assert pictures_of(config_of(path="tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml")).per_prompt == 0


def test_a_config_that_names_a_key_of_videos_alone_is_planned_with_their_frames() -> None:
    model = "model.path=examples/models/qwen2-vl-7b"
    found = pictures_of(config_of(model, path="examples/vision/open_r1_video.yaml"))
    assert found.per_prompt == 16
    assert found.most_patches == 16 * 784  # 153,664 pixels a frame
    assert (
        pictures_of(config_of(model, "data.max_prompt_tokens=1024", path="examples/vision/open_r1_video.yaml")).most_patches
        <= 4096
    )


def test_the_limits_of_the_models_image_processor_count_where_the_config_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((ROOT / "examples/models/qwen2.5-vl-7b/config.json").read_text())
    for settings in ({"max_pixels": 100352}, {"size": {"shortest_edge": 3136, "longest_edge": 100352}}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        found = pictures_of(config_of(f"model.path={tmp_path}", "data.max_pixels=null"))
        assert found.most == ((1, 22, 22),)  # 11 x 11 tokens, the squarest of at most 128
        assert "preprocessor_config.json" in found.source


def test_limits_that_count_both_frames_of_a_patch_are_halved(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((ROOT / "examples/models/qwen2.5-vl-7b/config.json").read_text())
    settings = {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 6272, "longest_edge": 200704}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert pictures_of(config_of(f"model.path={tmp_path}", "data.max_pixels=null")).most == ((1, 22, 22),)


def rows(folder: Path) -> str:
    """Rows with two pictures, one in its messages as a text, and none; the first is larger than the limit."""
    for name, size in {"large": (2000, 1000), "small": (280, 140)}.items():
        Image.new("RGB", size).save(folder / f"{name}.png")
    message = json.dumps([{"role": "user", "content": [{"type": "image", "image": f"file://{folder}/small.png"}]}])
    lines = [{"problem": "a", "images": [f"{folder}/large.png", f"{folder}/small.png"]}, {"problem": message}, {"problem": "c"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"data.train={{source: jsonl, path: {folder}/rows.jsonl}}"


def test_rows_that_are_there_say_which_pictures_prompts_have(tmp_path: Path) -> None:
    large, small = (1, 50, 100), (1, 10, 20)  # 1,400 x 700 pixels of at most 1,000,000; 280 x 140
    found = pictures_of(config_of(rows(tmp_path)))
    assert found.grids == ((large, small), (small,), ())
    assert found.per_prompt == 1
    assert found.most == (large, small)
    assert "by the first 3 rows" in found.source
    flops = FlopsModel.of(ModelShape.read("examples/models/qwen2.5-vl-7b"))
    assert flops.vision is not None
    expected = (picture_flops(flops.vision, large) + 2 * picture_flops(flops.vision, small)) / 3
    assert found.flops(flops) == pytest.approx(expected)


def test_rows_whose_pictures_are_missing_are_left_to_the_run(tmp_path: Path) -> None:
    overrides = rows(tmp_path)
    (tmp_path / "small.png").unlink()
    assert "assumed" in pictures_of(config_of(overrides)).source


def test_pictures_that_are_given_count_for_memory_and_seconds() -> None:
    one, two = (plan_of(pictures_per_prompt=n, picture_pixels=490_000, prompt=1300) for n in (1, 2))
    assert two.towers["policy"]["activations"] == pytest.approx(2 * one.towers["policy"]["activations"])
    for phase in ("generate", "log_probs", "update"):
        assert parts(two, phase)["tower"] == pytest.approx(2 * parts(one, phase)["tower"], rel=1e-6)
    none = plan_of(pictures_per_prompt=0)
    assert none.towers["policy"]["activations"] == 0
    assert "tower" not in parts(none, "update")
    assert lengths_of(config_of(), pictures_per_prompt=2, picture_pixels=784_000).prompt == 1984  # as their tokens at least


def test_a_tower_is_whole_on_every_rank_of_the_first_stage_and_never_shared_by_tensor_ranks() -> None:
    """Against the sizes of the published tower: 32 layers of width 1,280, of which full recomputation keeps the inputs."""
    shape = ModelShape.read("examples/models/qwen2.5-vl-7b")
    assert shape.vision is not None
    for layout in ("{tp: 2, dp: 4, sequence_parallel: true}", "{tp: 4, dp: 2, sequence_parallel: true}"):
        plan = plan_of(f"policy.layout={layout}")
        tower = plan.towers["policy"]
        assert tower["parameters"] == 676_550_144 * 2
        assert tower["gradients"] == 676_550_144 * 4
        assert tower["optimizer"] == 676_550_144 * 12 / (8 // int(layout[5]))
        patches = 5 * 70 * 72  # as many of the largest prompts as 16,384 tokens have room for, with 1,024 of a response
        of_patch = tower_activations(shape.vision, 2)
        assert tower["activations"] == pytest.approx(patches * of_patch.kept("full"), rel=1e-9)
        assert patches * 32 * 2560 < tower["activations"] < patches * 40 * 2560
        assert plan.memory.worst.most["policy", "tower activations"] == tower["activations"]
        assert plan.towers["reference"].keys() == tower.keys()
        assert plan.towers["reference"]["gradients"] == 0


def test_what_is_frozen_has_no_gradients_and_no_backward_pass() -> None:
    base, frozen = plan_of(), plan_of("policy.freeze=[vision]")
    # The projector's matrices, 5,120 by 5,120 and by 3,584 with their biases, and the norm before them are trained on.
    projector = 5120 * 5120 + 5120 + 5120 * 3584 + 3584 + 1280
    assert frozen.towers["policy"]["gradients"] == projector * 4
    assert frozen.towers["policy"]["parameters"] == base.towers["policy"]["parameters"]
    gradients = [plan.memory.worst.most["policy", "gradients"] for plan in (base, frozen)]
    assert gradients[0] - gradients[1] == (676_550_144 - projector) * 4
    # one pass in place of forward, backward and what is computed anew
    assert parts(frozen, "update")["tower"] == pytest.approx(parts(base, "update")["tower"] / 4)
    assert parts(frozen, "update")["arithmetic"] == parts(base, "update")["arithmetic"]
    decoder = plan_of("policy.freeze=[language]")
    assert parts(decoder, "update")["arithmetic"] == pytest.approx(parts(base, "update")["arithmetic"] * 3 / 4)
    assert parts(decoder, "update")["tower"] == pytest.approx(parts(base, "update")["tower"])


def test_the_tower_makes_the_first_stage_longer_and_fewer_layers_there_make_up_for_it() -> None:
    path = "tests/planning/plans/qwen2.5-vl-72b-grpo-64xh100.yaml"
    even = "policy.layout={tp: 8, pp: 4, dp: 2, sequence_parallel: true}"
    plans = [make_plan(config_of(*more, path=path), H100) for more in ((), (even,))]
    updates = [parts(plan, "update") for plan in plans]
    assert updates[0].get("tower", 0.0) == 0  # it is done before the other stages are
    assert updates[1]["tower"] > 0
    assert plans[0].times.seconds("update") < plans[1].times.seconds("update")
    assert updates[0]["arithmetic"] == pytest.approx(updates[1]["arithmetic"] * 21 / 20)


def test_engines_hold_the_whole_tower_on_every_rank_and_compute_a_prompts_pictures_once() -> None:
    plan = plan_of("rollout.tp=2", "rollout.engines=4")
    engines = plan.run.engines
    assert engines is not None
    tower, decoder = 676_550_144, 8_292_166_656 - 676_550_144
    assert engines.weight_bytes == pytest.approx((tower + decoder / 2) * 2, rel=1e-3)  # norms are whole, too
    by_prompt = plan.lengths.pictures.flops(FlopsModel.of(engines.shape))
    seconds = 128 / 4 * by_prompt / 2 / (H100.peak_flops() * H100.efficiencies.prefill)
    assert parts(plan, "generate")["tower"] == pytest.approx(seconds)
    assert parts(plan_of("rollout.samples_per_prompt=16"), "generate")["tower"] == parts(plan_of(), "generate")["tower"]


def test_shared_prompts_have_their_pictures_computed_once_for_a_group() -> None:
    shared, apart = config_of("policy.share_prefix=true"), config_of("policy.share_prefix=false")
    arguments = (1024.0, 16384, 1000.0, 1000.0)
    assert prompts_computed(shared, *arguments, of_reference=True) == 128
    assert prompts_computed(shared, 1024.0, 5000, 1000.0, 1000.0, of_reference=True) == 2 * 128  # four responses at a time
    # Transformer Engine knows no shared prompts: as many responses fit as with a prompt each, and show its pictures once.
    assert prompts_computed(shared, *arguments, of_reference=False) == 128
    assert prompts_computed(apart, 1024.0, 5000, 1000.0, 1000.0, of_reference=True) == 4 * 128
    assert prompts_at_once(apart, 16384, 1024.0, of_reference=False) == 5
    assert prompts_at_once(shared, 16384, 1024.0, of_reference=True) == 1


def test_the_output_says_what_was_assumed_and_what_the_tower_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", PLAN]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in (
        "pictures 1 for each prompt, of 490,000 pixels, assumed, at most 1,000,000 (data.max_pixels); a prompt has 625 tokens",
        "tower of policy GB on each rank of the first stage: parameters 1.35, gradients 2.71, optimizer 2.03, activations 2.53",
        "tower activations 2.53",
        "phase seconds share tower bound by",
    ):
        assert said in out
    assert cli.main(["plan", PLAN, "--json", "--pictures-per-prompt", "3", "--picture-pixels", "78400"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pictures"]["per_prompt"] == 3
    assert plan["pictures"]["most_patches"] == 3 * 400
    assert plan["memory"]["towers"]["policy"]["parameters"] == 676_550_144 * 2
    assert plan["times"]["phases"]["log_probs"]["parts"]["tower"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pictures-per-prompt=-1"], "--pictures-per-prompt is -1; it must be a whole number, 0 or more"),
        (["--picture-pixels=0"], "--picture-pixels is 0; it must be a number above 0"),
        (["--picture-pixels=4e6"], "the pictures of a prompt would have 5,"),
        (
            ["--pictures-per-prompt=1", "--prompt-tokens=100"],
            "--prompt-tokens is 100, but the pictures of a prompt alone have 1,2",
        ),
        (["--pictures-per-prompt=1", "model.path=examples/models/qwen3-32b"], "are for models that see"),
    ],
)
def test_pictures_that_cannot_be_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", PLAN, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error
