"""Every manifest that `megarl submit kubernetes` renders is one that a server would take, and says what the profile says."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from megarl.cli import main
from megarl.option_list import OPTIONS as INSTALLED
from tests.launch.manifest_rules import problems

Tree = Any
NEEDS_SPARES = pytest.mark.skipif("elastic" not in INSTALLED, reason="resources.spares is a field of the option elastic")
ROOT = Path(__file__).parents[2]
ON_SHARED = ["run.folder=runs", "--image", "registry/megarl:gpu", "--claims", "data=/shared"]
OPTIONS = {
    "plain": [],
    "one node": ["policy.layout.dp=8"],
    "seeds": ["--seeds", "3,5"],
    "processors": ["--gpus-per-node", "0", "--places-per-node", "4", "--no-exclusive"],
    "full": [
        "--namespace", "lab", "--partition", "h100", "--qos", "high", "--time", "1-06:30:00", "--warn-s", "600",
        "--interface", "ib0", "--env", "NCCL_IB_HCA=mlx5", "--env", "NAME=two $(words) $x", "--cpus-per-node", "96",
        "--memory", "1500Gi", "--shared-memory", "600Gi", "--devices", "rdma/hca=8", "--host-network", "--claims", "more=/more",
        "--secrets", "HF_TOKEN=tokens/hf", "--secrets-from", "wandb", "--pull-secrets", "registry", "--restarts", "7",
        "--node-selector", "topology.kubernetes.io/zone=a", "--tolerations", "nvidia.com/gpu:NoSchedule",
        "--tolerations", "spot=yes:NoExecute",
    ],
}  # fmt: skip


def rendered(capsys: pytest.CaptureFixture[str], config: Path, *words: str) -> list[Tree]:
    """The documents that a dry run prints."""
    assert main(["submit", "kubernetes", str(config), "policy.layout.dp=16", *ON_SHARED, *words, "--dry-run"]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pods(manifest: Tree) -> list[Tree]:
    """The pod templates of a RayJob or JobSet, the first node's first."""
    if manifest["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in manifest["spec"]["replicatedJobs"]]
    cluster = manifest["spec"]["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.fixture(params=["RayJob", "JobSet of Ray", "JobSet of torchrun"])
def form(request: pytest.FixtureRequest, rl_yaml: Path, sft_yaml: Path) -> tuple[str, Path, list[str]]:
    """A kind, the config of a run of that kind, and the options that ask for it."""
    kind = str(request.param)
    return kind.split()[0], sft_yaml if "torchrun" in kind else rl_yaml, ["--no-kuberay"] if kind == "JobSet of Ray" else []


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_server_has_nothing_against_a_manifest(
    kind: str, form: tuple[str, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    documents = rendered(capsys, form[1], *form[2], *OPTIONS[kind])
    assert [made["kind"] for made in documents] == ["ConfigMap", form[0]] * (2 if kind == "seeds" else 1)
    assert [(made["kind"], problem) for made in documents for problem in problems(made)] == []


@pytest.mark.skipif("MEGARL_CRDS" not in os.environ, reason="MEGARL_CRDS names no folder with the published definitions")
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_published_definitions_have_nothing_against_a_manifest(
    kind: str, form: tuple[str, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    made = rendered(capsys, form[1], *form[2], *OPTIONS[kind])[1]
    file = {"RayJob": "ray.io_rayjobs.yaml", "JobSet": "jobset.x-k8s.io_jobsets.yaml"}[made["kind"]]
    definition = yaml.safe_load((Path(os.environ["MEGARL_CRDS"]) / file).read_text())
    version = made["apiVersion"].partition("/")[2]
    published = next(entry for entry in definition["spec"]["versions"] if entry["name"] == version)["schema"]["openAPIV3Schema"]
    assert [error.message for error in Draft202012Validator(_strict(published)).iter_errors(made)] == []
    made["spec"]["unknown"] = 1
    assert not Draft202012Validator(_strict(published)).is_valid(made)


def _strict(tree: Tree) -> Tree:
    """An OpenAPI schema of a CRD as a JSON schema that takes no field which a server would prune."""
    if isinstance(tree, list):
        return [_strict(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    made = {name: _strict(value) for name, value in tree.items()}
    if tree.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if "properties" in tree and isinstance(tree["properties"], dict) and "type" in tree:
        made["additionalProperties"] = bool(tree.get("x-kubernetes-preserve-unknown-fields"))
    return made


@NEEDS_SPARES
@pytest.mark.parametrize(("profile", "kind"), [("cluster", "RayJob"), ("jobset", "JobSet")])
def test_the_example_is_a_run_on_three_nodes(
    profile: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["examples/kubernetes/llama-3-1-8b-grpo.yaml", "--cluster-profile", f"examples/kubernetes/{profile}.yml"]
    assert main(["submit", "kubernetes", *words, "--dry-run"]) == 0
    files, made = yaml.safe_load_all(capsys.readouterr().out)
    assert made["kind"] == kind
    assert [problem for manifest in (files, made) for problem in problems(manifest)] == []
    assert "\nnodes=3\n" in files["data"]["job.sh"]


def put(path: str, value: Tree) -> Callable[[Tree], None]:
    """A change that sets what is at a dotted path of a manifest; `+` at its end adds to a list."""

    def change(tree: Tree) -> None:
        *places, last = path.split(".")
        for place in places:
            tree = tree[int(place) if place.isdigit() else place]
        if last == "+":
            tree.append(value)
        else:
            tree[int(last) if last.isdigit() else last] = value

    return change


def secret(name: str) -> Tree:
    """An environment variable from a secret of this name."""
    return {"name": "T", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}


def field(path: str) -> Tree:
    """An environment variable from a field of the pod."""
    return {"name": "T", "valueFrom": {"fieldRef": {"fieldPath": path}}}


HEAD = "spec.rayClusterSpec.headGroupSpec.template.spec"
HELD = f"{HEAD}.containers.0"
GROUP = "spec.rayClusterSpec.workerGroupSpecs.0"
JOB = "spec.replicatedJobs.0.template.spec"
CODES = f"{JOB}.podFailurePolicy.rules.1"
BROKEN: dict[str, tuple[str, Callable[[Tree], None], str]] = {
    "another kind": ("RayJob", put("kind", "RayJobs"), "no such kind"),
    "an unknown field": ("RayJob", put("spec.retries", 3), "'retries' was unexpected"),
    "an unknown field beside the spec": ("RayJob", put("entrypoint", "x"), "unknown fields"),
    "an unknown field of a pod": ("RayJob", put(f"{HEAD}.sharedMemory", "1Gi"), "'sharedMemory' was unexpected"),
    "an unknown field of a JobSet": ("JobSet", put("spec.restarts", 3), "'restarts' was unexpected"),
    "a policy that JobSets lack": ("JobSet", put("spec.successPolicy.operator", "Most"), "'Most' is not one of"),
    "an action that JobSets lack": ("JobSet", put("spec.failurePolicy.rules.0.action", "Restart"), "is not one of"),
    "text for a number": ("RayJob", put("spec.backoffLimit", "3"), "is not of type 'integer'"),
    "a number for a text": ("RayJob", put(f"{GROUP}.rayStartParams.num-cpus", 8), "is not of type 'string'"),
    "no head": ("RayJob", lambda tree: tree["spec"]["rayClusterSpec"].pop("headGroupSpec"), "required property"),
    "a long name": ("RayJob", put("metadata.name", "a" * 48), "RayJob's name"),
    "a name with capitals": ("JobSet", put("metadata.name", "Big"), "name 'Big'"),
    "a long name of a pod": ("JobSet", put("metadata.name", "a" * 52), "a pod would be called"),
    "a label": ("RayJob", put("metadata.labels.a/b/c", "x"), "label key"),
    "a label's value": ("RayJob", put("metadata.labels.x", "0.2+dev"), "label value"),
    "tokens without a version": ("RayJob", put("spec.rayClusterSpec.rayVersion", "2.40.0"), "tokens need"),
    "replicas": ("RayJob", put(f"{GROUP}.maxReplicas", 0), "replicas of node"),
    "no quantity": ("RayJob", put(f"{HELD}.resources.limits.memory", "64 GB"), "quantity '64 GB'"),
    "more asked for than allowed": ("RayJob", put(f"{HELD}.resources.limits.cpu", "2"), "cpu: more asked for"),
    "GPUs asked for": ("RayJob", lambda tree: _held(tree)["resources"]["limits"].pop("nvidia.com/gpu"), "nvidia.com/gpu"),
    "other GPUs in requests": ("RayJob", put(f"{HELD}.resources.requests", {"nvidia.com/gpu": "4"}), "nvidia.com/gpu must"),
    "an unknown resource": ("RayJob", put(f"{HELD}.resources.limits.gpus", "8"), "resource 'gpus'"),
    "a volume that is missing": ("RayJob", put(f"{HELD}.volumeMounts.0.name", "none"), "no volume 'none'"),
    "two volumes of one name": ("RayJob", put(f"{HEAD}.volumes.0.name", "shared-memory"), "two volumes"),
    "two mounts at one path": ("RayJob", put(f"{HELD}.volumeMounts.0.mountPath", "/dev/shm"), "two mounts"),
    "a volume of two sources": ("RayJob", put(f"{HEAD}.volumes.0.emptyDir", {}), "2 sources"),
    "two ports": ("RayJob", put(f"{HELD}.ports", [{"name": "a", "containerPort": n} for n in (1, 2)]), "two ports"),
    "two containers of one name": ("JobSet", lambda tree: _twice(tree), "two containers"),
    "a secret with its value": ("RayJob", put(f"{HELD}.env.+", {**secret("s"), "value": "x"}), "two sources of T"),
    "a secret's name": ("RayJob", put(f"{HELD}.env.+", secret("hf_x")), "secret of T"),
    "a field that pods lack": ("RayJob", put(f"{HELD}.env.+", field("status.ip")), "fieldPath"),
    "restarts within a pod": ("JobSet", put(f"{JOB}.template.spec.restartPolicy", "OnFailure"), "restartPolicy Never"),
    "a job that is not there": ("JobSet", put("spec.successPolicy.targetReplicatedJobs.0", "driver"), "no replicated job"),
    "success in a rule": ("JobSet", put(f"{CODES}.onExitCodes", {"operator": "In", "values": [0]}), "exit codes"),
    "no image": ("JobSet", put(f"{JOB}.template.spec.containers.0.image", ""), "image"),
}  # fmt: skip


def _held(tree: Tree) -> Tree:
    return pods(tree)[0]["spec"]["containers"][0]


def _twice(tree: Tree) -> None:
    held = pods(tree)[0]["spec"]["containers"]
    held.append(copy.deepcopy(held[0]))


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_manifest_is_found_out(mistake: str, rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, breaks, sentence = BROKEN[mistake]
    made = rendered(capsys, rl_yaml, *(["--no-kuberay"] if kind == "JobSet" else []))[1]
    assert problems(made) == []
    breaks(made)
    assert any(sentence in problem for problem in problems(made)), problems(made)


def test_what_a_profile_asks_for_is_in_every_pod(form: tuple[str, Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    files, made = rendered(capsys, form[1], *form[2], *OPTIONS["full"])
    assert made["metadata"]["namespace"] == files["metadata"]["namespace"] == "lab"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "h100"
    for pod in pods(made):
        spec = pod["spec"]
        (held,) = spec["containers"]
        devices = {"nvidia.com/gpu": "8", "rdma/hca": "8", "memory": "1500Gi"}
        assert held["resources"] == {"requests": {"cpu": "96", **devices}, "limits": devices}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in held["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "600Gi"}
        assert mounted["/more"]["persistentVolumeClaim"] == {"claimName": "more"}
        assert mounted["/etc/megarl"]["configMap"] == {"name": files["metadata"]["name"]}
        assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert held["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        variables = {variable["name"]: variable for variable in held["env"]}
        assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "tokens", "key": "hf"}}
        assert held["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert variables["NAME"]["value"] == "two $$(words) $$x"  # a server puts one $ for two, and no variable in
        assert variables["NCCL_SOCKET_IFNAME"]["value"] == "ib0"
        assert spec["terminationGracePeriodSeconds"] == 600
        assert held["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/megarl/warn.sh"]
        assert spec["priorityClassName"] == "high"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["nodeSelector"] == {"topology.kubernetes.io/zone": "a"}
        assert spec["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute"},
        ]
    restarts = made["spec"]["backoffLimit"] if form[0] == "RayJob" else made["spec"]["failurePolicy"]["maxRestarts"]
    assert restarts == 7


def test_pods_of_a_run_are_on_nodes_of_their_own_unless_they_may_share(
    rl_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pod in pods(rendered(capsys, rl_yaml)[1]):
        (rule,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert all("affinity" not in pod["spec"] for pod in pods(rendered(capsys, rl_yaml, "--no-exclusive")[1]))


@NEEDS_SPARES
def test_nodes_are_those_of_the_layout_and_of_its_spares(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, nodes in (([], 2), (["resources.spares=0"], 2), (["resources.spares=1"], 3), (["resources.spares=9"], 4)):
        files, ray_job = rendered(capsys, rl_yaml, *words)
        assert f"\nnodes={nodes}\n" in files["data"]["job.sh"]
        assert f"\nreplaces_ranks={'yes' if words else 'no'}\n" in files["data"]["job.sh"]
        (group,) = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (nodes - 1,) * 3  # the head is the first node
        jobs = rendered(capsys, rl_yaml, *words, "--no-kuberay")[1]["spec"]["replicatedJobs"]
        assert {job["name"]: job["template"]["spec"]["completions"] for job in jobs} == {"head": 1, "node": nodes - 1}


def test_exit_code_75_starts_a_job_set_again_and_any_other_ends_it(
    rl_yaml: Path, sft_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for config, words, first in ((rl_yaml, ["--no-kuberay"], "head"), (sft_yaml, [], "node")):
        spec = rendered(capsys, config, *words)[1]["spec"]
        job = next(job for job in spec["replicatedJobs"] if job["name"] == first)["template"]["spec"]
        preempted, ended = job["podFailurePolicy"]["rules"]
        assert preempted == {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert ended == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}}
        assert job["backoffLimit"] == 0  # what is left fails by BackoffLimitExceeded, which no rule of the JobSet names
        assert [rule["onJobFailureReasons"] for rule in spec["failurePolicy"]["rules"]] == [["PodFailurePolicy"]]
        assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [first]}


def test_a_seed_is_a_run_of_its_own_and_words_reach_it_as_they_were_typed(
    rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = 'data.system_prompt=it\'s "$HOME" `x` \\ *'
    documents = rendered(capsys, rl_yaml, odd, "--seeds", "3,5")
    assert [made["metadata"]["name"] for made in documents] == ["big-seed3"] * 2 + ["big-seed5"] * 2
    files = documents[2]["data"]
    assert files["run.yaml"] == rl_yaml.read_text()
    show = f'files=/f MEGARL_START=2\n{files["job.sh"]}\nprintf "%s\\n" "$run" "$job" "${{arguments[@]}}"'
    shown = subprocess.run(["bash", "-euc", show], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[:3] == ["/shared/runs/big-seed5", "/shared/runs/big-seed5/jobs/big-seed5.2", "/f/run.yaml"]
    assert odd in shown
    assert shown[-2:] == ["run.seed=5", "run.name=big-seed5"]


def test_only_ray_jobs_remember_that_a_run_ended(rl_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nended=$run/jobs/big.by-hand.ended\n" in rendered(capsys, rl_yaml)[0]["data"]["job.sh"]
    assert "\nended=\n" in rendered(capsys, rl_yaml, "--no-kuberay")[0]["data"]["job.sh"]


def test_the_same_job_is_the_same_text_and_nothing_is_written(
    rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert rendered(capsys, rl_yaml) == rendered(capsys, rl_yaml)
    assert sorted(tmp_path.rglob("*")) == before


def test_manifests_go_to_kubectl_and_its_refusal_is_told(
    rl_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "kubernetes", str(rl_yaml), *ON_SHARED, "--namespace", "lab"]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    assert main(words) == 2
    assert "kubectl is not on this machine" in capsys.readouterr().err
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(
        f'#!/bin/bash\necho "$*" >{tmp_path}/words\n/bin/cat >{tmp_path}/given\necho rayjob.ray.io/big created\n'
    )
    kubectl.chmod(0o755)
    assert main(words) == 0
    assert "rayjob.ray.io/big created" in capsys.readouterr().out
    assert shlex.split((tmp_path / "words").read_text()) == ["create", "--namespace=lab", "-f", "-"]
    files, ray_job = yaml.safe_load_all((tmp_path / "given").read_text())
    assert problems(files) == problems(ray_job) == []
    ends = re.findall(r"^ended=\$run/jobs/big\.(\w{8})\.ended$", files["data"]["job.sh"], re.M)
    assert main(words) == 0
    again = next(yaml.safe_load_all((tmp_path / "given").read_text()))["data"]["job.sh"]
    assert ends
    assert ends[0] not in again  # what an earlier submission ended, this one begins anew
    kubectl.write_text("#!/bin/bash\necho 'Error from server (AlreadyExists): configmaps \"big\" already exists' >&2\nexit 1\n")
    assert main(words) == 2
    assert 'kubectl refused: Error from server (AlreadyExists): configmaps "big" already exists' in capsys.readouterr().err
