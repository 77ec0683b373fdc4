"""`megarl plan --search`: what it prints can be pasted and gives the printed figures; and what is said where nothing fits."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megarl import cli
from tests.planning.printed import planned

SMALL = "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml"
LARGE = "examples/plans/llama-3.1-70b-reinforce-plus-plus-64xh100.yaml"
SEPARATE = (
    SMALL, "resources.placement=separate", "policy.layout={tp: 2, dp: 2, sequence_parallel: true}", "rollout.engines=4",
    "model.recompute=selective",
    "rollout.schedule.mode=one_step_off_policy", "rollout.weight_transport=process_group",
)  # fmt: skip
PPO = ("tests/planning/plans/llama-3.1-8b-ppo-32xh100.yaml",)
EXPERTS = ("examples/plans/qwen3-vl-30b-a3b-grpo-32xh100.yaml",)
SFT = ("examples/plans/gpt-oss-120b-sft-64xh100.yaml",)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence about a run that does not fit."""
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def pasted(overrides: list[str]) -> list[str]:
    """Arguments as a shell makes them of what is printed."""
    return shlex.split(" ".join(overrides))


@pytest.mark.parametrize(
    "arguments",
    [
        (SMALL,),
        SEPARATE,
        pytest.param(PPO, marks=pytest.mark.exhaustive),
        pytest.param(EXPERTS, marks=pytest.mark.exhaustive),
        pytest.param(SFT, marks=pytest.mark.exhaustive),
        pytest.param((LARGE, "--gpus", "512"), marks=pytest.mark.exhaustive),
    ],
    ids=["colocated", "separate", "ppo", "experts", "sft", "70b on 512"],
)
def test_what_is_printed_can_be_pasted_and_gives_the_printed_figures(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *arguments, "--search")["search"]
    own = planned(capsys, *arguments)
    assert found["own"]["step_s"] == own["times"]["step_s"]
    for entry in found["best"][:3]:
        again = planned(capsys, *arguments, *pasted(entry["overrides"]))
        assert again["fits"]
        assert again["times"]["step_s"] == entry["step_s"]
        assert again["memory"]["bytes"] == entry["bytes"]
        assert again["memory"]["kv_cache_tokens"] == entry["kv_cache_tokens"]
        parts_of_turns = again["memory"]["turns"].values()
        if len({name for parts in parts_of_turns for name in parts if name.startswith("engine/")}) == 0:
            assert entry["bytes_without_kv_cache"] == entry["bytes"]
        for phase, gain in entry["gains"].items():
            assert gain["s"] == pytest.approx(again["times"]["phases"][phase]["seconds"], abs=1e-9)
            assert gain["own_s"] == pytest.approx(own["times"]["phases"].get(phase, {"seconds": 0})["seconds"], abs=1e-9)


def test_each_layout_has_one_line_and_the_fastest_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, SMALL, "--search")["search"]
    seconds = [entry["step_s"] for entry in found["best"]]
    assert seconds == sorted(seconds)
    assert len(seconds) == min(10, found["fitting"])
    sizes = [frozenset(re.sub(r",?(vpp|first|last)=\d+", "", entry["layout"]).split(",")) for entry in found["best"]]
    assert len(set(sizes)) == len(sizes)
    assert max(entry["bytes"] for entry in found["best"]) <= 85e9 * 0.95
    assert found["tried"] == found["fitting"] + sum(entry["count"] for entry in found["refused"])
    assert len(found["best"]) < found["own"]["place"] <= found["fitting"] + 1
    assert found["own"]["step_s"] > seconds[-1]


def test_the_best_layout_pasted_is_the_first_place_of_its_own_search(capsys: pytest.CaptureFixture[str]) -> None:
    best = planned(capsys, SMALL, "--search")["search"]["best"][0]
    again = planned(capsys, SMALL, *pasted(best["overrides"]), "--search")["search"]
    assert again["own"]["step_s"] == best["step_s"]
    assert again["own"]["place"] == 1


def test_the_lines_are_not_cut_however_narrow_the_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = planned(capsys, SMALL, "--search")["search"]["best"]
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["plan", SMALL, "--search"]) == 0
    out = capsys.readouterr().out
    for entry in best:
        assert any(line.rstrip().endswith(" ".join(entry["overrides"])) for line in out.splitlines())
    own = re.search(r"^yours: ([\d.]+) s, place (\d+) \((\d+) layouts fit\)$", out, re.M)
    assert own is not None
    assert re.search(
        r"^1: \S+: [\d.]+ s, where yours takes [\d.]+ s; .*\b(generate|update|log_probs) [\d.]+ -> [\d.]+ s", out, re.M
    )


def test_refusals_are_counted_by_the_rule_that_is_broken_each_with_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["rollout.prompts_per_step=1", "policy.layout.dp=2", "policy.layout.tp=4", "rollout.samples_per_prompt=2"]
    refused = planned(capsys, SMALL, "--search", *few)["search"]["refused"]
    by_rule = {entry["why"]: entry for entry in refused}
    indivisible = by_rule["policy.layout.dp does not divide the sequences of a mini-batch"]
    assert indivisible["count"] > 1
    assert re.search(r"dp=[48]", indivisible["such_as"])
    assert not any(re.search(r"[#\d]", entry["why"]) for entry in refused)


