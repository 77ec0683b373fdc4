"""The verbs of the reinforcement-learning loop: everything that `rl.train` says, with its config, files and processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import LossSettings, RunningMean
from megarl.checkpoint.run_checkpoint import CheckpointFolder, read_state, write_state
from megarl.config import Config, save_resolved
from megarl.data.batch import Batch
from megarl.data.prompts import load_rows
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import PromptSampler, without_held_out
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ConfigError
from megarl.observe import Phases, Progress, build_summary, open_trackers, write_summary
from megarl.rewards import build_rewards
from megarl.trainers.evaluate import evaluation
from megarl.trainers.experience import estimate_advantages, mini_batch_rows, reward_statistics, set_loss_weights
from megarl.trainers.objectives import PolicyObjective, ValueObjective
from megarl.trainers.parity import Gates
from megarl.trainers.processes import check_architectures, open_cluster, open_roles
from megarl.trainers.roles import CRITIC, POLICY, REFERENCE, group_requests
from megarl.trainers.rollouts import Rollouts
from megarl.trainers.samples_file import SamplesFile


class RlRun:
    """One run, as a context manager: entering starts its processes, leaving ends them, whatever happened."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.run_folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.run.keep_checkpoints)
        self.phases = Phases()
        self.step = 0
        self.evaluations: dict[str, dict[str, float] | None] = {"before": None, "after": None}
        self.metrics: dict[str, float] = {}
        self.baseline = RunningMean()
        self._updates: list[dict[str, float]] = []
        self._stack = ExitStack()

    def __enter__(self) -> RlRun:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        config = self.config
        # What the user may have got wrong comes first, while nothing is started or written.
        check_architectures(config)
        tokenizer = load_tokenizer(config.model.path)
        builder = PromptBuilder(tokenizer, config.data)
        held_out = config.data.eval
        self.eval_prompts = builder.build(load_rows(held_out), prefix="eval") if held_out is not None else []
        train = builder.build(load_rows(config.data.train), prefix="train")
        kept = without_held_out(train, self.eval_prompts)
        self.sampler = PromptSampler(kept, config.run.seed)
        self.rewards = build_rewards(config.rewards, config.data)
        self.rewards.check([*kept, *self.eval_prompts])
        resume_from = self.checkpoints.resolve(config.run.resume)
        state = read_state(resume_from) if resume_from is not None else None
        self.step = state["step"] if state is not None else 0
        self._refuse_to_overwrite()
        save_resolved(config, self.folder / "config.yaml")
        resumed_at = self.step if state is not None else None
        self.trackers = open_trackers(config, resume_after_step=resumed_at)
        self._stack.callback(self.trackers.close)
        self.samples_file = SamplesFile(self.folder / "samples.jsonl", config.run.log_samples, resumed_at)
        self.progress = self._stack.enter_context(Progress(config.run.steps, self.phases, first_step=self.step))
        if len(kept) < len(train):
            self.progress.say(f"{len(train) - len(kept)} of {len(train)} training rows are held-out prompts too: left out")
        if self.finished:
            self._restore_state(state)
            return
        with self.phases("start"):
            self._start(tokenizer)
            if resume_from is not None and state is not None:
                self.roles.restore(str(resume_from.resolve()))
                self.rollouts.resume_after(state["weight_version"])
        self._restore_state(state)

    def _start(self, tokenizer: Any) -> None:
        config = self.config
        cluster = open_cluster(config, group_requests(config), self.folder / "logs")
        self._stack.enter_context(cluster)
        self.rollouts = Rollouts(config, cluster, tokenizer)
        starting = self.rollouts.begin_start()
        self.roles = open_roles(config, cluster)
        self.roles.load(POLICY)
        if config.uses_critic:
            self.roles.load(CRITIC)
        if config.uses_reference:
            self.roles.load(REFERENCE)
        self.rollouts.finish_start(starting)
        self.gates = Gates()
        self.progress.say(
            f"layer spec {self.roles.layer_spec}, platform {cluster.platform.name}, engine {config.rollout.engine}"
        )

    def _refuse_to_overwrite(self) -> None:
        """With `auto`, as a batch system restarts a job, what a run left that had no checkpoint yet is begun anew."""
        metrics = self.folder / "metrics.jsonl"
        if self.config.run.resume == "never" and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(
                f"run.name is '{self.config.run.name}', but {self.folder} already holds a run; give this one another "
                "run.name, continue it with run.resume=auto, or remove the folder"
            )

    def _restore_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.sampler.load_state_dict(state["sampler"])
            self.evaluations.update(state["evaluations"])
            self.baseline = RunningMean(**state["reward_baseline"])

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.config.run.steps

    @contextmanager
    def next_step(self) -> Iterator[None]:
        """One training step; what happens inside is timed and its metrics are collected."""
        self.metrics, self._updates = {}, []
        with self.phases.step():
            yield
        self.step += 1

    def next_prompts(self) -> list[Prompt]:
        """The next prompts in the sampler's order."""
        return self.sampler.next(self.config.rollout.prompts_per_step)

    def sync_weights(self) -> None:
        """Give the engines the policy's weights, unless they have them already."""
        if self.rollouts.stale:
            with self.phases("sync"):
                self.rollouts.update_weights(self.roles)

    def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """A group of responses to every prompt."""
        with self.phases("generate"):
            return self.rollouts.generate(prompts)

    def score(self, samples: list[Sample]) -> list[float]:
        """One reward per sample: the weighted sum of all sources."""
        with self.phases("reward"):
            return self.rewards.score(samples)

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """The batch with whatever the step needs to know before it updates: old and reference log-probs, values."""
        config, batch = self.config, Batch(samples)
        with self.phases("log_probs"):
            if self._needs_old_log_probs:
                self.roles.forward(POLICY, batch, ["old_log_probs", "old_entropy"])
            if config.uses_reference:
                self.roles.forward(REFERENCE, batch, ["reference_log_probs", "reference_entropy"])
            elif self.step == 0:
                # No KL term, but the policy must still start out as the reference: loaded, compared once, dropped.
                self.roles.load(REFERENCE)
                self.roles.forward(REFERENCE, batch, ["reference_log_probs", "reference_entropy"])
                self.roles.drop(REFERENCE)
            if config.uses_critic:
                self.roles.forward(CRITIC, batch, ["values"])
        return batch

    def estimate_advantages(self, batch: Batch, rewards: Sequence[float]) -> None:
        """Advantages and returns over the whole batch, on the driver."""
        with self.phases("advantages"):
            self.baseline = estimate_advantages(batch, rewards, self.config, self.baseline)
            statistics = reward_statistics(torch.tensor(rewards), batch.groups)
        self.metrics |= {
            "reward/mean": statistics.mean,
            "reward/std": statistics.std,
            "reward/tied_groups": statistics.tied_groups,
        }

    def mini_batches(self, batch: Batch) -> Iterator[list[int]]:
        """Rows of every optimizer step: `epochs` passes over the mini-batches."""
        algorithm = self.config.algorithm
        for epoch in range(algorithm.epochs):
            seed = self.config.run.seed + self.step * algorithm.epochs + epoch
            yield from mini_batch_rows(batch, algorithm.mini_batches, seed)

    def update(self, batch: Batch, rows: Sequence[int]) -> None:
        """One optimizer step of the critic, and of the policy once the critic is warmed up, at the same time."""
        config = self.config
        with self.phases("update"):
            set_loss_weights(batch, rows, config)
            running = []
            if config.uses_critic:
                value_columns = ["weights", "values", "returns"]
                objective = ValueObjective(config.critic.clip_range)
                running.append(self.roles.start_update(CRITIC, batch, rows, value_columns, objective))
            if not config.uses_critic or self.step >= config.critic.warmup_steps:
                wanted = ("weights", "advantages", "rollout_log_probs", "old_log_probs", "reference_log_probs")
                columns = [name for name in wanted if name in batch.columns]
                running.append(self.roles.start_update(POLICY, batch, rows, columns, self._policy_objective()))
                self.rollouts.stale = True
            names = [CRITIC, POLICY] if config.uses_critic else [POLICY]
            merged: dict[str, float] = {}
            for name, metrics in zip(names, self.roles.finish_updates(running), strict=False):
                merged |= {(f"{name}/{key}" if "/" not in key else key): value for key, value in metrics.items()}
            self._updates.append(merged)

    def report(self, batch: Batch) -> None:
        """Write the step's metrics and samples, and show them."""
        times = self.phases.last_step
        assert times is not None, "report comes after a step"
        names = {name for update in self._updates for name in update}
        for name in names:
            values = [update[name] for update in self._updates if name in update]
            self.metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        samples, tokens = batch.samples, batch.response_tokens
        all_tokens = sum(sample.total_length for sample in samples)
        self.metrics |= {
            "response/tokens_mean": tokens / len(samples),
            "response/truncated": sum(sample.truncated for sample in samples) / len(samples),
            "rollout/samples": len(samples),
            "rollout/weight_version": self.rollouts.sampled_version,
            "reward/failures": sum(self.rewards.failures.values()),
            "speed/samples_per_s": len(samples) / times.wall_s,
            "speed/tokens_per_s": all_tokens / times.wall_s,
            "speed/generated_tokens_per_s": tokens / times.phase_s["generate"],
            **times.metrics(),
        }
        self.gates.see(self.step, self.metrics, self._updates[0], synced=self.rollouts.sampled_version > 0)
        self.trackers.log(self.step, self.metrics)
        self.samples_file.write(self.step, samples)
        self.progress.step_done(self.step, self.metrics)

    def save_if_due(self) -> None:
        """Save at `run.save_every` and after the last step."""
        every = self.config.run.save_every
        if self.finished or (every and self.step % every == 0):
            with self.phases("save"):
                self._save()

    def evaluate_if_due(self) -> None:
        """Evaluate at `run.eval_every` and after the last step."""
        every = self.config.run.eval_every
        if self.finished:
            self.evaluate("after")
        elif every and self.step % every == 0:
            self.evaluate(f"step {self.step}")

    def evaluate(self, when: str) -> None:
        """Answer the held-out prompts greedily with the current policy and score the answers."""
        if not self.eval_prompts or self.evaluations.get(when) is not None:
            return
        self.sync_weights()
        with self.phases("evaluate"):
            started = time.perf_counter()
            samples = self.rollouts.generate(self.eval_prompts, greedy=True)
            scores = self.rewards.score(samples)
            result = evaluation(scores, self.config) | {"seconds": time.perf_counter() - started}
        self.evaluations[when] = result
        self.progress.say(f"evaluation {when}: accuracy {result['accuracy']:.1%} of {len(samples)} held-out prompts")
        self.metrics |= {f"eval/{name}": value for name, value in result.items()}
        if not self.step:
            self.trackers.log(0, self.metrics)

    def finish(self) -> dict[str, Any]:
        """Write `summary.json` and return it; a run that was already finished keeps the summary that it has."""
        path = self.folder / "summary.json"
        if not hasattr(self, "gates"):
            self.progress.say(f"{self.folder} is finished; its summary is in {path}")
            return json.loads(path.read_text())
        summary = build_summary(
            self.config,
            self.phases,
            eval_before=self.evaluations["before"],
            eval_after=self.evaluations["after"],
            gates=self.gates.figures(),
        )
        write_summary(path, summary)
        self._say_result()
        return summary

    def _say_result(self) -> None:
        before, after = self.evaluations["before"], self.evaluations["after"]
        if before is not None and after is not None:
            self.progress.say(
                f"held-out accuracy: {before['accuracy']:.1%} before, {after['accuracy']:.1%} after {self.step} steps"
            )
        for name, value in self.gates.figures().items():
            self.progress.say(f"gate {name}: {value:.3g}" if value is not None else f"gate {name}: not measured")

    def _save(self) -> None:
        with self.checkpoints.writing(self.step) as folder:
            self.roles.save(str(folder.resolve()))
            state = {
                "step": self.step,
                "sampler": self.sampler.state_dict(),
                "evaluations": self.evaluations,
                "weight_version": self.rollouts.version,
                "reward_baseline": asdict(self.baseline),
            }
            write_state(folder, state)

    @property
    def _needs_old_log_probs(self) -> bool:
        """On-policy, a single optimizer step sees its own log-probs; more steps, or a KL in the reward, need them first."""
        algorithm = self.config.algorithm
        in_reward = algorithm.kl.coef > 0 and algorithm.kl.where == "reward"
        return algorithm.epochs * algorithm.mini_batches > 1 or in_reward

    def _policy_objective(self) -> PolicyObjective:
        algorithm = self.config.algorithm
        return PolicyObjective(
            algorithm.policy_loss,
            LossSettings(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip),
            kl_coef=algorithm.kl.coef if algorithm.kl.where == "loss" else 0.0,
            kl_estimator=algorithm.kl.estimator,
            entropy_coef=algorithm.entropy_coef,
        )
