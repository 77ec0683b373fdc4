"""A cluster as pods see it: Kubernetes' image, volumes, devices and secrets, and what SkyPilot asks a cloud for.

Both are cluster profiles: fields that mean the same have the same names, and those of batch systems alone are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megarl.config.secrets import is_secret, redacted
from megarl.config.section import Count
from megarl.launch.cluster_profile import ClusterProfile

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A label of RFC 1123: the names of containers, volumes and namespaces."""
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){LABEL.pattern}(\.{LABEL.pattern})*")
"""A DNS subdomain of RFC 1123: the names of secrets, claims and classes."""
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUALIFIED = re.compile(rf"(?:(?P<domain>{SUBDOMAIN.pattern})/)?(?P<name>[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?)")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTPE]i|[kMGTPE]|m)?")
_UNITS = {
    "m": 1e-3,
    "": 1,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
_TOLERATION = re.compile(r"(?P<key>[^=:\s]+)(?:=(?P<value>[^=:\s]*))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
_NO_PLACE = {"gres": None, "account": None, "venv": None, "directives": (), "mounts": ()}


def quantity(text: str) -> float | None:
    """The number that a Kubernetes quantity such as `64Gi` or `500m` stands for; None: it is no quantity."""
    match = _QUANTITY.fullmatch(text)
    return float(match["number"]) * _UNITS[match["unit"] or ""] if match else None


def is_extended_resource(name: str) -> bool:
    """Return whether `name` can be a device that a node advertises, as `rdma/hca`: Kubernetes' own have no such domain."""
    match = _QUALIFIED.fullmatch(name)
    return match is not None and match["domain"] is not None and not f".{match['domain']}".endswith(".kubernetes.io")


def toleration(text: str) -> dict[str, str]:
    """The toleration that `KEY`, `KEY=VALUE` or `KEY=VALUE:EFFECT` stands for, as Kubernetes writes it."""
    match = _TOLERATION.fullmatch(text)
    assert match is not None, "checked when the profile was made"
    value, effect = match["value"], match["effect"]
    wanted = {"operator": "Equal", "value": value} if value is not None else {"operator": "Exists"}
    return {"key": match["key"], **wanted} | ({"effect": effect} if effect else {})


def _texts(field: str, value: object) -> Iterator[str]:
    """The texts in a field of a profile: itself, its entries, or names and values of it; of `secrets` values are references."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if field != "secrets":
            yield from (f"{name}={entry}" for name, entry in value.items())
        yield from (text for pair in value.items() for text in pair)
    elif isinstance(value, tuple):
        yield from value


def _refuse_secrets(profile: ContainerProfile) -> None:
    """Raise ValueError where a text of the profile is a secret or has one in it; which one is not said."""
    for name in type(profile).model_fields:
        if any(redacted(text) != text for text in _texts(name, getattr(profile, name))):
            what = f"{name} has a secret in it, which everybody could read who reads the manifest"
            raise ValueError(f"{what}; remove it there, and give it by secrets")


class ContainerProfile(ClusterProfile):
    """Settings that Kubernetes and SkyPilot have in common: every process runs in a container, and may be started again."""

    time: str = "7-00:00:00"
    """Longest time of one start, as HH:MM:SS or DAYS-HH:MM:SS: the run then saves, leaves and is started again."""
    runtime: Literal["pod"] = "pod"  # type: ignore[assignment]
    """How a process gets its Python: from the image of its pod."""
    image: str | None = None
    """Container image with megarl in it, of the version that submits, such as registry/megarl:gpu."""
    workdir: str = "/shared"
    """Folder that processes run in, and that relative paths of the config begin at."""

    @model_validator(mode="after")
    def _fields_have_a_place(self) -> ContainerProfile:
        for name, unset in _NO_PLACE.items():
            if getattr(self, name) != unset:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which pods have no place for; remove it")
        for name, value in self.env.items():
            if is_secret(name) or redacted(value) != value:
                raise ValueError(
                    f"env gives {name} a value, which everybody could read who reads the manifest; "
                    f"remove it there and name {name} in secrets"
                )
        for name in ("workdir", "local_folder"):
            if not PurePosixPath(getattr(self, name)).is_absolute():
                raise ValueError(f"{name} is '{getattr(self, name)}'; it must be an absolute path in the container")
        return self


class KubernetesProfile(ContainerProfile):
    """A Kubernetes cluster and what a job asks of it; every field is an option of `megarl submit kubernetes` as well."""

    kuberay: bool = True
    """KubeRay's operator is in the cluster, and runs are RayJobs; false: JobSets, as training on given responses is."""
    restarts: Count = 100
    """Times that Kubernetes starts the run again is started again; it goes on from its newest checkpoint."""
    namespace: str | None = None
    """Namespace of the job; null: that of kubectl's context."""
    claims: dict[str, str] = Field(default_factory=dict)
    """PersistentVolumeClaims and where each is mounted, as CLAIM=PATH. One must hold run.folder, writable by all pods."""
    shared_memory: str = "64Gi"
    """Size of /dev/shm, which is memory of the node: Ray's objects, NCCL and checkpoints in memory are there."""
    memory: str | None = None
    """Memory of a pod with its /dev/shm, asked for and not exceeded; null: not limited."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name under which nodes offer their GPUs."""
    devices: dict[str, str] = Field(default_factory=dict)
    """Further devices of a pod and how many, as RESOURCE=N, such as rdma/hca=8; pods that have some may lock memory."""
    host_network: bool = False
    """Pods use their node's network, as RDMA often needs; ports 6379, 8265 and Ray's others must be free there."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variables from secrets of the namespace, as NAME=SECRET/KEY; never a value."""
    secrets_from: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Secrets of which every key becomes an environment variable."""
    pull_secrets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Secrets with which the image is pulled."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have, as KEY=VALUE."""
    tolerations: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Taints of nodes that are no hindrance, as KEY, KEY=VALUE or KEY=VALUE:EFFECT."""

    @model_validator(mode="after")
    def _secrets_are_names(self) -> KubernetesProfile:
        """Refuse secrets that are no references, without showing what they are."""
        for name, reference in self.secrets.items():
            secret, _, key = reference.partition("/")
            if not _is_variable(name):
                raise ValueError(f"secrets names the variable {name!r}; it must be letters, digits and _, no digit first")
            if SUBDOMAIN.fullmatch(secret) is None or _SECRET_KEY.fullmatch(key) is None:
                raise ValueError(
                    f"secrets.{name} is no reference; it must be SECRET/KEY, a secret of the namespace and one of its keys, "
                    "and never the value"
                )
            if name in self.env:
                raise ValueError(f"{name} is in env and in secrets; it must be in one of them")
        for field in ("secrets_from", "pull_secrets"):
            if any(SUBDOMAIN.fullmatch(name) is None for name in getattr(self, field)):
                raise ValueError(f"{field} has an entry that no secret can have as its name; it must be {_DNS}")
        return self

    @model_validator(mode="after")
    def _names_are_kubernetes(self) -> KubernetesProfile:
        names: list[tuple[str, re.Pattern[str], Iterable[str], str]] = [
            ("namespace", LABEL, [self.namespace] if self.namespace else [], f"{_DNS}, at most 63 without dots"),
            ("claims", SUBDOMAIN, self.claims, _DNS),
            ("partition", SUBDOMAIN, [self.partition] if self.partition else [], _DNS),
            ("qos", SUBDOMAIN, [self.qos] if self.qos else [], _DNS),
            ("node_selector", _QUALIFIED, self.node_selector, "a label such as topology.kubernetes.io/zone"),
            ("node_selector", LABEL_VALUE, self.node_selector.values(), "at most 63 letters, digits, - _ and ."),
            ("tolerations", _TOLERATION, self.tolerations, "KEY, KEY=VALUE or KEY=VALUE:EFFECT; NoSchedule is an effect"),
        ]
        for field, form, given, allowed in names:
            for name in given:
                if form.fullmatch(name) is None:
                    raise ValueError(f"{field} names '{name}', which Kubernetes does not take; it must be {allowed}")
        for path in self.claims.values():
            if not PurePosixPath(path).is_absolute() or ":" in path or PurePosixPath(path) == PurePosixPath("/"):
                raise ValueError(f"claims mounts at '{path}'; it must be an absolute path below / without a colon")
        if len({PurePosixPath(path) for path in (*self.claims.values(), *RESERVED)}) < len(self.claims) + len(RESERVED):
            raise ValueError(f"claims mounts two volumes at one path; paths must differ, also from {' and '.join(RESERVED)}")
        if self.setup:
            raise ValueError("setup has shell lines, which Ray's pods do not run; put what they do into the image or into env")
        return self

    @model_validator(mode="after")
    def _resources_agree(self) -> KubernetesProfile:
        for name in (self.gpu_resource, *self.devices):
            if not is_extended_resource(name):
                field = "gpu_resource" if name == self.gpu_resource else "devices"
                raise ValueError(
                    f"{field} names the resource '{name}', which no node offers; it must be DOMAIN/NAME, as rdma/hca"
                )
        if self.gpu_resource in self.devices:
            raise ValueError(f"devices names {self.gpu_resource}, which gpus_per_node counts; remove it from devices")
        for name, count in self.devices.items():
            if not count.isdigit() or int(count) < 1:
                raise ValueError(f"devices.{name} is '{count}'; it must be a whole number of devices, at least 1")
        for field in ("shared_memory", "memory"):
            text = getattr(self, field)
            if text is not None and not (quantity(text) or 0) >= 1:
                raise ValueError(f"{field} is '{text}'; it must be a Kubernetes quantity of bytes, such as 64Gi")
        if self.memory is not None and (quantity(self.memory) or 0) <= (quantity(self.shared_memory) or 0):
            raise ValueError(
                f"memory is {self.memory}, which holds /dev/shm of {self.shared_memory} (shared_memory) too; it must be more"
            )
        return self

    @model_validator(mode="after")
    def _no_text_is_a_secret(self) -> KubernetesProfile:
        _refuse_secrets(self)
        return self


class SkyProfile(ContainerProfile):
    """Requests of a run to SkyPilot; every field is an option of `megarl submit skypilot` as well."""

    infra: str | None = None
    """Where to run, as SkyPilot writes it: aws, gcp/us-central1, k8s/CONTEXT; null: where it is cheapest."""
    accelerator: str | None = None
    """Name of the GPU as SkyPilot writes it, such as H100; null: resources.gpu of the config, in capitals."""
    spot: bool = False
    """Take machines that may be taken back at any time, at a lower price."""
    memory: str | None = None
    """Memory of a node in GB, `512` or at least that many, `512+`; null: what comes with the GPUs."""
    disk_gb: Count = 512
    """Size of each node's own disk, in GB."""
    buckets: dict[str, str] = Field(default_factory=dict)
    """Object stores and where each is mounted, as URL=PATH, such as s3://my-bucket=/shared."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Volumes of SkyPilot (`sky volumes`) and where each is mounted, as NAME=PATH."""
    secrets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Environment variables that are secrets, by name: `sky` takes their values from your environment."""

    @model_validator(mode="after")
    def _fields_are_skypilots(self) -> SkyProfile:
        for name in ("partition", "qos", "interface"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is '{getattr(self, name)}', which SkyPilot has no place for; remove it")
        for name in self.secrets:
            if not _is_variable(name):
                raise ValueError("secrets has an entry that is no variable's name; it must be names alone, never values")
            if name in self.env:
                raise ValueError(f"{name} is in env and in secrets; it must be in one of them")
        if self.memory is not None and re.fullmatch(r"\d+(\.\d+)?\+?", self.memory) is None:
            raise ValueError(f"memory is '{self.memory}'; it must be a number of GB, or one with + behind it")
        for url in self.buckets:
            if re.fullmatch(r"[a-z0-9]+://\S+", url) is None:
                raise ValueError(f"buckets names '{redacted(url)}'; it must be a URL such as s3://my-bucket")
        for path in (*self.buckets.values(), *self.volumes.values()):
            if not PurePosixPath(path).is_absolute():
                raise ValueError(f"buckets or volumes mounts at '{path}'; it must be an absolute path")
        return self

    @model_validator(mode="after")
    def _no_text_is_a_secret(self) -> SkyProfile:
        _refuse_secrets(self)
        return self


FILES = "/etc/megarl"
"""Where pods see their config and scripts."""
RESERVED = ("/dev/shm", FILES)
_DNS = "lower-case letters, digits, - and ., beginning and ending with a letter or digit"


def _is_variable(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def mount_of(path: PurePosixPath, mounts: Mapping[str, str]) -> str | None:
    """The name of the volume in `mounts` (name: where it is mounted) that holds `path`; None: none does."""
    return next((name for name, mounted in mounts.items() if path.is_relative_to(mounted)), None)
