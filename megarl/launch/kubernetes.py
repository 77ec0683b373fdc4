"""A job as manifests of Kubernetes: a RayJob for KubeRay's operator, or a JobSet, and a ConfigMap with its config and scripts.

Manifests are made as data and written by PyYAML. The same job gives the same manifests.
"""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version
from typing import Any

import yaml

from megarl.errors import ConfigError, counted
from megarl.launch.job import Job
from megarl.launch.pod_job import STOPPED, PodRun, pod_runs
from megarl.launch.pod_profile import FILES, KubernetesProfile, toleration
from megarl.launch.submit import run_quietly
from megarl.version import __version__

LABEL_OF_RUN = "app.kubernetes.io/instance"
_RESTART = "jobset.sigs.k8s.io/restart-attempt"

_VERSION = re.sub(r"[^A-Za-z0-9._-]", "-", __version__)  # a label takes no + of a version from git

Manifest = dict[str, Any]


def manifests(job: Job, profile: KubernetesProfile, submission: str = "by-hand") -> list[Manifest]:
    """The objects of `job`: for each of its runs a ConfigMap, and a RayJob or, without KubeRay or Ray, a JobSet.

    `submission` tells this submission of the run from others, which may begin anew what an earlier one ended.

    Raises:
        ConfigError: Kubernetes would not take a name, a volume is missing, or a secret would be shown.
    """
    objects = []
    for run in pod_runs(job, profile, profile.claims, "claims"):
        of_ray = profile.kuberay and job.launcher == "ray"
        data = run.files(profile, f"{run.name}.{submission}.ended" if of_ray else "")
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(run, profile), "data": data}
        objects += [config_map, _ray_job(run, profile) if of_ray else _job_set(run, profile)]
    return objects


def as_text(job: Job, objects: list[Manifest]) -> str:
    """The objects as YAML documents for kubectl."""
    kinds = " and ".join(sorted({str(made["kind"]) for made in objects}))
    step = f"# A step takes about {job.step.seconds:.3g} s ({job.step.source}).\n" if job.step else ""
    return (
        f"# train {job.config_path.name} as {job.name}, by {job.launcher} on {counted(job.nodes, 'node')}: {kinds}\n"
        f"# Written by `megarl submit` {__version__}; to submit it by hand, saved as a file: kubectl create -f FILE\n{step}"
        + yaml.dump_all(objects, Dumper=YamlDumper, sort_keys=False, explicit_start=True, width=130)
    )


