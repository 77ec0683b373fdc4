"""What a Kubernetes server would say of a manifest, as far as that can be known without one: schemas and further rules.

Written after Kubernetes', KubeRay's and JobSet's documentation; nothing here is megarl's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parent / "schemas"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(
    rf"({SUBDOMAIN.pattern.replace('{1,253}$', '{1,253}/')}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
)
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
EXPONENTS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
SPECS = {
    ("v1", "ConfigMap"): ("kubernetes-1.37.json", "io.k8s.api.core.v1.ConfigMap"),
    ("ray.io/v1", "RayJob"): ("rayjob.json", "RayJobSpec"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): ("jobset.json", "JobSetSpec"),
}


def schema(name: str) -> dict[str, Any]:
    """The schema in the file `name`."""
    tree: dict[str, Any] = json.loads((SCHEMAS / name).read_text())
    return tree


@cache
def registry() -> Registry[Any]:
    """All schemas, by the names of their files."""
    return Registry().with_resources((path.name, Resource.from_contents(schema(path.name))) for path in SCHEMAS.glob("*.json"))


def problems(manifest: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a manifest; empty for a sound one."""
    known = SPECS.get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if known is None:
        return [f"no such kind: {manifest.get('apiVersion')} {manifest.get('kind')}"]
    whole = manifest["kind"] == "ConfigMap"
    found = against({"$ref": "{}#/$defs/{}".format(*known)}, manifest if whole else manifest.get("spec"))
    if not whole and (more := manifest.keys() - {"apiVersion", "kind", "metadata", "spec"}):
        found.append(f"unknown fields {more}")
    return found or [*_metadata(manifest["metadata"]), *_OF_KIND[manifest["kind"]](manifest)]


def against(wanted: dict[str, Any], value: Any) -> list[str]:
    """What a JSON schema, which may refer to the files, has against a value."""
    errors = Draft202012Validator(wanted, registry=registry()).iter_errors(value)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


def amount(text: Any) -> float | None:
    """The number that a quantity stands for; None: it is none."""
    match = QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    unit = match[2] or ""
    if unit.endswith("i"):
        return float(match[1]) * 1024 ** ("KMGTPE".index(unit[0]) + 1)
    if unit and unit not in EXPONENTS:
        return float(match[1] + unit)
    return float(match[1]) * 10 ** EXPONENTS.get(unit, 0)


def _metadata(metadata: dict[str, Any], *, is_template: bool = False) -> Iterator[str]:
    if not is_template and not SUBDOMAIN.fullmatch(metadata.get("name", "")):
        yield f"name {metadata.get('name')!r}"
    if "namespace" in metadata and not LABEL.fullmatch(metadata["namespace"]):
        yield f"namespace {metadata['namespace']!r}"
    yield from _labels(metadata.get("labels", {}))


def _labels(labels: dict[str, Any]) -> Iterator[str]:
    for key, value in labels.items():
        if not QUALIFIED.fullmatch(key):
            yield f"label key {key!r}"
        if not isinstance(value, str) or not VALUE.fullmatch(value):
            yield f"label value {value!r} of {key}"


def _config_map(manifest: dict[str, Any]) -> Iterator[str]:
    for key in manifest.get("data", {}):
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) or key in (".", ".."):
            yield f"key {key!r}"
    if sum(len(text.encode()) for text in manifest.get("data", {}).values()) > 2**20:
        yield "more than 1 MiB"


def _ray_job(manifest: dict[str, Any]) -> Iterator[str]:
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    if not LABEL_1035.fullmatch(name) or len(name) > 47:
        yield f"RayJob's name {name!r}"
    cluster = spec["rayClusterSpec"]
    if cluster.get("authOptions", {}).get("mode") == "token":
        major, minor, *_ = (*map(int, re.findall(r"\d+", cluster.get("rayVersion", ""))), 0, 0)
        if (major, minor) < (2, 52):
            yield "tokens need Ray 2.52"
    if not spec.get("shutdownAfterJobFinishes") and spec.get("ttlSecondsAfterFinished"):
        yield "a time to live without an end"
    names = [group["groupName"] for group in cluster.get("workerGroupSpecs", [])]
    if len(names) != len(set(names)):
        yield "two groups of one name"
    for group in cluster.get("workerGroupSpecs", []):
        if not 0 <= group["minReplicas"] <= group.get("replicas", 0) <= group["maxReplicas"]:
            yield f"replicas of {group['groupName']}"
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
        yield from _pod(group["template"])


