"""`megarl plan` on every config of the repository's examples; the ready plans fit."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megarl import cli
from megarl.errors import EngineError
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import make_plan
from megarl.planning.search import Search
from megarl.weights.checksums import check_model
from tests.config.test_examples import load
from tests.planning.printed import planned

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))
READY = sorted((ROOT / "examples/plans").glob("*.yaml"))
SMALL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "rope_theta": 100000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
PUBLISHED = {
    "models/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl-3b",
    "models/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "models/Qwen2-VL-2B-Instruct": "qwen2-vl-2b",
    "models/Qwen2-VL-7B-Instruct": "qwen2-vl-7b",
    "runs/r1-onevision-sft/model": "qwen2.5-vl-7b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
}
"""Published configs for the models of recipes; these are planned on H100, but for the last, which is planned on H200."""
MARGIN = 0.95
MODELS = (("model", "path"), ("reference", "path"), ("reward_model", "path"), ("critic", "init_from"), ("teacher", "path"))


def stand_ins(path: Path, folder: Path) -> list[str]:
    """Overrides that put a small model in the place of those that another command makes first."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(SMALL))
    tree = yaml.safe_load(path.read_text())
    if published := PUBLISHED.get(tree["model"]["path"]):
        return ["--gpu", "h200" if published == "glm-4.5-air" else "h100", f"model.path=examples/models/{published}"]
    return [
        f"{section}.{field}={folder}/model"
        for section, field in MODELS
        if (model := tree.get(section, {}).get(field)) and not (ROOT / model / "config.json").exists()
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_planned_and_the_ready_plans_fit(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(path)  # skips the test where an option that it needs was deleted
    said = re.search(r"(\d+)x(h100|h200)", path.stem)
    arguments = [] if said else stand_ins(path, tmp_path)
    plan = planned(capsys, path, *arguments)
    assert plan["fits"]
    assert plan["times"]["step_s"] > 0
    if said:
        assert (plan["gpus"], plan["gpu"]) == (int(said[1]), said[2])
    if plan["memory"]["towers"]:  # what is kept of pictures goes by their sizes, which a config bounds and a run finds out
        assert plan["memory"]["bytes"] <= MARGIN * plan["memory"]["usable_bytes"]
        assert all(parts["activations"] > 0 for parts in plan["memory"]["towers"].values())


def test_there_is_a_ready_plan_for_every_model_algorithm_and_kind_of_gpu() -> None:
    names = " ".join(path.stem for path in READY)
    for wanted in (
        "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "glm-4.6",
        "minimax-m2", "deepseek-v3.2", "glm-5", "kimi-k2.5", "nemotron-3-super", "fp8-engines",
        "gpt-oss-120b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b",
        "qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b", "qwen3-vl-30b-a3b",
        "ppo", "grpo", "reinforce-plus-plus", "8xh100", "2048xh100", "h200", "fp8", "32k", "async",
    ):  # fmt: skip
        assert wanted in names


REFUSED = {
    "deepseek-v3.2": "kernels for GPUs alone, and it is not proven where its servers hold the indexer's weights",
    "glm-5": "kernels for GPUs alone, and it is not proven where its servers hold the indexer's weights",
    "kimi-k2.5": "it takes pictures by the code in the model's folder",
}
"""By model, why a run refuses the engines of its ready plan."""


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_plan_says_of_engines_that_a_run_would_refuse_that_it_does(path: Path) -> None:
    config = load(path)
    why = make_plan(config, gpu_named(config.resources.gpu or "")).engine_refusal
    expected = next((part for model, part in REFUSED.items() if path.stem.startswith(model)), None)
    if config.sampling is not None:  # as the run's own check says
        with pytest.raises(EngineError) if expected else nullcontext():
            check_model(config.model.path, config.sampling.tp, "cuda")
    assert (why is None) == (expected is None), why
    assert expected is None or expected in (why or "")


def test_the_note_is_in_the_table_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (ready for ready in READY if ready.stem.startswith("deepseek-v3.2"))
    load(path)  # skips the test where an option that it needs was deleted
    assert cli.main(["plan", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a run refuses them: SGLang was not seen with this model; SGLang computes the indexer by {REFUSED['glm-5']}" in said
    assert REFUSED["glm-5"] in planned(capsys, path)["engine_refusal"]


def test_the_table_is_readable_and_says_that_seconds_are_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tests/planning/plans/llama-3.1-70b-ppo-128xh200.yaml"]) == 0
    out = re.sub(" +", " ", capsys.readouterr().out)
    for line in (
        "policy trained, 128 ranks (tp=4, pp=8, vpp=5, dp=4), in the processes of policy",
        "critic trained, 128 ranks (tp=4, pp=8, vpp=5, dp=4), in the processes of critic",
        "reward_model frozen",
        "GPUs 128 of 128 h200, on the same GPUs",
        "sequences per step 2048 = 512 x 4",
        "GB of the fullest GPU",
        "KV cache",
        "phase seconds share bound by",
        "Seconds are estimates, by constants fitted to runs on H100",
    ):
        assert line in out


def test_a_plan_that_does_not_fit_says_what_is_over_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["policy.layout={dp: 8}", "model.recompute=none"]
    assert cli.main(["plan", "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml", *changed]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"does not fit: GPU 0 would hold [\d.]+ GB while the trainer works, [\d.]+ GB more than the 80\.8", error)
    nearest = re.search(r"largest part is the \w+ of the policy, [\d.]+ GB; the nearest that fits: (.+)", error)
    assert nearest is not None
    assert cli.main(["plan", "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml", *changed, *shlex.split(nearest[1])]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h1000"], "--gpu is 'h1000'; it must be h100, h200"),
        (["--gpus", "0"], "--gpus is 0; it must be a whole number above 0"),
        (["--gpus", "4"], "the run takes 8 GPUs, but there are 4"),
        (["--gpu", "h10"], "a100, l40s, b200, gb200, gb300, cpu or a YAML file (did you mean 'h100'?)"),
        (["resources.gpu=h300"], "resources.gpu is 'h300'; it must be h100"),
        (["--prompt-tokens", "2000"], "--prompt-tokens is 2,000, but data.max_prompt_tokens is 1,024; it must be at most that"),
        (["--response-tokens", "5000"], "--response-tokens is 5,000, but rollout.max_new_tokens is 4,096; it must be at most"),
        (["--longest-response", "5000"], "--longest-response is 5,000, but rollout.max_new_tokens is 4,096; it must be at"),
        (
            ["--longest-response", "100", "--response-tokens", "200"],
            "is 200, but --longest-response is 100; it must be",
        ),
        (["--longest-response", "0"], "--longest-response is 0; it must be a number above 0"),
        (["--efficiency", "1.5"], "--efficiency is 1.5; it must be above 0 and at most 1"),
        (["--gpu", "a100", "model.fp8=hybrid", "model.layer_spec=transformer_engine"], "'hybrid', which a100 cannot compute"),
        (["--response-tokens", "-1"], "--response-tokens is -1; it must be a number above 0"),
        (["--cluster", "x.yaml"], "--cluster is for `megarl plan --reshard`"),
        (["--calibrate", "nowhere"], "'nowhere/config.yaml' cannot be read"),
        (["policy.layout.tp=3"], "policy.layout.tp is 3, which does not divide the model's 32 attention heads"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megarl: ")
    assert error.count("\n") == 1
    assert sentence in error


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_the_search_finds_nothing_much_faster_than_a_ready_plan(path: Path) -> None:
    """The layouts, engines and micro-batches of ready plans are the search's, of those that leave a twentieth of the memory."""
    config = load(path)
    gpu = gpu_named(config.resources.gpu or "")
    plan = make_plan(config, gpu)
    with_room = make_plan(config, replace(gpu, memory_gb=0.94 * gpu.memory_gb), available=plan.run.gpus)
    best = Search(config, with_room).ranked().best[0]
    assert plan.times.step_seconds <= 1.05 * best.step_seconds, " ".join(best.overrides)
