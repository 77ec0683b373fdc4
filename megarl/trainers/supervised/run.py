"""The verbs of training on given responses: SFT, outcome and process reward models, and preference losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import Any, ClassVar

import torch

from megarl.algorithms import RunningMean, token_weights
from megarl.algorithms.preference import PreferenceSettings, kto_kl_reference, mismatched_rows
from megarl.config import SupervisedConfig
from megarl.config.supervised import PAIR_LOSSES, SHIFTED_LOSSES, TOKEN_LOSSES
from megarl.core.run import Run
from megarl.data.batch import Batch
from megarl.data.held_out import count_held_out
from megarl.data.mixture import build_parts, build_sampler, mixture_weights, place_of_row
from megarl.data.row_media import open_media
from megarl.data.row_order import order_by
from megarl.data.rows import find_value
from megarl.data.sample import Sample
from megarl.data.stream import ScorePosition, pack
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings, behind_prompt, kind_of_rows, units_of
from megarl.data.tokenize import load_tokenizer
from megarl.errors import counted
from megarl.observe.progress import TOWER, rows_line
from megarl.runs.run_template import keep_template
from megarl.runs.training_side import POLICY, REFERENCE
from megarl.trainers.start import check_architectures, open_groups, open_roles
from megarl.trainers.supervised.objectives import (
    BcoObjective,
    KtoObjective,
    PairObjective,
    ProcessRewardObjective,
    RewardModelObjective,
    SupervisedObjective,
)


class SupervisedRun(Run):
    """A run on given responses; `supervised.train` is written in its methods."""

    shown: ClassVar = {"loss": "train/loss", "accuracy": "train/accuracy", "tokens/s": "speed/tokens_per_s", **TOWER}

    def __init__(self, config: SupervisedConfig, *, leads: bool = True) -> None:
        super().__init__(config, leads=leads)
        self.config, self.objective = config, config.objective
        self.update_metrics: dict[str, float] = {}
        self.rewards = RunningMean()
        """Mean of all responses of the steps so far, where a loss is shifted by it."""
        with self.telling_of_disk_trouble():
            check_architectures(config)
            settings = SupervisedSettings.of(config.data)
            self.tokenizer = tokenizer = load_tokenizer(config.model.path)
            media = open_media(config.data, config.model.path, tokenizer, config.run_folder)
            builder = SupervisedBuilder(tokenizer, kind_of_rows(self.objective.name), settings, media)
            train = build_parts(builder, config.data.train, prefix="train")
            held_out = build_parts(builder, config.data.eval, prefix="eval") if config.data.eval is not None else []
        self.held_out = [sample for part in held_out for sample in part]
        self.rows = len({sample.row_id for part in train for sample in part})
        self.config = config = self.count_epochs(config, self.rows, config.data.rows_per_step)
        self.overlap = count_held_out([sample for part in train for sample in part], self.held_out)
        self.sampler = build_sampler(
            train,
            mixture_weights(config.data.train),
            config.run.seed,
            order_by(config.data),
            config.data.rows_per_step,
            partial(place_of_row, source=config.data.train),
        )
        self.dropped = builder.dropped
        self.turn_end = builder.turns.ends.describe() if builder.template.is_used else None
        self.samples = sum(len(part) for part in train)

    # the frame ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The ranks and their models."""
        held_out, limit = None, None
        if self.config.data.eval is not None:
            held_out, limit = len({sample.row_id for sample in self.held_out}), self.config.data.eval.limit
        self.progress.say(rows_line(self.rows, held_out, limit, {}))
        if self.config.data.turns == "each":
            self.progress.say(f"{self.samples} samples, one for each assistant turn")
        if self.turn_end is not None:
            self.progress.say(self.turn_end)
        if self.overlap:
            self.progress.say(
                f"warning: {self.overlap} of {self.rows} training rows have the prompt of a row of data.eval, so that "
                "evaluations measure what was trained on"
            )
        for why, count in self.dropped.items():
            if count:
                self.progress.say(f"{counted(count, 'row')} left out as {why}")
        if self.leads:
            keep_template(self.folder, self.tokenizer, self.config.data)
        self.progress.doing("ranks")
        groups = open_groups(self.config, self._stack, self.folder / "logs", self.tell_placement)
        self.roles = open_roles(self.config, groups)
        self.progress.doing(POLICY)
        self.roles.load(POLICY)
        if self.config.uses_reference:
            self.progress.doing(REFERENCE)
            self.roles.load(REFERENCE)
        for phase in ("update", "evaluate"):
            self.progress.within(phase, "micro-batches", self.roles.groups[POLICY].progress)
        self.progress.say(f"{self.roles.describe()}, objective {self.objective.name}")

    def state(self) -> dict[str, Any]:
        """The sampler's position, what the guards counted, and the mean of the rewards so far."""
        return {
            "sampler": self.sampler.state_dict(),
            "guards": self.guards.state_dict(),
            "rewards": asdict(self.rewards),
        }

    def go_to_row(self, state: dict[str, Any]) -> list[str]:
        """The sampler's place; see `Run`."""
        return self.sampler.load_state_dict(state["sampler"], self.config.data.on_change)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken, beside the place in the data."""
        self.guards.load_state_dict(state.get("guards"))
        self._load_rewards(state)

    def gates(self) -> dict[str, float | None]:
        """Nothing to compare with: no engine takes part."""
        return {}

    # a step -------------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """The next rows as a batch with everything that the loss reads."""
        with self.phases("reference"):
            self.reset_reference_if_due()
        return self.prepare(self.sampler.next(self.config.data.rows_per_step))

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """Labels and global denominators as columns, and the reference's log-probs where the loss compares with them."""
        batch, name = Batch(samples), self.objective.name
        if name in PAIR_LOSSES:
            is_chosen = [sample.sample_id.endswith("/chosen") for sample in samples]
            batch.columns["pair"] = batch.groups[:, None].float().expand(batch.mask.shape)
            batch.columns["is_chosen"] = torch.tensor(is_chosen)[:, None].float().expand(batch.mask.shape)
        if self.config.data.margin_key is not None:
            margins = torch.tensor([float(find_value(sample.row, self.config.data.margin_key)) for sample in samples])
            batch.columns["margin"] = margins[:, None].expand(batch.mask.shape)
        if name in TOKEN_LOSSES:
            batch.columns["weights"] = token_weights(batch.mask, self.objective.aggregation)
        if self.config.uses_reference:
            with self.phases("reference"):
                self.roles.forward(REFERENCE, batch, ["reference_log_probs", "reference_entropy"])
        return batch

    def update(self, batch: Batch) -> None:
        """One optimizer step on the whole batch."""
        objective, columns = self._objective(batch)
        with self.phases("update"):
            update = self.roles.start_update(
                POLICY,
                batch,
                range(len(batch)),
                columns,
                objective,
                at=self._scored(batch),
                keep_groups=self.objective.name in PAIR_LOSSES,
            )
            (metrics,) = self.roles.finish_updates([update])
            self.experts.take(POLICY, metrics)
        if {*self.objective.losses} & {*SHIFTED_LOSSES}:
            metrics["reward_shift"] = self.rewards.mean
            if isfinite(metrics["reward"]):
                self.rewards = self.rewards.update(torch.full((len(batch),), metrics["reward"]))
        self.update_metrics = {f"train/{name}": value for name, value in metrics.items()}
        self.guards.record_update(self.update_metrics)

    def report(self, batch: Batch) -> None:
        """Write the step's metrics, and show them."""
        assert self.phases.last_step is not None, "report comes after a step"
        tokens = sum(sample.total_length for sample in batch.samples)
        self.log(self.update_metrics | self.guards.figures() | {"speed/tokens_per_s": tokens / self.phases.last_step.wall_s})

    def apply_guards(self) -> None:
        """Stop, or go back to a checkpoint's weights, where `run.guards` says so; rows and step numbers go on."""
        own_times = ("time/", "time_fraction/", "speed/")  # under torchrun every rank judges, and must judge alike
        metrics = {name: value for name, value in self.metrics.items() if not name.startswith(own_times)}
        due = self.guards.check_step(metrics, [*self.update_metrics])
        if due is not None:
            self._load_rewards(self.roll_back(due))

    def measure(self) -> dict[str, float] | None:
        """The loss over all held-out rows and what goes with it, such as the share of pairs that are the right way round."""
        if not self.held_out:
            return None
        batch = self.prepare(self.held_out)
        names = ["score"] if self.config.has_value_head else ["log_probs", "entropy"]
        self.roles.forward(POLICY, batch, names, at=self._scored(batch))
        objective, columns = self._objective(batch)
        mask = self._scored(batch)
        stream = pack(
            units_of(batch, range(len(batch)), [*columns, *names], share_prefix=True, mask=mask),
            position=ScorePosition.of(mask),
        )
        output = torch.stack([stream.columns[name] for name in names], dim=-1)
        _, figures = objective(output, stream)
        return {name: float(value) for name, value in figures.items()}

    def _scored(self, batch: Batch) -> torch.Tensor | None:
        """The tokens at which a scalar head scores: at the last token of a response, or at the end of every step; None:
        log-probs."""
        if self.objective.name == "reward_model":
            return batch.last_tokens
        return batch.mask if self.objective.name == "process_reward_model" else None

    def _objective(self, batch: Batch) -> tuple[Any, list[str]]:
        """The loss with this batch's global numbers, and the columns that it reads."""
        name, settings = self.objective.name, self.objective
        constants = PreferenceSettings(
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            target_margin=settings.target_margin,
            length_normalised=settings.length_normalised,
            rpo_alpha=settings.rpo_alpha,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
            reward_shift=self.rewards.mean,
            mixture=dict(settings.mixture.items()),
        )
        pairs = len(batch) // 2
        if name in TOKEN_LOSSES:
            return SupervisedObjective(dft=name == "dft"), ["weights"]
        if name == "reward_model":
            margin = ["margin"] if "margin" in batch.columns else []
            return RewardModelObjective(pairs), ["pair", "is_chosen", *margin]
        if name == "process_reward_model":
            return ProcessRewardObjective(int(batch.mask.sum())), ["labels"]
        if name == "kto":
            kl = self._kto_reference(batch)
            return KtoObjective(constants, len(batch), kl), ["labels", "reference_log_probs"]
        if name == "bco":
            return BcoObjective(constants, len(batch)), ["labels", "reference_log_probs"]
        reference = ["reference_log_probs"] if self.config.uses_reference else []
        return PairObjective(name, constants, pairs, bool(reference)), ["pair", "is_chosen", *reference]

    def _load_rewards(self, state: dict[str, Any]) -> None:
        self.rewards = RunningMean(**state.get("rewards", {}))

    def _kto_reference(self, batch: Batch) -> float:
        """KTO's reference point, from prompts with responses to other prompts (docs/methods.md#objective-kto)."""
        samples, prompts = batch.samples, [(tuple(sample.prompt_ids), sample.prompt_media) for sample in batch.samples]
        others = mismatched_rows(prompts)
        mismatched = Batch([behind_prompt(samples[other], sample) for sample, other in zip(samples, others, strict=True)])
        is_mismatched = torch.tensor([prompts[other] != prompt for prompt, other in zip(prompts, others, strict=True)])
        if not is_mismatched.any():
            return 0.0
        with self.phases("reference"):
            self.roles.forward(POLICY, mismatched, ["log_probs", "entropy"])
            self.roles.forward(REFERENCE, mismatched, ["reference_log_probs", "reference_entropy"])
        names = ("log_probs", "reference_log_probs")
        sums = [(mismatched.columns[name] * mismatched.mask).sum(1)[is_mismatched] for name in names]
        return float(kto_kl_reference(*sums))