def submit(profile: KubernetesProfile, text: str) -> str:
    """Hand manifests to kubectl and give what it said.

    Raises:
        ConfigError: kubectl is not here, or the cluster refused; carries its own words.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on this machine; submit where it is, or look with --dry-run")
    space = [f"--namespace={profile.namespace}"] if profile.namespace else []
    return run_quietly(["kubectl", "create", *space, "-f", "-"], stdin=text)


def _metadata(run: PodRun, profile: KubernetesProfile) -> dict[str, Any]:
    space = {"namespace": profile.namespace} if profile.namespace else {}
    return {"name": run.name, **space, "labels": _labels(run)}


def _labels(run: PodRun) -> dict[str, str]:
    return {"app.kubernetes.io/name": "megarl", LABEL_OF_RUN: run.name, "app.kubernetes.io/version": _VERSION}


def _queued(metadata: dict[str, Any], profile: KubernetesProfile) -> dict[str, Any]:
    """The metadata with the label by which Kueue puts a job into its queue."""
    if profile.partition is None:
        return metadata
    return {**metadata, "labels": {**metadata["labels"], "kueue.x-k8s.io/queue-name": profile.partition}}


def _ray_job(run: PodRun, profile: KubernetesProfile) -> Manifest:
    """A RayJob whose head is the first node: a retry is a new Ray cluster, in which the run goes on from its checkpoint."""
    nodes = run.job.nodes
    cpus = profile.cpus if profile.gpus_per_node else profile.places
    start = {"num-cpus": str(cpus), "num-gpus": str(profile.gpus_per_node)}
    name_of_start = _from_field("MEGARL_START", "metadata.labels['ray.io/cluster']")
    head = _pod(run, profile, "ray-head", [name_of_start, {"name": "MEGARL_IS_HEAD", "value": "yes"}])
    workers = _pod(run, profile, "ray-worker", [name_of_start])
    count = nodes - 1
    groups = [
        {
            "groupName": "node", "replicas": count, "minReplicas": count, "maxReplicas": count, "rayStartParams": start,
            "template": workers,
        }
    ]  # fmt: skip
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _queued(_metadata(run, profile), profile),
        "spec": {
            "entrypoint": f"bash {FILES}/driver.sh",
            "submissionMode": "K8sJobMode",
            "backoffLimit": profile.restarts,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {**start, "dashboard-host": "0.0.0.0"}, "template": head},
                "workerGroupSpecs": groups if count else [],
            },
        },
    }


def _job_set(run: PodRun, profile: KubernetesProfile) -> Manifest:
    """A JobSet: exit code 75 and a lost pod of the first node start all pods again, any other exit code ends the run."""
    attempt = _from_field("MEGARL_START", f"metadata.labels['{_RESTART}']")
    by_ray = run.job.launcher == "ray"
    first = "head" if by_ray else "node"
    address = {"name": "MEGARL_HEAD", "value": f"{run.name}-{first}-0-0.{run.name}"}
    index = _from_field("MEGARL_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']")
    if by_ray:
        is_head = [{"name": "MEGARL_RANK", "value": "0"}, {"name": "MEGARL_IS_HEAD", "value": "yes"}]
        head = _pod(run, profile, "head", [attempt, address, *is_head], script="node.sh")
        jobs = [_replicated("head", 1, head, ends=True, backoff=0)]
        if run.job.nodes > 1:
            joins = [attempt, address, {"name": "MEGARL_RANK", "value": "1"}]
            node = _pod(run, profile, "node", joins, script="node.sh")
            jobs.append(_replicated("node", run.job.nodes - 1, node, ends=False, backoff=profile.restarts))
    else:
        node = _pod(run, profile, "node", [attempt, address, index], script="driver.sh")
        jobs = [_replicated("node", run.job.nodes, node, ends=True, backoff=0)]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(_metadata(run, profile), profile),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": run.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [first]},
            "failurePolicy": {
                "maxRestarts": profile.restarts,
                "rules": [{"name": "ended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": jobs,
        },
    }


def _replicated(name: str, count: int, pod: Manifest, *, ends: bool, backoff: int) -> Manifest:
    """A replicated job of `count` pods. `ends`: an exit code of its pods, other than 75, ends the run."""
    rules = [
        {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [STOPPED]}},
    ]
    spec = {
        "parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": backoff,
        **({"podFailurePolicy": {"rules": rules}} if ends else {}), "template": pod,
    }  # fmt: skip
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _pod(
    run: PodRun, profile: KubernetesProfile, container: str, env: list[Manifest], *, script: str | None = None
) -> Manifest:
    """The template of a node's pod. `script`: what it runs (None: what KubeRay has it run)."""
    volumes: list[Manifest] = [
        {"name": "files", "configMap": {"name": run.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory}},
    ]
    mounts: list[Manifest] = [
        {"name": "files", "mountPath": FILES, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for number, (claim, path) in enumerate(profile.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    held = {
        "name": container,
        "image": profile.image,
        **({"command": ["bash", f"{FILES}/{script}"]} if script else {}),
        "workingDir": profile.workdir,
        "env": [*_variables(profile), *env],
        **({"envFrom": [{"secretRef": {"name": name}} for name in profile.secrets_from]} if profile.secrets_from else {}),
        "resources": _resources(profile),
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": ["bash", f"{FILES}/warn.sh"]}}},
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if profile.devices else {}),
    }
    return {"metadata": {"labels": _labels(run)}, "spec": {**_placed(run, profile), "containers": [held], "volumes": volumes}}


def _placed(run: PodRun, profile: KubernetesProfile) -> Manifest:
    """Fields that say where a pod goes, how long it has when it must go, and its network."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": profile.warn_s,
        "automountServiceAccountToken": False,  # what a run executes has no business with the cluster
    }
    if profile.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if profile.qos:
        spec["priorityClassName"] = profile.qos
    if profile.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in profile.pull_secrets]
    if profile.node_selector:
        spec["nodeSelector"] = dict(profile.node_selector)
    if profile.tolerations:
        spec["tolerations"] = [toleration(text) for text in profile.tolerations]
    if profile.exclusive and run.job.nodes > 1:
        alone = {"labelSelector": {"matchLabels": {LABEL_OF_RUN: run.name}}, "topologyKey": "kubernetes.io/hostname"}
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}
    return spec


def _resources(profile: KubernetesProfile) -> Manifest:
    """Resources of a pod: devices and memory are limits and requests alike, cores are asked for and may be exceeded."""
    devices = {profile.gpu_resource: str(profile.gpus_per_node)} if profile.gpus_per_node else {}
    limits = {**devices, **profile.devices, **({"memory": profile.memory} if profile.memory else {})}
    return {"requests": {"cpu": str(profile.cpus), **limits}, **({"limits": limits} if limits else {})}


def _variables(profile: KubernetesProfile) -> list[Manifest]:
    """The environment of every process. Kubernetes would replace `$(NAME)` in a value; it stays as it was typed."""
    cache = f"{profile.local_folder}/megarl"
    values = {
        "TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "CUDA_CACHE_PATH": f"{cache}/cuda", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0",
        **({"GLOO_SOCKET_IFNAME": profile.interface, "NCCL_SOCKET_IFNAME": profile.interface} if profile.interface else {}),
        **profile.env,
    }  # fmt: skip
    references = {name: reference.split("/", 1) for name, reference in profile.secrets.items()}
    return [
        *({"name": name, "value": value.replace("$", "$$")} for name, value in values.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key) in references.items()
        ),
        _from_field("MEGARL_NODE_ADDRESS", "status.podIP"),  # engines listen there, for ranks on other nodes
    ]


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


class YamlDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and every value out: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """No value stands for another."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


YamlDumper.add_representer(str, _text)
