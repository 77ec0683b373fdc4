"""The line of `megarl plan` on the choices of keys that engines report."""

from __future__ import annotations

from megarl.options.sparse_attention.section import indexer_of
from megarl.planning.plan import CapacityPlan


def stated(plan: CapacityPlan) -> list[str]:
    """Say what the choices of a token take, and those of a step; nothing of a run that replays none."""
    indexer, lengths = plan.run.roles[0].shape.indexer, plan.lengths
    if indexer is None or indexer_of(plan.run.config.policy).replay == "none":
        return []
    longest = plan.run.config.longest_sequence
    of_token = indexer.layers * -(-longest // 8)
    of_step = of_token * lengths.samples * (lengths.prompt + lengths.response)
    return [
        f"Chosen keys take {of_token / 1e3:,.3g} kB of a token, a bit for each of {longest:,} in {indexer.layers} layers: "
        f"{of_step / 1e9:,.3g} GB of a step in the main memory of the driver"
    ]
