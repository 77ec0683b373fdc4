"""Every script that `megarl submit` renders is clean shell, asks for what was asked, and hands the run its words unharmed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main

SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
OPTIONS = {
    "plain": [],
    "array": ["--seeds", "3,5,8"],
    "shared": ["--no-exclusive", "--cpus-per-node", "12"],
    "spares": ["resources.spares=1"],
    "full": [
        "--partition", "gpu", "--account", "lab", "--qos", "high", "--time", "1-06:30:00", "--warn-s", "600",
        "--interface", "ib0",
        "--env", "NCCL_IB_HCA=mlx5", "--env", "NAME=two words", "--setup", "module load cuda/13.0", "--after", "afterok:17",
        "--runtime", "apptainer", "--image", "/images/megarl 2.sif", "--mounts", "/data", "--directives=--comment=x",
    ],
}  # fmt: skip


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["submit", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def inner_scripts(script: str) -> dict[str, str]:
    """The scripts that a script writes for the nodes, by name."""
    return dict(re.findall(r"^cat >\"\$job/(\w+\.sh)\" <<'END'\n(.*?)^END$", script, re.M | re.S))


def shellcheck(path: Path, text: str, *options: str) -> str:
    path.write_text(text)
    done = subprocess.run([SHELLCHECK, "--shell=bash", *options, str(path)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("system", ["slurm", "pbs", "lsf"])
def test_scripts_are_clean_shell(
    system: str, kind: str, rl_yaml: Path, sft_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for config in (rl_yaml, sft_yaml):
        if kind == "spares" and config == sft_yaml:
            continue  # refused: they are of runs that sample
        script = rendered(capsys, system, str(config), "policy.layout.dp=16", *OPTIONS[kind])
        assert shellcheck(tmp_path / "job.sh", script) == ""
        scripts = inner_scripts(script)
        assert (
            {"driver.sh", "ray_node.sh"} <= scripts.keys()
            if config == rl_yaml
            else {"rank.sh", "torchrun_node.sh"} <= scripts.keys()
        )
        for text in scripts.values():
            assert shellcheck(tmp_path / "inner.sh", text, "--exclude=SC1091,SC2154") == ""


def test_an_odd_override_reaches_the_run_as_it_was_typed(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = 'data.system_prompt=it\'s "$HOME" `x` \\ *'
    script = rendered(capsys, "slurm", str(rl_yaml), odd)
    line = next(line for line in script.splitlines() if line.startswith("on_head bash"))
    said = subprocess.run(
        ["bash", "-c", f"on_head() {{ printf '%s\\n' \"$@\"; }}; job=J; options=(run.resume=auto)\n{line.removesuffix('&')}"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert said == ["bash", "J/driver.sh", "J", str(rl_yaml), odd, "run.resume=auto"]


def test_what_is_asked_of_the_batch_system_is_in_its_directives(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "slurm", str(rl_yaml), "policy.layout.dp=16", *OPTIONS["full"])
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    for expected in (
        "--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--account=lab", "--qos=high", "--time=1-06:30:00",
        "--signal=B:USR1@600", "--requeue", "--dependency=afterok:17", "--comment=x",
    ):  # fmt: skip
        assert expected in directives
    assert "export NAME='two words'" in script
    assert script.index("module load cuda/13.0") < script.index("megarl node describe")
    assert "apptainer exec --nv" in script
    assert "'/images/megarl 2.sif'" in script
    pbs = rendered(capsys, "pbs", str(rl_yaml), "policy.layout.dp=16", *OPTIONS["full"])
    assert "#PBS -l select=2:ncpus=64:mpiprocs=1:ngpus=8\n" in pbs
    assert "#PBS -l walltime=30:30:00\n" in pbs
    lsf = rendered(capsys, "lsf", str(rl_yaml), "policy.layout.dp=16", *OPTIONS["full"])
    assert "#BSUB -n 128\n" in lsf
    assert "#BSUB -W 1830\n#BSUB -wa USR1 -wt 10\n" in lsf


def test_a_job_with_spares_outlives_a_lost_node(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm ends jobs and steps that lose a node unless they say otherwise; what goes on from disk is better begun anew."""
    script = rendered(capsys, "slurm", str(rl_yaml), "policy.layout.dp=16", "resources.spares=1")
    assert "#SBATCH --no-kill\n" in script
    assert "step=(srun --overlap --no-kill --kill-on-bad-exit=0 " in script
    assert '[[ -n $(sinfo --noheader --states=down --nodes="$SLURM_JOB_NODELIST") ]]' in script
    plain = rendered(capsys, "slurm", str(rl_yaml), "policy.layout.dp=16")
    assert "no-kill" not in plain
    assert "sinfo" not in plain


