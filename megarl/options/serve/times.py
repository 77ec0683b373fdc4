"""The line of `megarl plan` on the models of a server."""

from __future__ import annotations

from megarl.planning.memory import precision_of, role_memory, workload
from megarl.planning.plan import CapacityPlan


def stated(plan: CapacityPlan) -> list[str]:
    """Say what one model takes, and all that are live; nothing of a run that is no server."""
    policy, engines = plan.run.roles[0], plan.run.engines
    if not policy.kept_models or engines is None:
        return []
    precision = precision_of(plan.run, plan.gpu)
    memory = role_memory(policy, 0, precision, workload(plan.run, policy, precision, plan.lengths))
    one = policy.parameters[0].trained * precision.itemsize + memory.parts["gradients"] + memory.parts["optimizer"]
    of_engine = engines.kept_bytes / engines.kept_models
    return [
        f"A model at the highest rank takes {one / 1e9:,.3g} GB of a rank's main memory (adapters, gradients, moments) and "
        f"{of_engine / 1e9:,.3g} GB of that of an engine's rank; {policy.kept_models} live ones take "
        f"{policy.kept_models * one / 1e9:,.3g} and {engines.kept_bytes / 1e9:,.3g} GB",
        f"An engine adds the adapters of {engines.adapter_places - 1} models in one pass, from places on its GPU",
    ]
