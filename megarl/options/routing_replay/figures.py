"""Figures of routing replay in a step: how much was replayed, how much it changed, and the mismatch that it takes away."""

from __future__ import annotations

from megarl.algorithms import mismatch_sums
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.trainers.run.roles import POLICY, Roles


class RoutingFigures:
    """The metrics `routing/...` of a run; none without replay."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def compare(self, roles: Roles, batch: Batch, step: int) -> dict[str, float]:
        """Every `policy.routing.compare_every` steps: the mismatch of log-probs that are computed without replay.

        Takes a further pass of the policy over the batch.
        """
        every = self.config.policy.routing.compare_every
        if not every or step % every:
            return {}
        limited = ["live_kept_log_probability"] if self.config.rollout.sampling_limits else []
        collision = ["live_collision"] if self.config.needs_collision else []
        names = ["live_log_probs", "live_entropy", *limited, *collision]
        roles.forward(POLICY, batch, names, routed=False)
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

    def replayed(self, roles: Roles, batch: Batch) -> dict[str, float]:
        """Figures of the step's passes: the share of replayed experts that the router would not choose, and of unknown
        choices."""
        if self.config.routing_replay == "none":
            return {}
        counts = roles.take_replay_counts()
        missing = batch.routes.missing() if batch.routes is not None else 1.0
        return {"routing/differing": counts.differing / max(counts.replayed, 1), "routing/missing": missing}
