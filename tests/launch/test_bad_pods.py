"""What Kubernetes or SkyPilot would not take is said before anything is submitted: one sentence, no secret in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from megarl.cli import main
from megarl.launch.pod_profile import ContainerProfile, KubernetesProfile, SkyProfile
from megarl.option_list import OPTIONS

SECRET = "hf_abcdefghijklmnopqrst"
IMAGE = ["--image", "registry/megarl:gpu"]
CLAIM = ["--claims", "data=/shared"]
SOUND = ["run.folder=runs", *IMAGE, *CLAIM]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no image": (["run.folder=runs", *CLAIM], "runtime is pod, but image is missing; name the container image"),
    "a name with capitals": (
        [*SOUND, "run.name=Big_Run.2"],
        "run.name is 'Big_Run.2', which is no name of a Kubernetes object; it must be lower-case letters, digits and -, a "
        "letter first and no - last, at most 45 characters, such as big-run-2",
    ),
    "a name with a slash": ([*SOUND, "run.name=a/b"], "run.name is 'a/b', which is no name of a Kubernetes object"),
    "a long name": ([*SOUND, f"run.name={'a' * 46}"], f"at most 45 characters, such as {'a' * 45}"),
    "a name that is long with its seed": (
        [*SOUND, f"run.name={'a' * 40}", "--seeds", "1,2"],
        f"which with its seed has 46 characters; it must be lower-case letters, digits and -, a letter first and no - last, "
        f"at most 45 characters, such as {'a' * 39}",
    ),
    "a run on no volume": (
        ["run.folder=runs", *IMAGE],
        "run.folder/run.name is /shared/runs/big in the pods, which is on no volume, so that checkpoints would be lost",
    ),
    "an unknown resource": ([*SOUND, "--devices", "gpus=8"], "devices names the resource 'gpus', which no node offers"),
    "a resource of Kubernetes": ([*SOUND, "--devices", "a.kubernetes.io/b=8"], "it must be DOMAIN/NAME, as rdma/hca"),
    "an unknown name of GPUs": ([*SOUND, "--gpu-resource", "gpu"], "gpu_resource names the resource 'gpu'"),
    "GPUs as devices": ([*SOUND, "--devices", "nvidia.com/gpu=8"], "devices names nvidia.com/gpu, which gpus_per_node counts"),
    "half a device": ([*SOUND, "--devices", "rdma/hca=0.5"], "devices.rdma/hca is '0.5'; it must be a whole number"),
    "no quantity": ([*SOUND, "--shared-memory", "64 GB"], "shared_memory is '64 GB'; it must be a Kubernetes quantity"),
    "less memory than is shared": (
        [*SOUND, "--memory", "64Gi", "--shared-memory", "64Gi"],
        "memory is 64Gi, which holds /dev/shm of 64Gi (shared_memory) too; it must be more",
    ),
    "a secret in env": (
        [*SOUND, "--env", f"HF_TOKEN={SECRET}"],
        "env gives HF_TOKEN a value, which everybody could read who reads the manifest; remove it there and name HF_TOKEN in "
        "secrets",
    ),
    "a secret in env under another name": ([*SOUND, "--env", f"NAME={SECRET}"], "env gives NAME a value"),
    "a secret as a value": ([*SOUND, "--secrets", f"HF_TOKEN={SECRET}"], "secrets.HF_TOKEN is no reference; it must be"),
    "a secret alone": ([*SOUND, "--secrets", SECRET], "--secrets has no =; it must be KEY=VALUE"),
    "a secret for a secret's name": ([*SOUND, "--secrets-from", SECRET], "secrets_from has an entry that no secret can"),
    "a secret in the config": (
        [*SOUND, f"rewards.0.args={{api_key: {SECRET}}}"], "rewards[0].args.api_key of ",
    ),
    "a claim's name": ([*SOUND, "--claims", "My_Data=/more"], "claims names 'My_Data', which Kubernetes does not take"),
    "a claim's place": ([*SOUND, "--claims", "more=more"], "claims mounts at 'more'; it must be an absolute path"),
    "a claim on another's place": ([*SOUND, "--claims", "more=/shared/"], "claims mounts two volumes at one path"),
    "a claim on the shared memory": ([*SOUND, "--claims", "more=/dev/shm"], "also from /dev/shm and /etc/megarl"),
    "a namespace": ([*SOUND, "--namespace", "My Lab"], "namespace names 'My Lab', which Kubernetes does not take"),
    "a toleration": ([*SOUND, "--tolerations", "a:Never"], "tolerations names 'a:Never', which Kubernetes does not take"),
    "a label": ([*SOUND, "--node-selector", "zone=a b"], "node_selector names 'a b', which Kubernetes does not take"),
    "lines of shell": ([*SOUND, "--setup", "module load cuda"], "setup has shell lines, which Ray's pods do not run"),
    "seeds in words": ([*SOUND, "--seeds", "one"], "--seeds is 'one'; it must be whole numbers with commas between them"),
    "a warning shorter than a step": ([*SOUND, "--step-seconds", "400"], "set --warn-s to 600 or more"),
}  # fmt: skip
if "elastic" in OPTIONS:
    MISTAKES["too few nodes for the spares"] = (
        [*SOUND, "policy.layout.dp=8", "resources.spares=1", "--nodes", "1"],
        "nodes is 1, which have 8 GPUs, but the layouts need 9; ask for --nodes 2",
    )
VOLUME = ["run.folder=runs", *IMAGE, "--volumes", "data=/shared"]
OF_SKYPILOT: dict[str, tuple[list[str], str]] = {
    "no image": (["run.folder=runs"], "runtime is pod, but image is missing"),
    "no GPU's name": (VOLUME, "accelerator is not given, and neither is resources.gpu of the config; name the GPU"),
    "a run on a bucket": (
        ["run.folder=runs", *IMAGE, "--buckets", "s3://a=/shared"], "is on no volume, so that checkpoints would be lost",
    ),
    "a secret as a value": ([*VOLUME, "--secrets", f"HF_TOKEN={SECRET}"], "secrets has an entry that is no variable's name"),
    "a bucket": ([*VOLUME, "--buckets", "my-bucket=/data"], "buckets names 'my-bucket'; it must be a URL"),
    "memory": ([*VOLUME, "--memory", "64Gi"], "memory is '64Gi'; it must be a number of GB, or one with + behind it"),
}  # fmt: skip


@pytest.mark.parametrize(("system", "mistake"), [("kubernetes", m) for m in MISTAKES] + [("skypilot", m) for m in OF_SKYPILOT])
def test_a_mistake_is_one_sentence(system: str, mistake: str, rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = (MISTAKES if system == "kubernetes" else OF_SKYPILOT)[mistake]
    assert main(["submit", system, str(rl_yaml), *words, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megarl: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert SECRET not in err


UNKNOWN = "q8-zulu-55-tango-q8"
"""A secret whose form nobody knows; a variable of the environment has it."""
TEXTS = (
    SECRET,
    "glpat-abcdefghijklmnopqrst",
    UNKNOWN,
    f"user:{UNKNOWN}@registry/megarl:gpu",
    f"https://host/x?token={UNKNOWN}",
)
SHAPES = (lambda text: text, lambda text: [text], lambda text: {text: "/shared"}, lambda text: {"a": f"/{text}"})


@pytest.mark.parametrize("profile", [KubernetesProfile, SkyProfile])
def test_no_field_takes_a_secret_to_what_is_submitted(profile: type[ContainerProfile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", UNKNOWN)
    for name in profile.model_fields:
        for text in TEXTS:
            for shaped in SHAPES:
                with pytest.raises(ValidationError):
                    profile.model_validate({"image": "registry/megarl:gpu", name: shaped(text)})
    assert profile.model_validate({"image": "registry/megarl:gpu"}).image == "registry/megarl:gpu"


def test_an_image_with_a_password_is_refused_without_saying_it(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run.folder=runs", *CLAIM, "--image", f"https://user:{UNKNOWN}@registry/megarl:gpu", "--dry-run"]
    assert main(["submit", "kubernetes", str(rl_yaml), *words]) == 2
    out, err = capsys.readouterr()
    assert "image has a secret in it, which everybody could read who reads the manifest" in err
    assert UNKNOWN not in out + err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("account: lab", "account is 'lab', which pods have no place for; remove it"),
        ("runtime: apptainer", "runtime is 'apptainer'; it must be 'pod'"),
        ("kubray: false", "kubray is not a field of a cluster profile (did you mean 'kuberay'?)"),
        ("gres: gpu:8", "gres is 'gpu:8', which pods have no place for; remove it"),
        (f"secrets: {{HF_TOKEN: {SECRET}}}", "secrets.HF_TOKEN is no reference"),
        (f"secrets: [{SECRET}]", "secrets is "),
        (f"secrets: {SECRET}", "secrets is "),
    ],
)
def test_a_profile_for_another_cluster_is_refused(
    line: str, sentence: str, rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text(f"image: a\nclaims: {{data: /shared}}\n{line}\n")
    words = ["submit", "kubernetes", str(rl_yaml), "run.folder=runs", "--cluster-profile", str(profile), "--dry-run"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert SECRET not in err


def test_a_profile_of_pods_is_none_of_slurm(rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("claims: {data: /shared}\n")
    assert main(["submit", "slurm", str(rl_yaml), "--cluster-profile", str(profile), "--dry-run"]) == 2
    assert "claims is not a field of a cluster profile" in capsys.readouterr().err
