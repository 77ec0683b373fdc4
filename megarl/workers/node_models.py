"""Models of the Hugging Face hub on every node of a run, each at the same path, before the first process looks for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.errors import ClusterError
from megarl.system.hub import CachedModel
from megarl.weights.placement import Bundle


def download_on_nodes(group: PlacementGroup, bundles: Sequence[Bundle], models: Sequence[CachedModel]) -> None:
    """Have each node of the reservation `group` download what it lacks of `models`, all nodes at the same time.

    Without a deadline: how long a download takes is not known, and one that stalls is ended by the hub's library.

    Raises:
        ClusterError: a node has no copy and cannot download one.
    """
    from huggingface_hub import constants, get_token

    first = {bundle.node: number for number, bundle in reversed([*enumerate(bundles)])}
    offline = {"HF_HUB_OFFLINE": os.environ["HF_HUB_OFFLINE"]} if "HF_HUB_OFFLINE" in os.environ else {}
    task: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": offline})(_why_not)
    endpoint, token = constants.ENDPOINT, get_token()  # as arguments: environments of tasks are shown in Ray's dashboard
    downloads = {
        (node, model): task.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        ).remote(model, endpoint, token)
        for node, number in first.items()
        for model in models
    }
    for (node, model), why in zip(downloads, ray.get([*downloads.values()]), strict=True):
        if why is not None:
            raise ClusterError(
                f"node {node} has no copy of {model.repo} at {model.folder} and cannot download it ({why}); let HF_HOME be on "
                "a file system that all nodes see, or give the nodes a network"
            )


def _why_not(model: CachedModel, endpoint: str, token: str | None) -> str | None:
    """Download `model` here; the reason if that is impossible. Exceptions of the hub's library do not survive the way back."""
    try:
        model.download(endpoint, token)
    except Exception as error:  # noqa: BLE001
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
