"""What cannot run is said before anything waits in a queue: one sentence with the field, what it was, what to change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import load_config
from megarl.errors import ConfigError, LayoutError
from megarl.launch.cluster_profile import ClusterProfile
from megarl.launch.job import plan_job
from megarl.launch.preflight import check_partition, check_site, checkpoint_bytes, parse_partitions
from megarl.launch.submit import job_number
from megarl.weights.placement import PlacementRequest
from megarl.workers.roles import group_requests

SINFO = "debug*|up|30:00|2|(null)\nh100|up|2-00:00:00|16|gpu:h100:8(S:0-1)\nold|down|infinite|4|gpu:4\n"

MISTAKES = {
    "too few GPUs": (
        ["policy.layout.dp=24", "--nodes", "2"],
        "nodes is 2, which have 16 GPUs, but the layouts need 24; ask for --nodes 3, or change policy.layout",
    ),
    "a node that would idle": (
        ["policy.layout.dp=8", "--nodes", "2"],
        "nodes is 2, but the layouts need 8 GPUs, which 1 hold; ask for --nodes 1, or raise policy.layout.dp",
    ),
    "an engine larger than a node": (
        ["policy.layout.dp=8", "rollout.tp=8", "--gpus-per-node", "0", "--places-per-node", "4"],
        "rollout.tp is 8, but without GPUs an engine is on one node and places_per_node is 4; set rollout.tp to 4 or less",
    ),
    "no time for a step": (
        ["--time", "00:10:00", "--step-seconds", "240"],
        "time is 00:10:00, but the start (120 s), one step (240 s) and the warning (300 s before the end) take 660 s; "
        "ask for at least --time 00:11:00",
    ),
    "a warning shorter than a step": (
        ["--step-seconds", "400"],
        "warn_s is 300, but the step in progress is finished before the run saves and takes 400 s; set --warn-s to 600 or more",
    ),
    "a warning before the start": (["--time", "00:05:00"], "time is 00:05:00, but the run is to be warned 300 s before"),
    "no such time": (["--time", "soon"], "cluster profile: time is 'soon'; it must be HH:MM:SS or DAYS-HH:MM:SS"),
    "a missing image": (["--runtime", "pyxis"], "runtime is pyxis, but image is missing; name the container image"),
    "no such runtime": (["--runtime", "apptiner"], "(did you mean 'apptainer'?)"),
    "CPU nodes without places": (["--gpus-per-node", "0"], "gpus_per_node is 0, but places_per_node is missing"),
    "seeds in words": (["--seeds", "one"], "--seeds is 'one'; it must be whole numbers with commas between them"),
    "an option without a value": (["--env", "A"], "--env is 'A'; it must be KEY=VALUE"),
    "a Ray of somebody else": (["resources.ray_address=auto"], "ray_address is 'auto', but the job starts a Ray of its own"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = MISTAKES[mistake]
    assert main(["submit", "slurm", str(rl_yaml), *words, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megarl: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_layout_that_nodes_cannot_share_evenly_is_refused(sft_yaml: Path) -> None:
    with pytest.raises(ConfigError, match="6 ranks, but 4 nodes of 4 GPUs cannot hold an equal share each; ask for --nodes 2"):
        plan_job(sft_yaml, ["policy.layout.dp=6"], ClusterProfile(nodes=4, gpus_per_node=4))
    job = plan_job(sft_yaml, ["policy.layout.dp=6"], ClusterProfile(gpus_per_node=4))
    assert (job.launcher, job.nodes, job.ranks_per_node) == ("torchrun", 2, 3)


def test_a_profile_with_an_unknown_field_names_the_nearest(
    rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("gpu_per_node: 4\n")
    assert main(["submit", "slurm", str(rl_yaml), "--cluster-profile", str(profile), "--dry-run"]) == 2
    assert (
        f"{profile}: gpu_per_node is not a field of a cluster profile (did you mean 'gpus_per_node'?)"
        in capsys.readouterr().err
    )


def test_a_folder_that_holds_a_run_is_not_continued_unasked(rl_yaml: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "big" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(json.dumps({"step": 1, "time/step_s": 4000.0}) + "\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        plan_job(rl_yaml, [], ClusterProfile())
    with pytest.raises(ConfigError, match=r"one step \(4000 s\)"):  # what the earlier start measured
        plan_job(rl_yaml, ["run.resume=auto"], ClusterProfile(time="01:00:00"))


LARGE = "examples/plans/llama-3.1-70b-reinforce-plus-plus-64xh100.yaml"


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a run of 64 GPUs in the repository, whose model folder has files where weights and tokenizer are looked for."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_bytes((root / "examples/models/llama-3.1-70b/config.json").read_bytes())
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return [LARGE, f"model.path={folder}", f"run.folder={tmp_path / 'runs'}"]


def test_a_step_that_no_start_has_measured_is_as_long_as_the_plan_says(
    large: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *large, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["times"]["step_s"]
    assert main(["submit", "slurm", *large, "--warn-s", str(int(planned) - 1), "--dry-run"]) == 2
    refusal = capsys.readouterr().err
    assert (
        f"takes {planned:.0f} s (an estimate of `megarl plan` for h100; --step-seconds overrides it); set --warn-s" in refusal
    )
    assert main(["submit", "slurm", *large, "--warn-s", str(int(planned) + 1), "--dry-run"]) == 0
    assert f"# A step takes about {planned:.3g} s (an estimate of `megarl plan` for h100)" in capsys.readouterr().out
    assert main(["submit", "slurm", *large, "--step-seconds", "12", "--dry-run"]) == 0
    assert "# A step takes about 12 s (--step-seconds)" in capsys.readouterr().out


def test_the_script_says_how_fast_a_checkpoint_must_be_written(
    large: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(tmp_path / "llama" / "model.safetensors", 2 * 70 * 10**9)  # holes: nothing is written
    slowly = [*large, "--step-seconds", "120", "--warn-s", "512", "--dry-run"]
    assert main(["submit", "slurm", *slowly]) == 0
    left = "# A checkpoint takes about 980 GB, for which {} s are left: the folder must take {} GB/s from all nodes."
    assert left.format(392, 2.5) in capsys.readouterr().out
    assert main(["submit", "slurm", *slowly, "resources.deadlines.save_s=100"]) == 0  # its deadline ends it before the job does
    assert left.format(100, 9.8) in capsys.readouterr().out


def test_a_measured_step_goes_before_an_estimate(large: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = Path(LARGE).stem
    metrics = tmp_path / "runs" / name / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(json.dumps({"step": 1, "time/step_s": 33.0}) + "\n")
    assert main(["submit", "slurm", *large, "run.resume=auto", "--dry-run"]) == 0
    assert "# A step takes about 33 s (an earlier start of the run)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("model.safetensors", "which has no 'model.safetensors' or 'model.safetensors.index.json'; put weights as safetensors"),
        ("tokenizer.json", "'vocab.json' or 'tokenizer_config.json'; put a tokenizer there"),
    ],
)
def test_a_model_folder_that_a_run_could_not_load_is_refused_before_the_queue(
    missing: str, sentence: str, rl_yaml: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / missing).unlink()
    assert main(["submit", "slurm", str(rl_yaml)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megarl: model.path is '{model}', which has no ")
    assert sentence in error
    # who looks at the script only is told, and sees it
    assert main(["submit", "slurm", str(rl_yaml), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/")
    assert f"megarl: without --dry-run this job is refused: model.path is '{model}', which has no " in shown.err
    assert sentence in shown.err


def test_a_run_that_exported_a_model_stands_for_it(rl_yaml: Path, model: Path, tmp_path: Path) -> None:
    model.rename(tmp_path / "moved")
    model.mkdir()
    (tmp_path / "moved").rename(model / "model")
    assert main(["submit", "slurm", str(rl_yaml), "--dry-run"]) == 0


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize("extra", [[], ["algorithm.name=ppo", "critic.layout.dp=3"], ["reference.layout.dp=2"]])
def test_a_jobs_places_are_those_that_the_run_asks_for(rl_yaml: Path, placement: str, extra: list[str]) -> None:
    words = [f"resources.placement={placement}", "policy.layout.dp=4", "rollout.engines=3", "rollout.tp=2", *extra]
    config = load_config(rl_yaml, words)
    layouts = {request.name: request.layout for request in group_requests(config)}
    assert PlacementRequest.of(config) == PlacementRequest(layouts, 3, 2, placement == "colocated")
    urls = "rollout.servers={urls: [http://a:1, http://b:1, http://c:1]}"
    elsewhere = load_config(rl_yaml, [*words, "rollout.weight_transport=folder", urls])
    assert PlacementRequest.of(elsewhere) == PlacementRequest(layouts, 3, 0, placement == "colocated", over_nodes=False)


def test_a_group_that_the_nodes_would_cut_is_refused_before_the_job_is_queued(rl_yaml: Path) -> None:
    with pytest.raises(LayoutError, match=r"policy\.layout\.tp is 4, which needs 4 GPUs of one node 3 times"):
        plan_job(rl_yaml, ["policy.layout={tp: 4, dp: 3}"], ClusterProfile(gpus_per_node=6))


def test_partitions_are_read_from_sinfo_and_refused_with_a_way_out(rl_yaml: Path) -> None:
    partitions = parse_partitions(SINFO)
    assert [(p.name, p.is_default, p.is_up, p.time_s, p.nodes, p.gpus_per_node) for p in partitions] == [
        ("debug", True, True, 1800, 2, 0), ("h100", False, True, 172_800, 16, 8), ("old", False, False, None, 4, 4),
    ]  # fmt: skip

    def refused(words: list[str], **fields: object) -> str:
        profile = ClusterProfile.model_validate(fields)
        with pytest.raises(ConfigError) as error:
            check_partition(partitions, plan_job(rl_yaml, words, profile), profile)
        return str(error.value)

    assert "partition is 'h10', but the cluster has debug, h100, old (did you mean 'h100'?)" in refused([], partition="h10")
    assert "partition 'old' is down; it must be debug, h100" in refused([], partition="old")
    assert "gpus_per_node is 8, but partition 'debug' has nodes of 0" in refused([])
    many = ["policy.layout.dp=136", "rollout.prompts_per_step=136"]
    assert "the job needs 17 nodes, but partition 'h100' has 16" in refused(many, partition="h100")
    assert "ask for --time 2-00:00:00 or less" in refused([], partition="h100", time="3-00:00:00")


def test_a_missing_image_or_environment_is_found_before_the_queue(
    rl_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "sinfo").write_text("#!/bin/sh\necho 'h100*|up|infinite|2|gpu:8'\n")
    (fake / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:/usr/bin:/bin")
    near = tmp_path / "megarl.sif"
    near.touch()
    missing = ClusterProfile(runtime="apptainer", image=str(tmp_path / "megrl.sif"))
    with pytest.raises(ConfigError, match=r"but there is no such file \(did you mean '.*megarl.sif'"):
        check_site(plan_job(rl_yaml, [], missing), missing)
    elsewhere = ClusterProfile(venv=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"venv is '.*none', but there is no"):
        check_site(plan_job(rl_yaml, [], elsewhere), elsewhere)
    found = {finding.subject: finding for finding in check_site(plan_job(rl_yaml, [], ClusterProfile()), ClusterProfile())}
    assert found["checkpoints"].fix.startswith("set run.save_every")


def test_a_checkpoint_is_estimated_as_weights_and_optimizer(rl_yaml: Path) -> None:
    parameters = 4096 // 2
    assert checkpoint_bytes(plan_job(rl_yaml, [], ClusterProfile())) == parameters * (2 + 4 + 4 + 4)


def test_the_job_s_number_is_found_in_each_batch_system_s_answer() -> None:
    assert job_number("Submitted batch job 4711\n") == "4711"
    assert job_number("4711.server\n") == "4711.server"
    assert job_number("Job <4711> is submitted to queue <normal>.\n") == "4711"
    with pytest.raises(ConfigError, match="answered no job number, but: nothing"):
        job_number("")


def test_without_a_batch_system_the_program_is_named(
    rl_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "pbs", str(rl_yaml)]) == 2
    assert "qsub is not on this machine; submit from a login node" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
