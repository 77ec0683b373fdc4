"""Engines and models of a config, and what a loop asks of them: `RlRun` and loops of users' own are written in these calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from megarl.algorithms import AGGREGATIONS
from megarl.config import Config, to_yaml
from megarl.core.protocols import Placed, RolloutSide, StartProcesses
from megarl.data.batch import Batch
from megarl.data.branches import first_branches, spread_rewards
from megarl.data.mixture import build_sampler, mixture_weights, place_of_row
from megarl.data.row_order import order_by
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import DataSampler
from megarl.data.stored_batch import batch_of
from megarl.data.stored_shares import RowTask
from megarl.errors import ConfigError, nearest
from megarl.experience.experience import Experience, set_loss_weights
from megarl.experience.inputs import RlInputs
from megarl.experience.losses_of_config import check_columns, objective_of, of_tokens, policy_objective
from megarl.experience.objectives import OwnLoss, TokenFunction
from megarl.experience.step_parts import ChosenRows, go_to_row
from megarl.experience.step_tokens import TOKEN_COLUMNS, kept_part
from megarl.experience.step_work import estimate, make_token_columns
from megarl.observe.expert_load import EXPERTS
from megarl.runs.provenance import provenance
from megarl.runs.recovery import Recovery
from megarl.runs.run_checkpoint import CheckpointFolder, read_state
from megarl.runs.saving import Saving
from megarl.runs.training_side import CRITIC, POLICY, REFERENCE, TrainingSide

LOSS_COLUMNS = ("weights", "advantages", "rollout_log_probs", "old_log_probs", "reference_log_probs", "correction")
"""Columns of a batch that the policy's losses read, beside those of single tokens and of options."""
PromptLike = Prompt | str | Sequence[Mapping[str, Any]]
"""A prompt that was made before, a text, or chat messages."""


