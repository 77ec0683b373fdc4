"""GPUs of plans: from the list, from the config, from a file of one's own; and shares of their peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.planning.gpus import gpu_named
from tests.planning.printed import planned

CONFIG = "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml"
SFT = "examples/plans/gpt-oss-120b-sft-64xh100.yaml"
H100 = "memory_gb: 85.0\nhbm_gb_per_s: 3350\nbf16_tflops: 989\nfp8_tflops: 1979\nnvlink_gb_per_s: 450\nnetwork_gb_per_s: 50\n"


def update(plan: dict[str, Any]) -> float:
    """Seconds of arithmetic in the update."""
    return plan["times"]["phases"]["update"]["parts"]["arithmetic"]


def test_the_config_names_the_gpu_and_the_option_overrides_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, CONFIG)["gpu"] == "h100"
    assert planned(capsys, CONFIG, "resources.gpu=h200")["gpu"] == "h200"
    assert planned(capsys, CONFIG, "resources.gpu=h200", "--gpu", "b200")["gpu"] == "b200"
    assert planned(capsys, CONFIG, "resources.gpu=null")["gpu"] == "h100"


def test_a_file_with_all_figures_of_a_kind_plans_as_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(H100 + "host_gb_per_s: 64\n")
    own, known = planned(capsys, CONFIG, f"resources.gpu={tmp_path}/mine.yaml"), planned(capsys, CONFIG)
    assert own.pop("gpu") == "mine"
    assert known.pop("gpu") == "h100"
    assert own == known


def test_a_file_changes_single_figures_and_efficiencies_of_a_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assumed = gpu_named("h100").efficiencies.products
    file = tmp_path / "mine.yml"
    file.write_text(f"like: h100\nname: ours\nbf16_tflops: {989 / 2}\nefficiencies: {{products: {assumed / 2}}}\n")
    own, known = planned(capsys, CONFIG, "--gpu", str(file)), planned(capsys, CONFIG)
    assert own["gpu"] == "ours"
    assert update(own) == pytest.approx(4 * update(known))
    assert own["memory"] == known["memory"]
    assert f"products {assumed / 2:g}" in own["calibration"]


def test_an_efficiency_scales_what_training_computes(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (planned(capsys, CONFIG, "--efficiency", share) for share in ("0.3", "0.6"))
    assert update(slow) == pytest.approx(2 * update(fast))
    assert slow["times"]["phases"]["generate"] == fast["times"]["phases"]["generate"]
    assert "products 0.3" in slow["calibration"]


def test_nvlink_joins_the_gpus_of_a_rack() -> None:
    rack, node = gpu_named("gb200"), gpu_named("b200")
    assert (rack.link_gb_per_s(72), rack.link_gb_per_s(73)) == (900, 50)
    assert (node.link_gb_per_s(8), node.link_gb_per_s(16)) == (900, 50)
    assert (rack.cluster.gpus_per_node, node.cluster.gpus_per_node) == (72, 8)


def test_given_rows_share_one_limit_between_prompt_and_response(capsys: pytest.CaptureFixture[str]) -> None:
    limit = planned(capsys, SFT)["lengths"]["longest"]
    lengths = planned(capsys, SFT, "--response-tokens", str(limit * 3 // 4))["lengths"]
    assert lengths["response"] == limit * 3 // 4
    assert lengths["prompt"] + lengths["response"] <= limit
    for given in (["--response-tokens", str(limit + 1)], ["--prompt-tokens", str(limit // 2), "--response-tokens", str(limit)]):
        assert cli.main(["plan", SFT, *given]) == 2
        assert f"but data.max_tokens is {limit:,}; it must be at most that" in capsys.readouterr().err
    assert cli.main(["plan", SFT, "--longest-response", "100"]) == 2
    assert "--longest-response is for runs that sample responses" in capsys.readouterr().err


def test_a_longest_response_is_that_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, CONFIG, "--longest-response", "1000")
    assert plan["lengths"] == {"prompt": 512, "response": 1000, "longest": 1000}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("memory: 80\n", "memory is no figure of a GPU (did you mean 'memory_gb'?)"),
        (H100, "has no host_gb_per_s: give all figures of the GPU, or a kind that it is like"),
        ("like: h1000\n", "is 'h1000'; it must be h100, h200"),
        ("like: h100\nmemory_gb: -1\n", "is -1; it must be a number above 0"),
        ("like: h100\nbf16_tflops: fast\n", "is 'fast'; it must be a number above 0"),
        ("like: h100\nnvlink_gpus: 1.5\n", "is 1.5; it must be a whole number above 0"),
        ("like: h100\nname: 3\n", "is 3; it must be text"),
        ("like: h100\nefficiencies: 0.4\n", "is 0.4; it must be a mapping of products"),
        ("like: h100\nefficiencies: {product: 0.4}\n", "is unknown (did you mean 'products'?)"),
        ("like: h100\nefficiencies: {products: 40}\n", "is 40; it must be above 0 and at most 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu.yaml").write_text(text)
    assert cli.main(["plan", CONFIG, "--gpu", str(tmp_path / "gpu.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error


def test_fp8_is_refused_on_a_gpu_that_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = "examples/plans/qwen3-32b-grpo-32xh100-fp8.yaml"
    assert cli.main(["plan", fp8, "resources.gpu=a100"]) == 2
    assert (
        "which a100 cannot compute: it has no FP8; it must be 'none', or resources.gpu another GPU" in capsys.readouterr().err
    )
    assert cli.main(["plan", fp8]) == 0


def test_a_plan_says_which_efficiencies_were_given_and_where_the_others_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = planned(capsys, CONFIG)["calibration"]
    given = planned(capsys, CONFIG, "--efficiency", "0.4")["calibration"]
    assert given == f"{assumed}, but for what is given: products 0.4, fp8 0.4, experts 0.4, unequal 1"
