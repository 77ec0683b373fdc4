"""The config of a reinforcement-learning run: the tree of its sections (`sections.py`), and what is asked of it.

Pure values, importable without torch. Everything is frozen; what the user left out is filled in here, so a resolved
config shows every choice.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.batch import batch_arithmetic
from megarl.config.engine_kinds import declared_capabilities
from megarl.config.evaluations import EvaluationConfig
from megarl.config.option_sections import with_options
from megarl.config.profile import ProfileConfig
from megarl.config.questions import ConfiguredRole, Questions
from megarl.config.rollout import RolloutConfig
from megarl.config.sections import (
    CriticConfig,
    DataConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    ResourcesConfig,
    RewardConfig,
    reward_labels,
)
from megarl.option_list import functions


@with_options
class Config(Questions):
    """A whole run. Built by `load_config` or `parse_config`, which turn every problem into one sentence."""

    trainer: ClassVar = "rl"

    model: ModelConfig
    """The model that the policy starts from, and how it is computed."""
    policy: PolicyConfig = PolicyConfig()
    """The model being trained."""
    critic: CriticConfig = CriticConfig()
    """The value model. Used only if the advantage estimator needs values, as `gae` does."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL penalty."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm of a step: advantages, losses, KL."""
    data: DataConfig
    """Prompts for training and evaluation."""
    evaluations: Annotated[tuple[EvaluationConfig, ...], Field(strict=False)] = ()
    """Named evaluation sets, each with its own rows and sampling, in addition to `data.eval` (docs/evaluation.md)."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = ()
    """Sources of reward. A sample's reward is their weighted sum."""
    resources: ResourcesConfig = ResourcesConfig()
    """Where processes run."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records."""

    @property
    def uses_critic(self) -> bool:
        """Return whether the advantage needs a value model."""
        return self.algorithm.estimator_needs.values

    @property
    def uses_reference(self) -> bool:
        """Return whether a frozen reference model is loaded: for a KL penalty, or because estimator or loss read its
        log-probs."""
        algorithm = self.algorithm
        is_read = algorithm.loss_needs.reference_log_probs or algorithm.estimator_needs.reference_log_probs
        return algorithm.kl.coef > 0 or is_read

    @property
    def roles(self) -> tuple[ConfiguredRole, ...]:
        """The policy, and the models that its algorithm and rewards use."""
        folder = self.model.path
        roles = [ConfiguredRole("policy", folder, "model.path", self.policy.layout, self.policy)]
        if self.uses_critic:
            critic = self.critic
            roles.append(
                ConfiguredRole("critic", critic.init_from or folder, "critic.init_from", critic.layout, critic, value_head=True)
            )
        if self.uses_reference:
            reference = self.reference
            roles.append(ConfiguredRole("reference", reference.path or folder, "reference.path", reference.layout, None))
        return (*roles, *(role for further in functions("questions", "further_roles") for role in further(self)))

    @property
    def model_folders(self) -> dict[str, str]:
        """The folders of models that the run reads, by the field that names each."""
        critic = self.critic.init_from if self.uses_critic else None
        paths = {
            "reference.path": self.reference.path if self.uses_reference else None,
            "critic.init_from": critic,
        }
        folders = {"model.path": self.model.path} | {field: path for field, path in paths.items() if path is not None}
        for further in functions("questions", "further_folders"):
            folders |= further(self)
        return folders

    @property
    def evaluates(self) -> bool:
        """Return whether there is anything to evaluate on."""
        return self.data.eval is not None or bool(self.evaluations)

    @property
    def sampling(self) -> RolloutConfig:
        """The section `rollout`."""
        return self.rollout

    @property
    def trains_by(self) -> str:
        """The algorithm's name."""
        return self.algorithm.name

    @property
    def longest_parts(self) -> tuple[int, int]:
        """Tokens of prompt and response, as `data` and `rollout` bound them."""
        return self.data.max_prompt_tokens, self.rollout.max_new_tokens

    @property
    def sequences_per_step(self) -> int:
        """All responses to a step's prompts."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def epochs(self) -> int:
        """`algorithm.epochs`."""
        return self.algorithm.epochs

    @property
    def optimizer_steps_per_step(self) -> int:
        """One for every mini-batch of every pass."""
        return self.algorithm.mini_batches * self.algorithm.epochs

    @property
    def needs_old_log_probs(self) -> bool:
        """On-policy, a single optimizer step sees its own log-probs; anything that reads them earlier needs a pass."""
        if self.algorithm.bypasses_old_log_probs:
            return False
        return self.optimizer_steps_per_step > 1 or self._reads_old_log_probs_early

    @property
    def first_update_is_a_pass(self) -> bool:
        """Return whether old log-probs are read by the updates alone: the first computes those of its own rows, with the
        same weights.

        Routes that are recorded, and limits of sampling, are of the pass.
        """
        of_pass = self.routing_replay == "old_policy" or bool(self.rollout.sampling_limits) or self.algorithm.loss_needs.pairs
        return self.needs_old_log_probs and not self._reads_old_log_probs_early and not of_pass

    @property
    def _reads_old_log_probs_early(self) -> bool:
        """Return whether something besides the policy loss reads what a pass at the start of the step gives."""
        algorithm = self.algorithm
        is_read = algorithm.estimator_needs.reads_policy or bool(algorithm.loss_needs.choice) or algorithm.entropy.reads_pass
        in_reward = algorithm.kl.coef > 0 and algorithm.kl.apply_to == "reward"
        of_option = any(reads(self) for reads in functions("questions", "reads_old_log_probs_early"))
        return is_read or in_reward or of_option or bool(algorithm.rollout_correction)

    @property
    def routing_replay(self) -> Literal["none", "old_policy", "engine"]:
        """Name of the pass whose choice of experts the policy replays."""
        return next((replay(self.policy) for replay in functions("questions", "routing_replay")), "none")

    @property
    def syncs_prediction(self) -> bool:
        """Return whether engines draft with the layer for multi-token prediction that the policy trains, and take its
        weights."""
        return any(syncs(self) for syncs in functions("questions", "syncs_prediction"))

    @property
    def sends_adapters(self) -> bool:
        """Return whether engines are sent the policy's adapters, and keep the weights beside them."""
        is_sent = any(sends_adapters(self.policy) for sends_adapters in functions("questions", "sends_adapters"))
        return is_sent and declared_capabilities(self.rollout).weights != "nothing"

    @property
    def other_weights(self) -> str | None:
        """The field by which the engines start with other weights than the policy's, and are sent these first."""
        of_policy = (begins_with(self.policy) for begins_with in functions("questions", "begins_with"))
        return self.rollout.other_weights or next((field for field in of_policy if field is not None), None)

    @property
    def rewards_by_branch(self) -> bool:
        """Return whether each branch of an episode has a reward of its own."""
        return any(rewards_by_branch(self.rollout.episode) for rewards_by_branch in functions("questions", "rewards_by_branch"))

    @property
    def needs_collision(self) -> bool:
        """`Σ_v π(v)²` before each token, as the advantage estimator needs it."""
        return self.algorithm.estimator_needs.collision

    @property
    def reward_weights(self) -> dict[str, float]:
        """By label of a source of reward, as in `Sample.rewards`, its weight in the sum of all."""
        labels = reward_labels([reward.name for reward in self.rewards])
        weights = {label: reward.weight for label, reward in zip(labels, self.rewards, strict=True)}
        for further in functions("questions", "further_reward_weights"):
            weights |= further(self)
        return weights

    def batch_rows(self) -> list[tuple[str, str]]:
        """The batch arithmetic."""
        return batch_arithmetic(self).rows()
