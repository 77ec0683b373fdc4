"""A cluster as a batch job sees it: nodes, partition, time, container or environment. From a YAML file and the command line.

None of this is part of a run's config: the same run goes to another cluster with another profile.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Field, ValidationError, model_validator

from megarl.config.reference import allowed_values, fields_of
from megarl.config.secrets import without_secrets
from megarl.config.section import Count, Positive, Section
from megarl.config.yaml_tree import read_yaml
from megarl.errors import ConfigError, describe_value, nearest

_TIME = re.compile(r"^(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d)(?::(?P<s>[0-5]?\d))?$")


class ClusterProfile(Section):
    """A cluster and what a job asks of it; every field is an option of `megarl submit` as well."""

    nodes: Positive | None = None
    """Nodes of the job; null: as many as the config's layouts need."""
    gpus_per_node: Count = 8
    """GPUs of a node; 0: nodes without GPUs, where places_per_node counts."""
    gres: str | None = None
    """GPUs of a node as Slurm's --gres names them, such as gpu:h100:8; null: they are asked for by --gpus-per-node."""
    places_per_node: Positive | None = None
    """Training ranks and engines that a node holds; null: one for each GPU."""
    cpus_per_node: Positive | None = None
    """Cores of a node that the job asks for, and Ray is told of; null: eight for each GPU or one for each place, Ray: all."""
    partition: str | None = None
    """Partition (Slurm) or queue (PBS, LSF); null: the cluster's default."""
    account: str | None = None
    """Account or project that pays; null: yours."""
    qos: str | None = None
    """Quality of service (Slurm)."""
    time: str = "04:00:00"
    """Time limit as HH:MM:SS or DAYS-HH:MM:SS."""
    warn_s: Positive = 300
    """Seconds before the time limit at which the run is told to save and leave; Slurm may be early by half a minute."""
    exclusive: bool = True
    """Take whole nodes, with all their memory."""
    directives: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More lines for the batch system, such as `--constraint=h100`."""
    runtime: Literal["venv", "apptainer", "pyxis"] = "venv"
    """How a process gets its Python: a virtual environment, or a container by Apptainer or by Slurm's pyxis and enroot."""
    venv: str | None = None
    """Folder of the virtual environment; null: the one that `megarl submit` runs in."""
    image: str | None = None
    """Container image: .sif file or docker:// name (apptainer), .sqsh file or registry name (pyxis)."""
    mounts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders that the container sees besides the working directory, as FOLDER or FROM:TO."""
    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines run first, such as `module load cuda`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process, such as NCCL_IB_HCA."""
    interface: str | None = None
    """Network interface for Ray, NCCL's bootstrap and Gloo; null: chosen on the nodes, and checked either way."""
    local_folder: str = "/tmp"
    """Folder on each node's own disk for caches and Ray's sockets; the path must be short."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ClusterProfile:
        if _TIME.match(self.time) is None:
            raise ValueError(f"time is '{self.time}'; it must be HH:MM:SS or DAYS-HH:MM:SS, such as 04:00:00")
        if self.runtime != "venv" and self.image is None:
            raise ValueError(f"runtime is {self.runtime}, but image is missing; name the container image")
        if self.runtime == "venv" and self.image is not None:
            raise ValueError(f"image is '{self.image}', but runtime is venv; set runtime to apptainer or pyxis")
        if not self.gpus_per_node and self.places_per_node is None:
            raise ValueError("gpus_per_node is 0, but places_per_node is missing; say how many ranks a node holds")
        if self.gpus_per_node and self.places_per_node not in (None, self.gpus_per_node):
            raise ValueError(
                f"places_per_node is {self.places_per_node}, but a node's {self.gpus_per_node} GPUs hold one rank each; "
                "leave it out"
            )
        if self.warn_s >= self.time_s:
            raise ValueError(
                f"time is {self.time}, but the run is to be warned {self.warn_s} s before the end; "
                f"ask for more time, or set warn_s below {self.time_s}"
            )
        return self

    @model_validator(mode="after")
    def _texts_stay_in_their_lines(self) -> ClusterProfile:
        """Refuse line ends in what becomes a line of a batch script; `setup` is shell that the user writes, and values
        of `env` are quoted."""
        for name, value in self:
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and name != "setup" and not text.isprintable():
                    raise ValueError(f"{name} is {text!r}, which would end its line of a script; it must be printable")
        for name in ("partition", "account", "qos", "gres"):
            if re.search(r"\s", getattr(self, name) or ""):
                raise ValueError(f"{name} is '{getattr(self, name)}'; it must be without white space, which ends an option")
        for name in self.env:
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                raise ValueError(f"env names the variable {name!r}; it must be letters, digits and _, no digit first")
        return self

    @property
    def places(self) -> int:
        """Ranks that a node holds."""
        return self.places_per_node or self.gpus_per_node

    @property
    def cpus(self) -> int:
        """Cores that the job takes of a node."""
        return self.cpus_per_node or 8 * self.gpus_per_node or self.places

    @property
    def time_s(self) -> int:
        """The time limit in seconds."""
        match = _TIME.match(self.time)
        assert match is not None, "checked when the profile was made"
        days, hours, minutes, seconds = (int(match[part] or 0) for part in "dhms")
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Profile = TypeVar("Profile", bound=ClusterProfile)


def read_profile(path: str | Path | None, options: Mapping[str, Any], kind: type[Profile]) -> Profile:
    """The profile of this `kind` in the YAML file `path` (None: the defaults), with those `options` on top that are not None.

    Raises:
        ConfigError: one sentence about the file, the field, its value and what it must be.
    """
    tree = read_yaml(path) if path is not None else {}
    known = fields_of(kind)
    where = f"{path}: " if path is not None else ""
    for name in tree:
        if name not in known:
            hint = nearest(str(name), known)
            raise ConfigError(f"{where}{name} is not a field of a cluster profile{hint}; it has {', '.join(known)}")
    tree |= {name: value for name, value in options.items() if value is not None}
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        raise ConfigError(f"cluster profile: {problem['msg'].removeprefix('Value error, ')}")
    name = str(problem["loc"][0])
    annotation = known[name].annotation
    choices = list(map(str, get_args(annotation))) if get_origin(annotation) is Literal else []
    hint = nearest(tree[name], choices) if isinstance(tree[name], str) else ""
    value = describe_value(without_secrets({name: tree[name]})[name])
    raise ConfigError(f"{where}{name} is {value}; it must be {allowed_values(known[name])}{hint}")


def clock(seconds: int) -> str:
    """`30:05:00` of so many seconds."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def option_kind(annotation: Any) -> type:
    """The type that the command line makes of a field's text: int, bool, str, tuple (may be repeated) or dict
    (KEY=VALUE, repeated)."""
    if get_origin(annotation) is Annotated:
        return option_kind(get_args(annotation)[0])
    if get_origin(annotation) in (types.UnionType, Union, Literal):
        return option_kind(next(kind for kind in get_args(annotation) if kind is not type(None)))
    origin = get_origin(annotation) or annotation
    return origin if origin in (int, bool, tuple, dict) else str