def test_gpus_are_asked_for_by_gres_where_the_cluster_wants_that(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "slurm", str(rl_yaml), "--gres", "gpu:h100:8")
    assert "#SBATCH --gres=gpu:h100:8\n" in script
    assert "gpus-per-node" not in script
    assert "#SBATCH --gpus-per-node=8\n" in rendered(capsys, "slurm", str(rl_yaml))


def test_a_script_says_how_to_submit_it_by_hand(rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "slurm", str(rl_yaml))
    output = re.search(r"#SBATCH --output=(.+)/%j.txt", script)
    assert output is not None
    by_hand = re.search(r"saved as this file: (mkdir -p .+); sbatch (.+)", script)
    assert by_hand is not None
    assert not Path(output[1]).exists()
    subprocess.run(["bash", "-c", by_hand[1]], check=True)
    assert Path(output[1]).is_dir()
    assert Path(by_hand[2]).parent == Path(output[1])


def test_a_node_tells_ray_of_all_its_cores_and_opens_as_many_files_as_it_may(
    rl_yaml: Path, sft_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray, torchrun = (inner_scripts(rendered(capsys, "slurm", str(config))) for config in (rl_yaml, sft_yaml))
    assert '--num-cpus="$(nproc)" --num-gpus=8' in ray["ray_node.sh"]
    for script in (ray["ray_node.sh"], ray["driver.sh"], torchrun["torchrun_node.sh"]):
        line = next(line for line in script.splitlines() if line.startswith("ulimit"))
        said = subprocess.run(
            ["bash", "-euc", f"ulimit -Sn 64; {line}\nulimit -Sn; ulimit -Hn; ulimit -Sl; ulimit -Hl"],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert said[0] == said[1] != "64"
        assert said[2] == said[3]
    shared = inner_scripts(rendered(capsys, "slurm", str(rl_yaml), "--no-exclusive", "--cpus-per-node", "12"))
    assert "--num-cpus=12 --num-gpus=8" in shared["ray_node.sh"]
    on_cpus = inner_scripts(rendered(capsys, "slurm", str(rl_yaml), "--gpus-per-node", "0", "--places-per-node", "3"))
    assert "--num-cpus=3 --num-gpus=0" in on_cpus["ray_node.sh"]


def test_an_array_is_one_run_for_each_seed(rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "slurm", str(rl_yaml), *OPTIONS["array"])
    assert "#SBATCH --array=0-2\n" in script
    begin, end = script.index("# ---- this job"), script.index('mkdir -p "$job/')
    facts = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1", "SLURMD_NODENAME": "n1"}
    shown = subprocess.run(
        ["bash", "-euc", script[begin:end] + 'echo "$run" "${options[@]}" "$job"'],
        env=facts, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    run = f"{tmp_path}/runs/big-seed5"
    assert shown == [run, "run.seed=5", "run.name=big-seed5", "run.resume=auto", f"{run}/jobs/40_1.0"]


def test_the_same_job_is_the_same_script_and_nothing_is_written(
    rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert rendered(capsys, "slurm", str(rl_yaml)) == rendered(capsys, "slurm", str(rl_yaml))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_profile_file_and_options_are_one_profile(rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("gpus_per_node: 4\npartition: slow\nenv: {A: '1'}\n")
    script = rendered(
        capsys, "slurm", str(rl_yaml), "policy.layout.dp=8", "--cluster-profile", str(profile), "--partition", "quick"
    )
    assert "--nodes=2\n" in script
    assert "--gpus-per-node=4\n" in script
    assert "--partition=quick\n" in script
    assert "export A=1\n" in script


def test_a_job_for_a_ray_cluster_is_ray_s_own_command(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(rendered(capsys, "ray", str(rl_yaml), "run.steps=3", "--address", "http://head:8265"), comments=True)
    assert words[1:4] == ["job", "submit", "--no-wait"]
    assert words[-5:] == ["megarl", "train", str(rl_yaml), "run.steps=3", "run.resume=auto"]


@pytest.mark.parametrize(
    ("system", "program", "answer", "second"),
    [
        ("pbs", "qsub", "7{}.here", "-W depend=afterany:71.here"),
        ("lsf", "bsub", "Job <7{}> is submitted to queue <normal>.", "-w ended(71)"),
    ],
)
def test_a_chain_is_jobs_of_one_kept_script_each_after_the_one_before(
    system: str, program: str, answer: str, second: str,
    rl_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = tmp_path / "bin"
    fake.mkdir()
    calls = tmp_path / "calls"
    (fake / program).write_text(
        f'#!/bin/bash\necho "$*" >>{calls}\nn=$(wc -l <{calls})\n[[ -t 0 || {system} != lsf ]] || cat >{tmp_path}/given.$n\n'
        f"echo '{answer.format('N')}' | sed s/N/$n/\n"
    )
    (fake / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:/usr/bin:/bin")
    assert main(["submit", system, str(rl_yaml), "--chain", "2"]) == 0
    kept = tmp_path / "runs" / "big" / "jobs" / f"big.{system}.sh"
    words = str(kept) if system == "pbs" else ""
    assert [line.strip() for line in calls.read_text().splitlines()] == [words, f"{second} {words}".strip()]
    script = kept.read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    if system == "lsf":
        assert (tmp_path / "given.2").read_text() == script
    assert re.search(r"job 71\S*, then 72", capsys.readouterr().out)


ODD = "x$(touch made)`touch made`\" ; touch made; '"
BROKEN = "x\ntouch made"


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        *((field, BROKEN, "which would end its line of a script; it must be printable") for field in (
            "partition", "account", "qos", "gres", "venv", "interface", "local_folder", "directives", "mounts")),
        *((field, "gpu --nodelist=b", "must be without white space") for field in ("partition", "account", "qos", "gres")),
        ("env", "A=1; touch made; B=2", None),
        ("env", "A; touch made; B=2", "env names the variable 'A; touch made; B'"),
        ("after", BROKEN, "--after is 'x\\ntouch made', which would end its line; it must be printable"),
    ],
)  # fmt: skip
def test_no_text_of_a_cluster_profile_becomes_another_line_or_option(
    field: str, value: str, sentence: str | None, rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{field.replace('_', '-')}={value}"]
    for system in ("slurm", "pbs", "lsf"):
        if sentence is None:
            assert "export A='1; touch made; B=2'\n" in rendered(capsys, system, str(rl_yaml), *words)
            continue
        assert main(["submit", system, str(rl_yaml), *words, "--dry-run"]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("system", ["slurm", "pbs", "lsf"])
def test_a_clusters_folder_and_interface_are_words(
    system: str, rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = rendered(capsys, system, str(rl_yaml), f"--local-folder={ODD}", f"--interface={ODD}")
    assert shellcheck(tmp_path / "job.sh", script, "--severity=warning") == ""
    lines = [line for line in script.splitlines() if line.startswith("cache=")]
    agree = re.search(r"^on_head megarl node agree .*\n.* \|\| fail.*$", script, re.M)
    assert agree is not None
    stubs = "on_head() { printf '%s\\n' \"$@\"; }; job=J; nodes=1; head=h; job_id=7"
    program = "\n".join([stubs, *lines, 'echo "$cache"', agree[0]])
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert (said[0], said[-1]) == (f"{ODD}/megarl-7", ODD)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("system", ["slurm", "pbs", "lsf"])
def test_no_name_or_path_of_a_config_becomes_a_command_or_a_directive(
    system: str, rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With seeds, `run.name` stood between double quotes, and a line break in a file's name ended a comment."""
    made = tmp_path / "made"
    for words in ([f"run.name={ODD}"], ["run.name=a --nodelist=b"], ["run.folder=runs\ntouch made"]):
        assert main(["submit", system, str(rl_yaml), *words, "--seeds", "1,2", "--dry-run"]) == 2
        assert "directives of a batch script cannot name; it must be without white space" in capsys.readouterr().err
    broken = rl_yaml.rename(tmp_path / "rl.yaml\ntouch made #.yaml")
    assert main(["submit", system, str(broken), "--dry-run"]) == 2
    assert "whose name a comment cannot hold" in capsys.readouterr().err
    named = broken.rename(tmp_path / "x$(touch made)`touch made`' \".yaml")
    odd = f"data.system_prompt={ODD}"
    given = [odd, "run.name=äb@[c]"]
    script = rendered(capsys, system, str(named), *given, "--seeds", "1,2")
    assert shellcheck(tmp_path / "job.sh", script, "--severity=warning") == ""
    assert re.search(r"^#(SBATCH --job-name=|PBS -N |BSUB -J )_b__c_(\[1-2\])?$", script, re.M)
    lines = [line for line in script.splitlines() if line.startswith(('options=("run.seed', "on_head bash"))]
    stubs = "on_head() { printf '%s\\n' \"$@\"; }; job=J; seed=1\n"
    done = subprocess.run(
        ["bash", "-c", stubs + "\n".join(lines).removesuffix("&")], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["bash", "J/driver.sh", "J", str(named), *given, "run.seed=1", "run.name=äb@[c]-seed1"]
    assert not made.exists()
