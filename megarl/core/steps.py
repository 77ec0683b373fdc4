"""The methods of the reinforcement-learning loop: everything that `core.loop.train` calls, with its config and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from megarl.config import Config
from megarl.config.doubtful import doubtful_choices, notices
from megarl.core.protocols import StartProcesses
from megarl.core.run import Run
from megarl.core.session import Session
from megarl.data.batch import Batch
from megarl.data.branches import JoinedEpisodes, first_branches
from megarl.data.prefills import prefill_figures
from megarl.data.sample import Sample
from megarl.data.stored_batch import batch_of
from megarl.data.stored_shares import RowTask
from megarl.errors import counted
from megarl.experience.eval_figures import pass_rates
from megarl.experience.experience import (
    mini_batch_rows,
    reward_statistics,
    set_loss_weights,
)
from megarl.experience.inputs import RlInputs
from megarl.experience.parity_checks import ParityChecks, bounds
from megarl.experience.samples_file import SamplesFile
from megarl.experience.source_figures import DataSources
from megarl.experience.step_parts import ChosenRows, go_to_row
from megarl.experience.step_tokens import count_older_tokens, older_part
from megarl.experience.step_work import estimate, make_token_columns
from megarl.observe import MetricsFile, distributions
from megarl.observe.progress import SHOWN, rows_line
from megarl.runs.run_template import keep_template
from megarl.runs.training_side import CRITIC, POLICY
from megarl.runs.update_metrics import LOG_PROBS, LogProbs

T = TypeVar("T")
TRAINING = ("log_probs", "update", "sync")
"""Phases in which the training ranks work."""


class RlRun(Run):
    """A reinforcement-learning run; `core.loop.train` is written in its methods."""

    shown: ClassVar = SHOWN
    # made by `start`, with the processes
    samples_file: SamplesFile
    distributions: MetricsFile
    reward_errors: MetricsFile
    """Records of what sources of reward failed on, where some may fail."""

    def __init__(self, config: Config, read_inputs: Callable[[Config], RlInputs], start_processes: StartProcesses) -> None:
        super().__init__(config)
        with self.telling_of_disk_trouble():
            self.inputs = read_inputs(config)
        self._stack.callback(self.inputs.close)
        config = self.count_epochs(config, sum(map(len, self.inputs.train)), config.rollout.prompts_per_step)
        self.config = config
        self.sources = DataSources.of(self.inputs.train, config.data.source_key)
        self.session = Session(config, self.inputs, start_processes)
        self.sampler, self.experience, self.parts = self.session.sampler, self.session.experience, self.inputs.parts
        self.parity = ParityChecks(has_reference=config.uses_reference)
        self._updates: list[dict[str, float]] = []
        self._chosen: ChosenRows | None = None
        self._scores: list[float] = []
        self._log_probs: LogProbs = {}
        self._greedy: list[Sample] = []
        self.scored_greedy: list[tuple[Sample, float]] = []
        self._episodes: JoinedEpisodes | None = None

    def start(self) -> None:
        """Ray, engines and roles; the engines load while the trainer does."""
        config = self.config
        if self.inputs.overlap:
            overlap, rows = self.inputs.overlap, self.inputs.train_rows
            self.progress.say(f"{overlap} of {rows} training rows are held-out prompts too: left out")
        held_out, limit = None, None
        if config.data.eval is not None:
            held_out, limit = len(self.inputs.held_out), config.data.eval.limit
        sets = {evaluation_set.settings.name: len(evaluation_set.prompts) for evaluation_set in self.inputs.evaluations}
        self.progress.say(rows_line(sum(map(len, self.inputs.train)), held_out, limit, sets))
        for why, count in self.inputs.dropped.items():
            if count:
                self.progress.say(f"{counted(count, 'row')} left out as {why}")
        for choice in self.inputs.episodes.choices if self.inputs.episodes is not None else ():
            self.progress.say(choice)
        for notice in notices(config):
            self.progress.say(notice)
        for doubt in doubtful_choices(config):
            self.progress.say(f"warning: {doubt}")
        keep_template(self.folder, self.inputs.tokenizer, config.data)
        logged, after = config.run.log_samples, self.step or None
        self.samples_file = SamplesFile(self.folder / "samples.jsonl", logged, after, self.inputs.tokenizer)
        self.distributions = MetricsFile(self.folder / "distributions.jsonl", resume_after_step=after)
        self._stack.callback(self.distributions.close)
        if self.inputs.forgives_rewards:
            self.reward_errors = MetricsFile(self.folder / "reward_errors.jsonl", resume_after_step=after)
            self._stack.callback(self.reward_errors.close)
        self._stack.callback(self.session.close)
        self.session.start(self.folder / "logs", doing=self.progress.doing, say=self.progress.say, placed=self.tell_placement)
        self.roles, self.rollouts = self.session.roles, self.session.rollouts
        self.timeline.others["engine"] = self.rollouts.take_spans
        self.watching.engines = self.rollouts.engine_status
        self.progress.within("generate", "groups", self.rollouts.progress)
        self.progress.within("evaluate", "prompts", self.rollouts.answered)
        for phase in ("log_probs", "update"):
            self.progress.within(phase, "micro-batches", self.roles.groups[POLICY].progress)
        self.progress.say(f"{self.roles.describe()}, platform {self.session.platform}, engine {config.rollout.engine}")

    def state(self) -> dict[str, Any]:
        """The sampler's position, the engines' version, the prompts under way, and what shaping and controllers remember."""
        return {
            **self.session.state(),
            "groups": self.rollouts.state(),
            "guards": self.guards.state_dict(),
            "gates": self.parity.figures(),
            "rewards": self.inputs.rewards.state_dict(),
        }

    def go_to_row(self, state: dict[str, Any]) -> list[str]:
        """The places of the sampler and of options' rows; see `Run`."""
        return go_to_row(self.sampler, self.parts, state, self.config.data.on_change)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken; the engines have yet to be given the policy."""
        self.session.load_state(state)
        self.guards.load_state_dict(state.get("guards"))
        self.parity.load(state.get("gates", {}))
        self.inputs.rewards.load_state_dict(state.get("rewards", {}))
        if not self.was_finished:
            # weights that the engines had got already, as for an evaluation, are given to them under the same version again
            version = state["weight_version"] - (0 if state.get("engines_are_behind", True) else 1)
            self.rollouts.resume_after(version, state.get("groups"))

    def gates(self) -> dict[str, float | None]:
        """Policy against reference at the first step, trainer against engine."""
        return self.parity.figures()

    def gate_bounds(self) -> dict[str, float]:
        """Upper bounds of the figures, where that is known."""
        return bounds(self.config, self.inputs.dense_layers)

    def sync_weights(self) -> None:
        """Give the engines the policy's weights, unless they have them already; what is under way there continues."""
        if self.rollouts.stale:
            with self.phases("generate"):
                self.rollouts.finish_step_ahead(self.sampler.next)
            with self.phases("sync"):
                self._again(self.session.sync_weights)

    def generate(self, groups: int | None = None) -> list[Sample]:
        """A group of responses to each of the next prompts in the sampler's order (None: a step's)."""
        with self.phases("generate"):
            batch = self.rollouts.next_batch(self.sampler.next, groups)
            if self.config.algorithm.estimator_needs.greedy:
                self._greedy += self.rollouts.generate(batch.prompts, greedy=True)
            return [sample for group in batch.samples for sample in group]

    def score(self, samples: list[Sample]) -> list[float]:
        """One reward per sample: the weighted sum of all sources, the reward model among them."""
        tolerance = self.inputs.rewards.tolerance
        if tolerance is not None:
            tolerance.begin_step(self.step)
        with self.phases("reward"), self._telling_of_reward_errors(self.step + 1):
            rewards = self._again(partial(self.session.reward, samples))
            if self._greedy:
                of_greedy = self._again(partial(self.session.reward, self._greedy))
                self.scored_greedy += zip(self._greedy, of_greedy, strict=True)
                self._greedy = []
        if self.sampler.takes_pass_rates:
            dropped = tolerance.dropped if tolerance is not None else ()
            self.sampler.record(pass_rates([s for s in first_branches(samples) if s.group_id not in dropped]))
            self.metrics |= self.sampler.figures()
        return rewards

    @contextmanager
    def _telling_of_reward_errors(self, step: int) -> Iterator[None]:
        """Write and say, however the block ends, which responses a source of reward failed on in it."""
        try:
            yield
        finally:
            for record in self.inputs.take_reward_errors(self.progress.say):
                self.reward_errors.log(step, record)

    def replace_uniform_groups(self, samples: list[Sample], rewards: list[float]) -> tuple[list[Sample], list[float]]:
        """Put further prompts in place of groups whose rewards all agree, or that were dropped (`uniform_groups.py`)."""
        rounds, tolerance = self.config.rollout.dynamic_sampling_rounds, self.inputs.rewards.tolerance
        dropped = tolerance.dropped if tolerance is not None else frozenset()
        if not rounds and not dropped:
            return samples, rewards
        from megarl.experience.uniform_groups import refilled

        def more(groups: int) -> tuple[list[Sample], list[float]]:
            return (sampled := self.generate(groups)), self.score(sampled)

        samples, rewards, figures = refilled(self.config, samples, rewards, dropped, more)
        self.metrics |= figures
        return samples, rewards

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Have what a step computes on ranks inside; more than once where an option replaces ranks that are lost."""
        self.metrics |= self.rollouts.figures()
        recovery = self.session.recovery
        yield from [nullcontext()] if recovery is None else recovery.attempts(self)

    def _again(self, work: Callable[[], T]) -> T:
        recovery = self.session.recovery
        return work() if recovery is None else recovery.again(self, work)

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """The batch with whatever the step needs to know before it updates: old and reference log-probs, values."""
        config, batch = self.config, batch_of(samples)
        version = self.rollouts.version
        if config.rollout.schedule.mask_older_tokens:
            self.metrics |= self.roles.compute(batch, RowTask(older_part, [version], columns=()))[0]
        else:
            self.metrics |= count_older_tokens(batch, version)
        with self.phases("log_probs"):
            if self._first_update_is_a_pass:
                self._forward_later_rows(batch)
            if config.uses_reference:
                self.reset_reference_if_due()
            self.session.prepare(batch, self.step)
        return batch

    def estimate_advantages(self, batch: Batch, rewards: Sequence[float]) -> None:
        """Advantages and returns over the whole batch, where the tokens are: of episodes, whose branches get theirs."""
        self._scores, self._log_probs = list(rewards), {}
        with self.phases("advantages"):
            for part in self.parts:
                part.take_rewards(batch, rewards)
            self._episodes = episodes = JoinedEpisodes(batch, apart=self.config.rewards_by_branch)
            of_episodes = [rewards[rows[0]] for rows in episodes.rows]
            statistics = reward_statistics(torch.tensor(of_episodes), episodes.batch.groups)
            batch_of_episodes, greedy, self.scored_greedy = episodes.batch, self.scored_greedy or None, []
            metrics, entropy = estimate(self.roles, self.experience, batch_of_episodes, of_episodes, greedy)
            self.metrics |= metrics | self.experience.steer_entropy_by(entropy)
            episodes.split()
            self._chosen = next(filter(None, (part.choose_rows(batch) for part in self.parts)), None)
            if self._chosen is not None:
                self.metrics |= self._chosen.figures
        self.metrics |= {
            "reward/mean": statistics.mean,
            "reward/std": statistics.std,
            "reward/uniform_groups": statistics.uniform_groups,
            **self.sources.figures(episodes.batch.samples, of_episodes),
        }

    def mini_batches(self, batch: Batch) -> Iterator[list[int]]:
        """Rows of every optimizer step: `epochs` passes over the mini-batches."""
        self._updates = []
        for epoch in range(self.config.algorithm.epochs):
            assert self._episodes is not None, "advantages come before updates"
            yield from self._mini_batches_of(epoch, self._episodes)

    def _mini_batches_of(self, epoch: int, episodes: JoinedEpisodes) -> list[list[int]]:
        algorithm = self.config.algorithm
        seed = self.config.run.seed + self.step * algorithm.epochs + epoch
        of = self._chosen.rows if self._chosen is not None else None
        chosen = mini_batch_rows(episodes.batch, algorithm.mini_batches, seed, of)
        return [[row for episode in mini_batch for row in episodes.rows[episode]] for mini_batch in chosen]

    @property
    def _first_update_is_a_pass(self) -> bool:
        """In a step that updates the critic alone nothing else computes the policy's log-probs."""
        return self.config.first_update_is_a_pass and not self._warms_up

    @property
    def _warms_up(self) -> bool:
        return self.config.uses_critic and self.step < self.config.critic.warmup_steps

    def _forward_later_rows(self, batch: Batch) -> None:
        """Old log-probs of the rows that the first update does not see; `update` adds those that it computes."""
        first = {*self._mini_batches_of(0, JoinedEpisodes(batch, apart=self.config.rewards_by_branch))[0]}
        later = [row for row in range(len(batch)) if row not in first]
        if later:
            self.roles.forward(POLICY, batch, ["old_log_probs", "old_entropy"], rows=later)
            del batch.columns["old_entropy"]  # of some rows
        else:
            batch.set_zeros("old_log_probs")

    def update(self, batch: Batch, rows: Sequence[int]) -> None:
        """One optimizer step of the critic, and of the policy once the critic is warmed up, at the same time."""
        config = self.config
        computes_old = self._first_update_is_a_pass and not self._updates
        if self.guards.should_skip(self.metrics):
            self._updates.append({f"{POLICY}/skipped": 1.0})
            if computes_old:
                del batch.columns["old_log_probs"]  # of some rows, and no later update reads them
            return
        with self.phases("update"):
            counted = rows if self._chosen is None else [row for row in rows if row in self._chosen.counted]
            assert self._episodes is not None, "advantages come before updates"
            set_loss_weights(self._episodes.batch, self._episodes.of_rows(counted), config)
            self._episodes.split(["weights"])
            number = self.step * config.optimizer_steps_per_step + len(self._updates)
            make_token_columns(self.roles, config, batch, rows, self._scores, number)
            shown = 0 if "old_log_probs" in batch.columns else config.run.log_samples
            updates = self.session.update_weighted(
                batch,
                rows,
                roles=[*([CRITIC] if config.uses_critic else []), *([] if self._warms_up else [POLICY])],
                chosen=self._chosen,
                shown_rows=len(batch) if computes_old else shown,
                shown_as="old_log_probs" if computes_old else None,
                without=["old_log_probs"] if computes_old else (),
            )
            merged: dict[str, float] = {}
            for name, metrics in updates.items():
                self._take_log_probs(batch, metrics.pop(LOG_PROBS, {}), are_old=computes_old)
                self.experts.take(name, metrics)
                merged |= {(f"{name}/{key}" if "/" not in key else key): value for key, value in metrics.items()}
            self._updates.append(merged)

    def report(self, batch: Batch) -> None:
        """Write the step's metrics and samples, and show them."""
        times = self.phases.last_step
        assert times is not None, "report comes after a step"
        metrics: dict[str, float] = {}
        for name in {name for update in self._updates for name in update}:
            values = [update[name] for update in self._updates if name in update]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        for update in self._updates:
            self.guards.record_update(update)
        metrics |= self.guards.figures()
        measured = [update["policy/kl_old"] for update in self._updates if "policy/kl_old" in update]
        metrics |= self.experience.steer_old_policy_kl(measured[-1] if measured else None)
        samples, tokens, takes_turns = batch.samples, batch.response_tokens, self.config.rollout.schedule.mode == "sync"
        all_tokens = sum(sample.total_length for sample in samples)
        metrics |= {
            "response/tokens_mean": tokens / len(samples),
            "response/truncated": sum(sample.truncated for sample in samples) / len(samples),
            "rollout/samples": len(samples),
            **prefill_figures(sample.prefill for sample in samples),
            "reward/failures": sum(self.inputs.rewards.failures.values()),
            **(tolerance.step_figures() if (tolerance := self.inputs.rewards.tolerance) is not None else {}),
            "speed/samples_per_s": len(samples) / times.wall_s,
            "speed/tokens_per_s": all_tokens / times.wall_s,
            "speed/generated_tokens_per_s": tokens / (times.phase_s["generate"] if takes_turns else times.wall_s),
            "speed/sync_bytes": self.rollouts.take_sent_bytes(),
            "speed/judged_ahead": self.inputs.rewards.take_ahead(),
            "speed/trainer_busy": sum(times.phase_s.get(phase, 0.0) for phase in TRAINING) / times.wall_s,
        }
        metrics |= self.rollouts.take_figures_of_turns()
        for part in self.parts:
            metrics |= part.figures(self.roles, batch)
        if not self.metrics["staleness/max"]:  # else trainer and engine are meant to differ
            self.parity.record(self.step, metrics, self._updates[0], synced=self.metrics["rollout/weight_version"] > 0)
        self.log(metrics)
        self.samples_file.write(self.step, batch, self._scores, self._log_probs)
        lengths, groups = [sample.response_length for sample in samples], batch.groups.tolist()
        version = int(self.metrics["rollout/weight_version"])
        staleness = [version - min((sampled for sampled, _ in sample.versions), default=version) for sample in samples]
        self.distributions.log(self.step, distributions(lengths, self._scores, groups, staleness))

    def apply_guards(self) -> None:
        """Stop, or go back to a checkpoint's weights, where `run.guards` says so; prompts and step numbers go on."""
        updates = [update for update in self._updates if f"{POLICY}/grad_norm" in update]
        due = self.guards.check_step(self.metrics, [*updates[0]] if updates else ())
        if due is not None:
            self.experience.load_state_dict(self.roll_back(due)["experience"])
            self.rollouts.stale = True

    def measure(self) -> dict[str, float] | None:
        """Answers of the current policy, scored: greedy ones to `data.eval`, and what each set of `evaluations` asks for."""
        if not self.config.evaluates:
            return None
        self.sync_weights()
        with self._telling_of_reward_errors(self.step):
            return self._again(self.session.evaluate)

    def _take_log_probs(self, batch: Batch, log_probs: LogProbs, *, are_old: bool) -> None:
        """Keep the log-probs that an update computed: for the updates after it, or for `samples.jsonl`."""
        if not are_old:
            self._log_probs = {**self._log_probs, **log_probs}
            return
        for row, values in log_probs.items():
            batch.columns["old_log_probs"][row, : len(values)] = torch.tensor(values)