class Session:
    """The models and engines of a config. `megarl.open` starts one; leaving its `with` block ends its processes.

    `config` is the resolved config, `step` counts optimizer steps of the policy, `version` those weights that the engines have.
    """

    roles: TrainingSide
    rollouts: RolloutSide
    platform: str
    recovery: Recovery | None

    def __init__(self, config: Config, inputs: RlInputs, start_processes: StartProcesses) -> None:
        """Start nothing yet. `inputs` are closed by whoever read them."""
        self.config, self.inputs, self.step = config, inputs, 0
        self._start_processes = start_processes
        self.experience = Experience(config, inputs.parts)
        self._stack = ExitStack()
        self._calls = count()
        self._visits: set[str] = set()
        self._accumulated: set[str] = set()
        self._rewards: Sequence[float] = ()

    @cached_property
    def sampler(self) -> DataSampler[Prompt]:
        """The order in which prompts of `data.train` come."""
        config = self.config
        return build_sampler(
            self.inputs.train,
            mixture_weights(config.data.train),
            config.run.seed,
            order_by(config.data),
            config.rollout.prompts_per_step,
            partial(place_of_row, source=config.data.train),
        )

    # processes ----------------------------------------------------------------------------------------------------

    def start(
        self,
        logs: str | Path,
        *,
        doing: Callable[[str], None] = lambda name: None,
        say: Callable[[str], None] | None = None,
        placed: Callable[[Placed], None] = lambda placement: None,
    ) -> None:
        """Start ranks and engines, which load at the same time; arguments as of `StartProcesses`."""
        started = self._start_processes(self.config, self.inputs, self._stack, logs, doing=doing, say=say, placed=placed)
        self.roles, self.rollouts, self.platform = started.roles, started.rollouts, started.platform
        self.recovery = started.recovery

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def at_close(self, work: Callable[[], None]) -> None:
        """Do `work` when the session closes, before its processes end."""
        self._stack.callback(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # rollouts -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that the engines have: 0 is `model.path`, and every `sync_weights` that sends adds one."""
        return self.rollouts.version

    def prompts(self, number: int) -> list[Prompt]:
        """Draw the next `number` prompts of `data.train`, in the order that follows from `run.seed`.

        Raises:
            ConfigError: the config has no `data.train`.
        """
        if not self.inputs.train:
            raise ConfigError("the config has no section data.train to draw prompts from; set it, or pass texts to sample()")
        return self.sampler.next(number)

    def prompt(self, content: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any] | None = None) -> Prompt:
        """Make a prompt of a text or of chat messages, under the model's template as `data.chat_template` says.

        `row` is what rewards read as `sample.row`.

        Raises:
            DataError: it is empty, too long (`data.max_prompt_tokens`), or no prompt.
        """
        text = content if isinstance(content, str) else [dict(message) for message in content]
        return self.rollouts.prompt({**(row or {}), self.config.data.prompt_key: text}, f"asked-{next(self._calls)}")

    def sample(
        self,
        prompts: Sequence[PromptLike],
        n: int = 1,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """Have the engines answer each prompt `n` times: one list of `n` samples for each prompt, in order.

        What is None is as the section `rollout` says. Unless `rollout.episode.kind` is `single`, each answer is an episode.

        Raises:
            ConfigError: `n` is below 1, or a stop is none.
            EngineError: the engines failed.
        """
        self._refuse_to_forget_gradients("sample")
        distinct_prompts = [self._visit(prompt if isinstance(prompt, Prompt) else self.prompt(prompt)) for prompt in prompts]
        drawing = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_new_tokens": max_new_tokens}
        samples = self.rollouts.answer(distinct_prompts, n, greedy=greedy, stop=stop, stop_token_ids=stop_token_ids, **drawing)
        return [samples[start : start + n] for start in range(0, len(samples), n)]

    def _visit(self, prompt: Prompt) -> Prompt:
        """The prompt under a group id that no other was asked under: seeded engines draw by it."""
        group_id = prompt.group_id or prompt.row_id
        if group_id in self._visits:
            group_id = f"{group_id}/{next(self._calls)}"
        self._visits.add(group_id)
        return replace(prompt, group_id=group_id)

    def reward(self, samples: Sequence[Sample]) -> list[float]:
        """Judge samples by the config's rewards: their weighted sum for each, which `sample.rewards` has by source.

        Raises:
            RewardError: a source failed, or the config has none.
        """
        samples = list(samples)
        if not self.config.rewards_by_branch and any(sample.branch_of for sample in samples):
            return spread_rewards(samples, self.reward(first_branches(samples)))
        rewards = self.inputs.rewards.score(samples)
        for part in self.inputs.parts:
            if (further := part.score(self.roles, samples)) is not None:
                rewards = [reward + more for reward, more in zip(rewards, further, strict=True)]
        return rewards

    def sync_weights(self) -> int:
        """Give the engines the policy's weights, unless they have them; returns their version."""
        self._refuse_to_forget_gradients("sync_weights")
        if self.rollouts.stale:
            self.rollouts.update_weights()
        return self.rollouts.version

    def evaluate(self) -> dict[str, float]:
        """Answer and judge the held-out prompts: greedily those of `data.eval`, and each of `evaluations` as it says.

        The engines are given the policy first. Returns the figures of docs/evaluation.md; none where nothing is held out.
        """
        self.sync_weights()
        figures: dict[str, float] = {}
        if self.inputs.held_out:
            samples = self.rollouts.generate(self.inputs.held_out, greedy=True)
            figures |= self.inputs.measure_held_out(samples, self.reward)
        return figures | self.inputs.measure_sets(self.rollouts.sample)

    # experience and updates ---------------------------------------------------------------------------------------

    def batch(self, samples: Sequence[Sample | Sequence[Sample]]) -> Batch:
        """Lay samples, or groups of them as `sample` gives them, as the rows of a `Batch`."""
        return batch_of([*_flat(samples)])

    def forward(self, batch: Batch, role: str = POLICY) -> dict[str, Tensor]:
        """Compute without gradients: `log_probs` and `entropy` of `policy` or `reference`, `values` of `critic`.

        Each is float32 `[B, T]` over response tokens, 0 where nothing was sampled. Log-probs are of the sampled tokens, in
        nats, under `rollout.temperature`; the batch is left as it is.

        Raises:
            ConfigError: the config has no such role.
        """
        self._check_role(role)
        further = [*self._limited(), *(["collision"] if self.config.needs_collision else [])] if role == POLICY else []
        names = ["values"] if role == CRITIC else ["log_probs", "entropy", *further]
        before = copy(batch.columns)
        self.roles.forward(role, batch, names)
        answered = {name: batch.columns[name] for name in names}
        batch.columns = before
        return answered

    def old_log_probs(self, batch: Batch) -> None:
        """Add the columns that an update compares with, `old_log_probs` and `old_entropy`, by the policy as it is."""
        limited = self._limited()
        names = ["old_log_probs", "old_entropy", *limited, *(["old_collision"] if self.config.needs_collision else [])]
        more = {name: value for part in self.inputs.parts for name, value in part.asked_of_policy().items()}
        self.roles.forward(POLICY, batch, names, **more)
        for name in limited:  # the engine's are over all tokens
            self.roles.compute(batch, RowTask(kept_part, [name], columns=["rollout_log_probs", name]))

    def prepare(self, batch: Batch, step: int | None = None) -> None:
        """Add the columns that the config's estimator and losses read, where the batch has none: old and reference log-probs,
        values, and those of options. `step`: the number of the step (None: that of the session)."""
        config, parts = self.config, () if batch.has_parts else self.inputs.parts
        if config.needs_old_log_probs and "old_log_probs" not in batch.columns:
            self.old_log_probs(batch)
        for part in parts:
            part.behind_policy_pass(self.roles, batch, self.step if step is None else step)
        if config.uses_reference and "reference_log_probs" not in batch.columns:
            self.roles.forward(REFERENCE, batch, ["reference_log_probs", "reference_entropy"])
        for part in parts:
            part.prepare(self.roles, batch)
        batch.has_parts = True
        if config.uses_critic and "values" not in batch.columns:
            self.roles.forward(CRITIC, batch, ["values"])
            if config.algorithm.truncated_responses == "bootstrap":
                self.roles.forward(CRITIC, batch, ["values_after"], at=batch.last_tokens)

    def advantages(self, batch: Batch, rewards: Sequence[float]) -> dict[str, float]:
        """Add the columns `advantages`, and for a critic `returns`, by the config's estimator; returns metrics.

        `rewards`: one per row. Log-probs and values that the estimator reads are computed where the batch has none.
        """
        if len(rewards) != len(batch):
            raise ConfigError(f"rewards has {len(rewards)} numbers for {len(batch)} samples; it must have one for each")
        self.prepare(batch)
        for part in self.inputs.parts:
            part.take_rewards(batch, rewards)
        self._rewards = list(rewards)
        metrics, _ = estimate(self.roles, self.experience, batch, rewards)
        return metrics

    def forward_backward(
        self,
        batch: Batch,
        loss: str | TokenFunction | None = None,
        *,
        role: str = POLICY,
        rows: Sequence[int] | None = None,
        advantages: Sequence[float] | Tensor | None = None,
        weights: str | Tensor | None = None,
    ) -> dict[str, float]:
        """Compute a loss and add its gradients to those since the last `optimizer_step`; returns its metrics.

        Args:
            batch: its columns are what a loss reads, such as `old_log_probs`.
            loss: None, the config's own with its penalties; the name of a policy loss (docs/methods.md); `cross_entropy`; or a
                function of the log-probs `[N]` of the sampled tokens, with gradients, and of the columns `[N]` by name, which
                returns the loss of each token `[N]`, or that and a dict of sums. It runs on the ranks.
            role: `policy`, or `critic` with its own loss.
            rows: of the batch; None: all.
            advantages: one number per row, or `[B, T]`; None: the column of the batch.
            weights: of each token in the sum that is the loss, `[B, T]`, or the name of an aggregation (docs/methods.md) over
                `rows`; None: `algorithm.aggregation`.

        Raises:
            ConfigError: an argument is none of these, or the batch lacks a column.
        """
        self._check_role(role, trained=True)
        chosen = range(len(batch)) if rows is None else rows
        if advantages is not None:
            batch.columns["advantages"] = of_tokens(advantages, batch)
        if isinstance(weights, Tensor):
            batch.columns["weights"] = weights
        elif weights is None or weights in AGGREGATIONS:
            set_loss_weights(batch, chosen, self.config, weights)
        else:
            hint = nearest(weights, AGGREGATIONS)
            raise ConfigError(f"weights is '{weights}'{hint}; it must be {', '.join(AGGREGATIONS)}, or a tensor [B, T]")
        objective = objective_of(loss, role, self.config, self.experience, self.inputs.parts)
        if not isinstance(objective, OwnLoss):
            check_columns(batch, role)
        if loss is None and role == POLICY:
            make_token_columns(self.roles, self.config, batch, chosen, self._rewards, self.step)
        update = self.roles.start_update(role, batch, chosen, [*batch.columns], objective, applies=False)
        self._accumulated.discard(role)  # a pass that fails takes those before it along
        (metrics,) = self.roles.finish_updates([update])
        self._accumulated.add(role)
        metrics.pop(EXPERTS, None)
        return metrics

    def update(
        self, batch: Batch, rows: Sequence[int] | None = None, *, roles: Sequence[str] | None = None
    ) -> dict[str, dict[str, float]]:
        """Make one optimizer step of each of `roles` by the config's losses, at the same time; returns metrics by role.

        Args:
            batch: with the columns of `advantages`.
            rows: of the batch; None: all. Of a loss that compares rows, those that it chooses among them.
            roles: None: all that are trained, whatever `critic.warmup_steps` says.

        Raises:
            ConfigError: a role is not trained, the batch lacks a column, or gradients of `forward_backward` wait.
        """
        config = self.config
        named = [CRITIC, POLICY] if roles is None and config.uses_critic else [POLICY] if roles is None else [*roles]
        for role in named:
            self._check_role(role, trained=True)
            check_columns(batch, role)
            if role in self._accumulated:
                raise ConfigError(
                    f"update would lose the gradients of {role} that forward_backward gave; call optimizer_step first"
                )
        trained: Sequence[int] = range(len(batch)) if rows is None else rows
        chosen = next(filter(None, (part.choose_rows(batch) for part in self.inputs.parts)), None)
        if chosen is not None:
            among = {*trained}
            trained = [row for row in chosen.rows if row in among]
        set_loss_weights(batch, trained if chosen is None else [row for row in trained if row in chosen.counted], config)
        make_token_columns(self.roles, config, batch, trained, self._rewards, self.step)
        metrics = self.update_weighted(batch, trained, roles=named, chosen=chosen)
        for of_role in metrics.values():
            of_role.pop(EXPERTS, None)
        return metrics

    def update_weighted(
        self,
        batch: Batch,
        rows: Sequence[int],
        *,
        roles: Collection[str],
        chosen: ChosenRows | None = None,
        shown_rows: int = 0,
        shown_as: str | None = None,
        without: Collection[str] = (),
    ) -> dict[str, dict[str, Any]]:
        """Make one optimizer step of each of `roles` on `rows` of a batch that has the loss's weights and token columns.

        `chosen`: the rows that an option trains on. `shown_rows`: number of the first rows whose log-probs come with the
        policy's metrics, as `LOG_PROBS`, or become the column `shown_as` of a batch in a store. `without`: columns that the
        policy's loss is not to read. Metrics have what layers with experts routed under `EXPERTS`.
        """
        config, parts = self.config, self.inputs.parts
        running: dict[str, Any] = {}
        if CRITIC in roles:
            value_loss = objective_of(None, CRITIC, config, self.experience, parts)
            running[CRITIC] = self.roles.start_update(CRITIC, batch, rows, ["weights", "values", "returns"], value_loss)
        if POLICY in roles:
            read = [*LOSS_COLUMNS, *TOKEN_COLUMNS, *(chosen.columns if chosen is not None else ())]
            read += [name for part in parts for name in part.loss_columns()] + [*config.algorithm.loss_needs.columns]
            columns = [name for name in dict.fromkeys(read) if name in batch.columns and name not in without]
            stream_loss = next(filter(None, (part.stream_loss() for part in parts)), None)
            loss = policy_objective(config, self.experience, parts, shown_rows=shown_rows, stream_loss=stream_loss)
            mixed_in = next(filter(None, (part.mixed_in() for part in parts)), None)
            running[POLICY] = self.roles.start_update(
                POLICY, batch, rows, columns, loss, keep_groups=chosen is not None, mixed_in=mixed_in, shown_as=shown_as
            )
            self.rollouts.stale = True
            self.step += 1
        return dict(zip(running, self.roles.finish_updates([*running.values()]), strict=True))

    def optimizer_step(self, role: str = POLICY) -> dict[str, float]:
        """Apply the gradients since the last step, clipped and scheduled as `<role>.optimizer` says.

        Returns `grad_norm`, `lr`, and `skipped`: 1 where the step was refused, as a loss or gradient was not finite or
        `run.guards` says so; the gradients are gone then, too.

        Raises:
            ConfigError: there are no gradients.
        """
        self._check_role(role, trained=True)
        if role not in self._accumulated:
            raise ConfigError(f"optimizer_step of {role} has no gradients to apply; call forward_backward before it")
        self._accumulated.discard(role)
        metrics = self.roles.optimizer_step(role)
        metrics.pop(EXPERTS, None)
        if role == POLICY:
            self.step += 1
            self.rollouts.stale = True
        return metrics

    def _limited(self) -> list[str]:
        return ["kept_log_probability"] if self.config.rollout.sampling_limits else []

    def _check_role(self, role: str, *, trained: bool = False) -> None:
        roles = [POLICY, *([CRITIC] if self.config.uses_critic else [])]
        if not trained and self.config.uses_reference:
            roles.append(REFERENCE)
        if role not in roles:
            raise ConfigError.of("role", role, allowed=f"one that the config has: {', '.join(roles)}", choices=roles)

    def _refuse_to_forget_gradients(self, call: str) -> None:
        """Engines that take turns with the trainer on its GPUs leave no place for gradients."""
        if self._accumulated and self.rollouts.takes_turns:
            raise ConfigError(
                f"{call} would lose the gradients of forward_backward, as engines and trainer share GPUs; call optimizer_step "
                "before it, or set resources.placement to separate"
            )

    # checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Save roles, optimizers and the position in the data as a checkpoint `step_<step>` in `folder`; returns its path.

        `load`, `megarl eval --checkpoint` and, with the same config, `run.resume` read it.

        Raises:
            CheckpointError: it could not be written.
        """
        text = to_yaml(self.config)
        saving, state = Saving(CheckpointFolder(folder), text, leads=True), {"step": self.step, "evaluations": {}}
        saving.begin(self.roles, self.step, state | self.state(), provenance(text, self.step, self.version))
        saving.finish(self.roles, wait=True)
        return saving.checkpoints.folder / f"step_{self.step:06d}"

    def load(self, checkpoint: str | Path) -> None:
        """Continue from a checkpoint of a session or of a run with such a config; the next `sync_weights` sends its policy.

        Raises:
            CheckpointError: there is none, it is damaged, or of other roles.
        """
        path = CheckpointFolder(Path(checkpoint).parent).resolve(str(checkpoint), "checkpoint")
        assert path is not None, "one was named"
        state = read_state(path)
        self.roles.restore(str(path.resolve()))
        self.step = state["step"]
        self.load_state(state)
        self._accumulated.clear()
        self.rollouts.stale = True

    def export(self, folder: str | Path, role: str = POLICY) -> None:
        """Write `role` as a Hugging Face model folder, whole or not at all; adapters as a PEFT folder."""
        self._check_role(role)
        self.roles.export(role, str(Path(folder).resolve()))

    def state(self) -> dict[str, Any]:
        """State for a checkpoint besides the roles; JSON-able."""
        of_data = {"sampler": self.sampler.state_dict()} if self.inputs.train else {}
        return of_data | {
            "weight_version": self.rollouts.version,
            "engines_are_behind": self.rollouts.stale,
            "experience": self.experience.state_dict(),
            **{part.state_name: part.state_dict() for part in self.inputs.parts if part.state_name},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue in the data, and with what shaping and controllers remember, where `state()` was taken."""
        sampler = self.sampler if self.inputs.train else None
        go_to_row(sampler, self.inputs.parts, state, self.config.data.on_change)
        self.experience.load_state_dict(state["experience"])


def _flat(samples: Sequence[Sample | Sequence[Sample]]) -> Iterator[Sample]:
    for entry in samples:
        if isinstance(entry, Sample):
            yield entry
        else:
            yield from entry
