"""Questions to a config of either kind of run, so that nobody asks for its kind."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megarl.config.layout import Layout
from megarl.config.rollout import RolloutConfig
from megarl.config.section import Section
from megarl.config.sections import RunConfig, TrainedRole

MEAN_SHARE = 0.5
"""Share of the longest prompt and response and the largest picture, where nobody says how long or large they are."""


@dataclass(frozen=True)
class ConfiguredRole:
    """A model that a run uses, as its config has it."""

    name: str
    folder: str
    """Its Hugging Face folder."""
    folder_field: str
    """The config field that names the folder."""
    layout: Layout | None
    """Layout of its own processes; None: it lives in the policy's processes, in their layout."""
    trained: TrainedRole | None
    """How it is trained; None: it only answers."""
    value_head: bool = False
    """Has a scalar head instead of predicting tokens."""
    section: str = ""
    """Its section of the config; empty: the section has the role's name."""
    scores: bool = False
    """Its answers are rewards."""
    megatron: dict[str, Any] | None = field(default=None, compare=False)
    """Fields of megatron-core's TransformerConfig of a role that only answers; None: those of the policy."""


class Questions(Section):
    """A run of either kind, and the questions that `Config` and `SupervisedConfig` both answer."""

    trainer: ClassVar[str]
    """The room in `megarl.trainers` whose loop runs it."""

    run: RunConfig = RunConfig()
    """How long the run is, where it writes, and when it saves and evaluates."""

    @property
    @abstractmethod
    def roles(self) -> tuple[ConfiguredRole, ...]:
        """The models of the run in the order in which they are placed and loaded, the policy first."""

    @property
    @abstractmethod
    def model_folders(self) -> dict[str, str]:
        """Every model folder that the run may read, by the field that names it."""

    @property
    @abstractmethod
    def sampling(self) -> RolloutConfig | None:
        """The section on sampling; None: they are given, and nothing is rewarded."""

    @property
    @abstractmethod
    def trains_by(self) -> str:
        """The name of what the run minimises, in the words of the config."""

    @property
    @abstractmethod
    def longest_parts(self) -> tuple[int, int]:
        """Tokens of the longest prompt and the longest response; where only their sum has a limit, half of it each."""

    @property
    @abstractmethod
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on; a pair counts as one."""

    @property
    def epochs(self) -> int:
        """Passes over the sequences of a step."""
        return 1

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps of the policy in one step of the run, all passes together."""
        return 1

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether a step begins with a pass of the policy over its sequences."""
        return False

    @property
    def first_update_is_a_pass(self) -> bool:
        """Return whether that pass leaves out the sequences of the step's first update, which computes the same."""
        return False

    @property
    def routing_replay(self) -> Literal["none", "old_policy", "engine"]:
        """Name of the pass whose choice of experts the policy replays."""
        return "none"

    @property
    def syncs_prediction(self) -> bool:
        """Return whether engines draft with the layer for multi-token prediction that the policy trains, and take its
        weights."""
        return False

    @property
    def sends_adapters(self) -> bool:
        """Return whether engines are sent the policy's adapters, and keep the weights beside them."""
        return False

    @property
    def needs_collision(self) -> bool:
        """Return whether that pass answers the collision probabilities of the policy's distributions, too."""
        return False

    @abstractmethod
    def batch_rows(self) -> list[tuple[str, str]]:
        """(what, how many) of one training step, as it is printed before the run starts."""

    @property
    def needs_ray(self) -> bool:
        """Return whether Ray must start its processes; if not, torchrun may."""
        return True

    def metric_prefix(self, role: str) -> str:
        """The prefix of the metrics of updates of `role`."""
        return role

    @property
    def run_folder(self) -> str:
        """`<run.folder>/<run.name>`."""
        return f"{self.run.folder}/{self.run.name}"

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence."""
        return sum(self.longest_parts)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each group of processes, by the role that names the group, in the order in which they are placed."""
        return {role.name: role.layout for role in self.roles if role.layout is not None}

    @property
    def engine_places(self) -> int:
        """Devices that engines take of this run's."""
        return self.sampling.places if self.sampling is not None else 0

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Names of the roles that are trained."""
        return tuple(role.name for role in self.roles if role.trained is not None)