def test_too_few_gpus_are_answered_with_the_configs_own_number_and_a_power_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, LARGE, "--gpus", "63")
    said = re.search(
        r"takes 64 GPUs, but there are 63; the config itself fits on 64; the nearest that fits takes 32 GPUs: (.+)", error
    )
    assert said is not None
    assert planned(capsys, LARGE, "--gpus", "63", *shlex.split(said[1]))["gpus"] == 32


def test_a_config_that_fits_on_its_own_number_says_so_where_nothing_fits_on_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, LARGE, "--gpus", "12", "--gpu", "h100")
    assert "takes 64 GPUs, but there are 12; the config itself fits on 64; the nearest that fits needs " in error
    needed = re.search(r"needs (\d+) GPUs: (.+)", error)
    assert needed is not None
    assert planned(capsys, LARGE, *shlex.split(needed[2]))["gpus"] == int(needed[1]) <= 64


def test_gpus_that_no_layout_fits_are_a_sentence_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "examples/plans/llama-3.1-405b-grpo-512xh200.yaml", "--gpus", "1")
    assert "there are 1; the config itself fits on 512; no layout that was tried fits on up to 8 h200; most often: " in error
    assert re.search(r"most often: .+ \(so dp=1\)", error)


def test_without_gpus_given_a_config_without_a_layout_tells_how_many_it_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: examples/models/llama-3.1-70b}\ndata: {train: {source: jsonl, path: rows.jsonl}}\n"
        "rewards: [{name: exact_text}]\nrun: {name: x}\nresources: {gpu: h100}\n"
    )
    error = refusal(capsys, str(config))
    needed = re.search(r"the nearest that fits needs (\d+) GPUs \(--gpus \1 --search ranks what fits on them\): (.+)", error)
    assert needed is not None
    gpus = int(needed[1])
    fitting = planned(capsys, str(config), *shlex.split(needed[2]))
    assert (fitting["gpus"], fitting["fits"]) == (gpus, True)
    # half as many are refused by every layout, and a search goes to the same number
    refusal(capsys, str(config), "--gpus", "1")
    assert planned(capsys, str(config), "--search", "--gpus", str(gpus // 2))["search"]["best"] == []
    searched = planned(capsys, str(config), "--search")["search"]
    again = planned(capsys, str(config), "--search", "--gpus", str(gpus))["search"]
    assert searched["best"] == again["best"] != []


def test_a_search_for_a_config_that_does_not_fit_shows_no_tables_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan", LARGE, "--search", "policy.layout={dp: 64}", "model.recompute=none"]) == 0
    out = capsys.readouterr().out
    assert "GB of the fullest GPU" not in out
    assert "where yours takes" not in out
    assert out.count("yours does not fit: GPU 0 would hold ") == 1
    figures = [line for line in out.splitlines() if re.match(r"place  +seconds | +\d+  +[\d.,]+  ", line)]
    assert len(figures) > 1
    assert all(len(line) <= 80 for line in figures)


def test_layouts_that_leave_little_memory_are_marked_and_the_roomiest_of_the_fast_ones_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(capsys, LARGE, "--search")
    best, usable = plan["search"]["best"], plan["memory"]["usable_bytes"]
    assert cli.main(["plan", LARGE, "--search"]) == 0
    out = capsys.readouterr().out
    free = [1 - entry["bytes"] / usable for entry in best]
    for place, share in enumerate(free, 1):
        line = next(line for line in out.splitlines() if re.match(rf" +{place}  +[\d.,]+  ", line))
        assert ("tight" in line) is (share < 0.05)
    alike = [at for at, entry in enumerate(best) if entry["step_s"] <= 1.02 * best[0]["step_s"]]
    advised = re.search(r"1 to (\d+) differ by at most 2%, less than estimates are exact to: take (\d+), ", out)
    assert advised is not None
    assert int(advised[1]) == len(alike) > 1
    assert round(free[int(advised[2]) - 1], 2) == max(round(free[at], 2) for at in alike)


MIXTURE = """
model: {path: examples/models/qwen3-30b-a3b}
policy: {layout: {tp: 2, dp: 32, ep: 8, sequence_parallel: true}, max_tokens_per_micro_batch: 4096}
algorithm: {name: grpo, mini_batches: 4, kl: {coef: 0.01}}
data: {train: {source: reasoning_gym, name: gsm_symbolic}, max_prompt_tokens: 150}
rollout: {engines: 16, tp: 4, prompts_per_step: 64, samples_per_prompt: 32, max_new_tokens: 3946}
rewards: [{name: reasoning_gym}]
"""


@pytest.mark.exhaustive
def test_expert_parallelism_as_it_was_published_is_among_the_first_ten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-30B-A3B on 64 H100 with ep 8 (NVIDIA's measurements of RL), DeepSeek-V3 on 2,048 with pp 16 and ep 16."""
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    mixture = planned(capsys, str(tmp_path / "mixture.yaml"), "--search")["search"]["best"]
    assert any("ep=8" in entry["layout"].split(",") for entry in mixture)
    large = planned(capsys, "examples/plans/deepseek-v3-grpo-2048xh100.yaml", "--search")["search"]["best"]
    assert any({"pp=16", "ep=16"} <= set(entry["layout"].split(",")) for entry in large)
