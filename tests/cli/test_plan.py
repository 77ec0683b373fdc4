"""`megarl plan CONFIG --reshard`: from config.json alone, and a sentence for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl import cli
from megarl.option_list import OPTIONS

ROOT = Path(__file__).parents[2]
MOE = (
    "model.path=moe", "rollout.tp=64",
    "rollout.engine_args={ep_size: 64, dp_size: 8, enable_dp_attention: true}",
    "policy.layout={tp: 4, pp: 8, dp: 32, ep: 32, sequence_parallel: true, first_stage_layers: 7, last_stage_layers: 6}",
)  # fmt: skip
CONFIG = """
model: {path: dense}
policy: {layout: {tp: 8, pp: 8, dp: 16}}
rollout: {engines: 128, tp: 8, prompts_per_step: 256}
data: {train: {source: reasoning_gym, name: basic_arithmetic}}
rewards: [{name: reasoning_gym}]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    for name, model in (("dense", "llama-3.1-70b"), ("moe", "deepseek-v3")):
        Path(name).symlink_to(ROOT / "examples" / "models" / model)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, blanks run together."""
    assert cli.main(["plan", "c.yaml", "--reshard", *arguments]) == 0
    return re.sub(" +", " ", capsys.readouterr().out)


def test_a_70b_model_from_1024_ranks_to_128_engines(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys)
    for line in (
        "model dense: 723 tensors, 141.11 GB in bfloat16",
        "from 1,024 training ranks: tp=8,pp=8,dp=16",
        "to 128 engines of 8 ranks: tp=8, on the trainer's GPUs",
        "taken whole none: every rank is sent its own slices",
        "redundancy 1.000 bytes",
        "a rank receives 17.64 GB",
        "peak staging 2.15 GB",
        "busiest link 0.336 s, InfiniBand out of GPU",
        "bound by engines' turn: InfiniBand 0.524 s",
    ):
        assert line in out


@pytest.mark.slow
def test_a_671b_mixture_and_a_cluster_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cluster.yaml").write_text("gpus_per_node: 72\nib_gb_per_s: 100\n")
    out = planned(capsys, "--cluster", "cluster.yaml", "resources.placement=separate", *MOE, "rollout.engines=2")
    assert "2 engines of 64 ranks: tp=8,ep=64,dp=8, on nodes of their own" in out
    assert "taken whole none" in out
    assert " at 100 GB/s" in out


def test_on_a_cpu_less_is_staged_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "peak staging 2.15 GB" in planned(capsys)
    assert "peak staging 268.44 MB" in planned(capsys, "--gpu=cpu")


def test_over_a_process_group_too_every_rank_is_sent_its_own_slices(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "rollout.weight_transport=process_group")
    assert "redundancy 1.000 bytes" in out
    assert "peak staging none" in out
    assert re.search(r"communicators \d+( to \d+)? of a training rank, 1 of an engine's rank, of at most \d+ members", out)


@pytest.mark.skipif("few_bits" not in OPTIONS, reason="needs the option few_bits")
def test_engines_that_serve_an_fp8_model_are_sent_half_of_the_linear_layers_bytes_and_scales(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("fp8").mkdir()
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    Path("fp8/config.json").write_text(json.dumps(json.loads(Path("dense/config.json").read_text()) | quantised))
    out = planned(capsys, "rollout.servers={model_path: fp8}")
    embeddings, norms = 2 * 128256 * 8192 * 2 / 8, (2 * 80 + 1) * 8192 * 2
    linear = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) / 8
    assert f"a rank receives {(embeddings + norms + linear * (1 + 4 / 128**2)) / 1e9:.2f} GB" in out
    assert "redundancy 1.000 bytes" in out


def test_a_placement_names_the_gpus_of_every_rank_and_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy.layout={tp: 4, dp: 4}", "rollout.engines=4", "rollout.tp=2", "model.path=none"]
    assert cli.main(["plan", "c.yaml", "--placement", "resources.placement=separate", *words]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][2:] == [
        ["node", "GPUs", "policy", "engines"], ["node", "0", "0-7", "0-7"], ["node", "1", "0-7", "8-15"],
        ["node", "2", "0-7", "0-3"],
    ]  # fmt: skip
    assert cli.main(["plan", "c.yaml", "--placement", "--json", "--gpus-per-node", "4", *words]) == 0
    placed = json.loads(capsys.readouterr().out)
    assert placed["nodes"] == [f"node {number}" for number in range(4)]
    assert placed["ranks"]["policy"][6] == {"bundle": 6, "node": "node 1", "gpu": 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["c.yaml", "--reshard", "rollout.tp=6"],
            "rollout.tp is 6, which does not divide the model's 64 attention heads, 8 KV heads",
        ),
        (
            ["c.yaml", "--reshard", "policy.layout.pp=7"],
            "policy.layout.pp is 7, which does not divide the model's 80 layers; it must be",
        ),
        (["c.yaml", "--reshard", "rollout.engine_args.ep_size=3"], "target ep is 3; it must divide the engine's 8 ranks"),
        (["c.yaml", "--reshard", "rollout.engine_args.ep_size=8"], "the model has no experts; ep must be 1"),
        (["c.yaml", "--reshard", "rollout.engine_args.ep_size=x"], "ep_size is 'x'; it must be a whole number"),
        (["c.yaml", "--reshard", "rollout.engine_args.pp_size=2"], "rollout.engine_args.pp_size is 2, but where"),
        (["c.yaml", "--reshard", "rollout.engine_args.attn_dp_size=3"], "attn_dp_size is 3; it must divide rollout.tp=8"),
        (["c.yaml", "--reshard", "rollout.engine=replay", "rollout.replay_from=x"], "'replay', which takes no weights"),
        (["c.yaml", "--reshard", "--cluster", "none.yaml"], "'none.yaml' cannot be read"),
        (["c.yaml", "--reshard", "model.path=none"], "model.path is 'none', which is no folder"),
        (["c.yaml", "--reshard", "--fast"], "--fast"),
        (["c.yaml", "--gpus-per-node=4"], "--gpus-per-node is for `megarl plan --placement`"),
        (["c.yaml", "--placement", "--gpus-per-node=0"], "--gpus-per-node is 0; it must be a whole number above 0"),
        (["c.yaml", "--placement", "--gpus=8"], "--gpus is 8, but the layouts need 1024"),
        (["c.yaml", "--placement", "--gpus-per-node=4"], "policy.layout.tp is 8, which is more than the 4 GPUs of a node"),
        (
            ["c.yaml", "--placement", "rollout.tp=11"],
            "rollout.tp is 11, which is more than the 8 GPUs of a node, and no number",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("megarl: ")
    assert output.err.count("\n") == 1
    assert sentence in output.err