def _job_set(manifest: dict[str, Any]) -> Iterator[str]:
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    if len(jobs) < len(spec["replicatedJobs"]):
        yield "two replicated jobs of one name"
    if not LABEL_1035.fullmatch(spec.get("network", {}).get("subdomain", name)):
        yield "subdomain"
    named = [*spec.get("successPolicy", {}).get("targetReplicatedJobs", [])]
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        named += rule.get("targetReplicatedJobs", [])
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?", rule["name"]):
            yield f"rule {rule['name']!r}"
        known = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
        if not set(rule.get("onJobFailureReasons", [])) <= known:
            yield "a reason that Jobs do not have"
    for target in named:
        if target not in jobs:
            yield f"no replicated job {target!r}"
    for job in jobs.values():
        of_job = job["template"]["spec"]
        count = of_job.get("completions", 1)
        longest = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}-{count - 1}-abcde"
        if not LABEL_1035.fullmatch(longest):
            yield f"a pod would be called {longest}"
        if of_job.get("completionMode") == "Indexed" and not count:
            yield "an indexed job without completions"
        if of_job.get("podFailurePolicy") and of_job["template"]["spec"].get("restartPolicy") != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
        for rule in of_job.get("podFailurePolicy", {}).get("rules", []):
            if ("onExitCodes" in rule) == ("onPodConditions" in rule):
                yield "a rule is of exit codes or of conditions"
            codes = rule.get("onExitCodes", {}).get("values", [])
            if codes != sorted(set(codes)) or (0 in codes and rule["onExitCodes"]["operator"] == "In"):
                yield "exit codes of a rule"
        yield from _pod(of_job["template"])


def _pod(template: dict[str, Any]) -> Iterator[str]:
    spec = template["spec"]
    yield from _metadata(template.get("metadata", {}), is_template=True)
    yield from _labels(spec.get("nodeSelector", {}))
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    for kind, names in (("volumes", volumes), ("containers", [held["name"] for held in spec["containers"]])):
        if len(names) != len(set(names)):
            yield f"two {kind} of one name"
        yield from (f"{kind} name {name!r}" for name in names if not LABEL.fullmatch(name))
    for volume in spec.get("volumes", []):
        if len(volume) != 2:
            yield f"volume {volume['name']} has {len(volume) - 1} sources"
        size = volume.get("emptyDir", {}).get("sizeLimit")
        if size is not None and amount(size) is None:
            yield f"quantity {size!r}"
    references = [source["secretRef"]["name"] for held in spec["containers"] for source in held.get("envFrom", [])]
    references += [secret["name"] for secret in spec.get("imagePullSecrets", [])]
    claims = [volume["persistentVolumeClaim"] for volume in spec.get("volumes", []) if "persistentVolumeClaim" in volume]
    references += [claim["claimName"] for claim in claims]
    references += [spec["priorityClassName"]] if "priorityClassName" in spec else []
    yield from (f"object name {name!r}" for name in references if not SUBDOMAIN.fullmatch(name))
    for held in spec["containers"]:
        yield from _container(held, volumes, of_host=spec.get("hostNetwork", False))


def _container(held: dict[str, Any], volumes: list[str], *, of_host: bool) -> Iterator[str]:
    if not held.get("image", "").strip() or held["image"] != held["image"].strip():
        yield "image"
    for mount in held.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"no volume {mount['name']!r}"
        if not mount["mountPath"] or ":" in mount["mountPath"]:
            yield f"mountPath {mount['mountPath']!r}"
    paths = [mount["mountPath"].rstrip("/") for mount in held.get("volumeMounts", [])]
    if len(paths) != len(set(paths)):
        yield "two mounts at one path"
    ports = [port.get("name", "") for port in held.get("ports", [])]
    if len(ports) != len(set(ports)):
        yield "two ports of one name"
    for port in held.get("ports", []):
        if of_host and port.get("hostPort", port["containerPort"]) != port["containerPort"]:
            yield "hostPort"
    for variable in held.get("env", []):
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", variable["name"]):
            yield f"variable {variable['name']!r}"
        if "value" in variable and "valueFrom" in variable:
            yield f"two sources of {variable['name']}"
        key = variable.get("valueFrom", {}).get("secretKeyRef")
        if key and not (SUBDOMAIN.fullmatch(key["name"]) and re.fullmatch(r"[-._a-zA-Z0-9]+", key["key"])):
            yield f"secret of {variable['name']}"
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "status.podIP")
        if not re.fullmatch(
            r"status\.(podIP|hostIP)|metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]", path
        ):
            yield f"fieldPath {path!r}"
    yield from _resources(held.get("resources", {}))


def _resources(resources: dict[str, Any]) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, text in (*requests.items(), *limits.items()):
        if (number := amount(text)) is None or number < 0:
            yield f"quantity {text!r} of {name}"
            return
        if name not in ("cpu", "memory", "ephemeral-storage") and not name.startswith("hugepages-"):
            domain = name.partition("/")[0]
            if not QUALIFIED.fullmatch(name) or "/" not in name or domain.endswith("kubernetes.io"):
                yield f"resource {name!r}"
            if number != int(number) or name not in limits or amount(requests.get(name, text)) != amount(limits[name]):
                yield f"{name} must be whole, and asked for as it is limited"
    for name in requests.keys() & limits.keys():
        if (amount(requests[name]) or 0) > (amount(limits[name]) or 0):
            yield f"{name}: more asked for than allowed"


_OF_KIND = {"ConfigMap": _config_map, "RayJob": _ray_job, "JobSet": _job_set}
