"""Tasks that `megarl submit skypilot` renders are SkyPilot's, and their `run` starts the scripts that pods run."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.launch.pod_job import scripts
from megarl.launch.skypilot import here_document
from megarl.option_list import OPTIONS as INSTALLED
from tests.launch.manifest_rules import against, schema

ROOT = Path(__file__).parents[2]
ON_VOLUME = ["run.folder=runs", "--image", "registry/megarl:gpu", "--volumes", "data=/shared", "--accelerator", "H100"]
OPTIONS = {
    "plain": [],
    "processors": ["--gpus-per-node", "0", "--places-per-node", "4"],
    "full": [
        "--infra", "k8s/my-context", "--spot", "--memory", "512+", "--disk-gb", "1000", "--cpus-per-node", "96",
        "--buckets", "s3://my-data=/data", "--env", "NCCL_IB_HCA=mlx5", "--env", "NAME=two $(words)", "--secrets", "HF_TOKEN",
        "--setup", "nvidia-smi", "--time", "1-06:30:00", "--warn-s", "600",
    ],
}  # fmt: skip


def rendered(capsys: pytest.CaptureFixture[str], config: Path, *words: str) -> list[Any]:
    """The tasks that a dry run prints."""
    assert main(["submit", "skypilot", str(config), "policy.layout.dp=16", *ON_VOLUME, *words, "--dry-run"]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize("kind", OPTIONS)
def test_skypilot_has_nothing_against_a_task(
    kind: str, rl_yaml: Path, sft_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for config in (rl_yaml, sft_yaml):
        (task,) = rendered(capsys, config, *OPTIONS[kind])
        assert against(schema("skypilot-0.14.1.json"), task) == []


BROKEN = {
    "an unknown field": ({"nodes": 2}, "'nodes' was unexpected"),
    "an unknown resource": ({"resources": {"gpus": 8}}, "'gpus' was unexpected"),
    "a cloud that is none": ({"resources": {"infra": "my-cloud/a"}}, "does not match"),
    "two kinds of GPUs": ({"resources": {"accelerators": {"H100": 8, "A100": 8}}}, "is not valid under any"),
    "a number for an environment variable": ({"envs": {"A": 1}}, "is not of type 'string'"),
    "a variable's name": ({"envs": {"A-B": "1"}}, "'A-B' does not match"),
    "nodes as text": ({"num_nodes": "2"}, "is not of type 'integer'"),
    "an exit code": ({"resources": {"job_recovery": {"recover_on_exit_codes": [300]}}}, "is not valid"),
    "an event": ({"config": {"hooks": [{"run": "x", "events": ["warning"]}]}}, "'warning' is not one of"),
    "a mount": ({"file_mounts": {"/data": {"source": "s3://a", "mode": "READ"}}}, "'READ' is not one of"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_task_is_found_out(mistake: str, rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, sentence = BROKEN[mistake]
    (task,) = rendered(capsys, rl_yaml)
    assert against(schema("skypilot-0.14.1.json"), task) == []
    broken = copy.deepcopy(task) | change
    assert any(sentence in problem for problem in against(schema("skypilot-0.14.1.json"), broken))


def test_a_task_asks_for_what_the_profile_says(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task,) = rendered(capsys, rl_yaml, *OPTIONS["full"])
    assert (task["name"], task["num_nodes"]) == ("big", 2)
    assert task["resources"] == {
        "infra": "k8s/my-context", "accelerators": "H100:8", "cpus": "96+", "memory": "512+", "disk_size": 1000,
        "image_id": "docker:registry/megarl:gpu", "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]},
    }  # fmt: skip
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["envs"].items() >= {"NCCL_IB_HCA": "mlx5", "NAME": "two $(words)"}.items()
    assert task["volumes"] == {"/shared": "data"}
    assert task["file_mounts"] == {"/data": {"source": "s3://my-data", "mode": "MOUNT"}}
    assert task["setup"] == "nvidia-smi\n"
    (hook,) = task["config"]["hooks"]
    assert (hook["events"], hook["timeout"]) == (["preemption"], 600)


@pytest.mark.skipif("elastic" not in INSTALLED, reason="resources.spares is a field of the option elastic")
def test_the_example_is_a_run_on_three_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    words = ["examples/kubernetes/llama-3-1-8b-grpo.yaml", "--cluster-profile", "examples/kubernetes/skypilot.yml"]
    assert main(["submit", "skypilot", *words, "--dry-run"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert against(schema("skypilot-0.14.1.json"), task) == []
    assert task["num_nodes"] == 3


def test_the_gpu_is_that_of_the_config_unless_it_is_named(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "skypilot", str(rl_yaml), *ON_VOLUME[:-2], "--dry-run"]
    assert main([*words, "resources.gpu=h200"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["resources"]["accelerators"] == "H200:8"


@pytest.mark.parametrize(("rank", "address", "is_head"), [("0", "10.0.0.1", "yes"), ("1", "10.0.0.2", "no")])
@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_a_nodes_shell_writes_the_files_and_starts_its_script(
    rank: str, address: str, is_head: str, launcher: str,
    rl_yaml: Path, sft_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = rl_yaml if launcher == "ray" else sft_yaml
    (task,) = rendered(capsys, config, "--workdir", str(tmp_path), "--volumes", f"here={tmp_path}")
    files = tmp_path / f"megarl-{task['name']}"
    written, _, first = task["run"].rpartition("exec bash ")
    script = f"{written}\necho $MEGARL_HEAD $MEGARL_NODE_ADDRESS {first}"
    told = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_RANK": rank,
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    done = subprocess.run(["bash", "-c", script], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10.0.0.1", address, f"{files}/{'node' if launcher == 'ray' else 'driver'}.sh"]
    assert (files / "run.yaml").read_text() == config.read_text()
    assert {name: (files / name).read_text() for name in scripts()} == scripts()
    show = f'files=F; source "{files}/job.sh"; echo "$MEGARL_IS_HEAD" "${{job%.*}}" "${{arguments[@]}}"'
    shown = subprocess.run(["bash", "-euc", show], capture_output=True, text=True, check=True).stdout.split()
    run = f"{tmp_path}/runs/{task['name']}"
    assert shown[:3] == [is_head, f"{run}/jobs/{task['name']}", "F/run.yaml"]


@pytest.mark.parametrize("text", ["a\nEND\nb\n", "END", "$HOME `x` \\\n", "END_\nEND\n"])
def test_a_file_is_written_as_it_is(text: str, tmp_path: Path) -> None:
    subprocess.run(["bash", "-euc", here_document("a", text)], env={"files": str(tmp_path)}, check=True)
    assert (tmp_path / "a").read_text() == (text if text.endswith("\n") else f"{text}\n")


def test_a_task_goes_to_sky_with_its_secrets_by_name(
    rl_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "skypilot", str(rl_yaml), *ON_VOLUME, "--secrets", "MY_TOKEN"]
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    assert main(words) == 2
    assert "sky is not on this machine" in capsys.readouterr().err
    sky = tmp_path / "bin" / "sky"
    sky.write_text(f'#!/bin/bash\necho "${{*:1:6}}" >{tmp_path}/words\n/bin/cat "${{@: -1}}" >{tmp_path}/given\necho job 7\n')
    sky.chmod(0o755)
    assert main(words) == 2
    assert "secrets names MY_TOKEN, which is not in your environment" in capsys.readouterr().err
    monkeypatch.setenv("MY_TOKEN", "hf_abcdefghijklmnop")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "job 7" in shown.out
    assert (tmp_path / "words").read_text() == "jobs launch --yes --detach-run --secret MY_TOKEN\n"
    given = (tmp_path / "given").read_text()
    assert yaml.safe_load(given)["secrets"] == {"MY_TOKEN": None}
    assert "hf_abcdefghijklmnop" not in given + shown.out + shown.err
