"""The part of routing replay in a step: what was recorded is replayed, and its figures are reported."""

from __future__ import annotations

from typing import Any

from megarl.algorithms import mismatch_sums
from megarl.config import AnyConfig, Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import StepPart
from megarl.options.routing_replay.column import COLUMN, ReplayCounts, joined, missing
from megarl.options.routing_replay.rank_questions import recorded_routes, replay_counts
from megarl.options.routing_replay.section import routing_of
from megarl.runs.training_side import POLICY, TrainingSide


class RoutingPart(StepPart):
    """Takes the routes that the policy's pass recorded, and says in `routing/...` how much was replayed, how much that changed,
    and which mismatch it takes away."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._compared: dict[str, float] = {}

    def behind_policy_pass(self, roles: TrainingSide, batch: Batch, step: int) -> None:
        if self.config.routing_replay == "old_policy":
            of_rows = joined([answer for answer in roles.ask(POLICY, recorded_routes) if answer is not None])
            batch.take_extra(COLUMN.name, [of_rows.get(row) for row in range(len(batch))])
        every = routing_of(self.config.policy).compare_every
        self._compared = self._compare(roles, batch) if every and step % every == 0 else {}

    def _compare(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        """The mismatch of log-probs that are computed without replay, by a further pass of the policy over the batch."""
        limited = ["live_kept_log_probability"] if self.config.rollout.sampling_limits else []
        collision = ["live_collision"] if self.config.needs_collision else []
        names = ["live_log_probs", "live_entropy", *limited, *collision]
        roles.forward(POLICY, batch, names, extra=False)
        live, *others = (batch.columns.pop(name)[batch.mask] for name in names)
        of_engine = batch.columns["rollout_log_probs"][batch.mask]
        if limited and not self.config.needs_old_log_probs:  # else they are of the kept tokens already
            of_engine = of_engine - others[1]
        sums = mismatch_sums(live, of_engine)
        tokens = max(len(live), 1)
        return {
            f"routing/live_{name}": float(value) if name.endswith("_max") else float(value) / tokens
            for name, value in sums.items()
        }

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        """The share of replayed experts that the router would not choose, of unknown choices, and what was compared."""
        counts = ReplayCounts(*map(sum, zip(*roles.ask(POLICY, replay_counts), strict=True)))
        routes = batch.extra.get(COLUMN.name)
        replayed = {
            "routing/differing": counts.differing / max(counts.replayed, 1),
            "routing/missing": missing(routes) if routes is not None else 1.0,
        }
        return self._compared | replayed


def take_part(config: Config, tokenizer: object) -> RoutingPart | None:
    """The part of a run that replays routes."""
    return RoutingPart(config) if config.routing_replay != "none" else None


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: whether the policy replays routes, and records them."""
    if role != POLICY or config.routing_replay == "none":
        return {}
    return {"replays_routes": True, "records_routes": config.routing_replay == "old_policy"}
