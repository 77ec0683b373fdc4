"""Ranks whose routers send every token where `crooked_engine.py` sends it, without replay. Named as `model.architecture`,
which every rank imports before it builds a model."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from megarl.models import qwen3_moe
from megarl.models.architecture import Architecture


class NextExperts:
    """In the place of megatron-core's `RouterReplay`: the expert after each one that the router would choose."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        _, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        others = (chosen + 1) % scores.shape[1]
        return scores.gather(1, others), others


def bend_routers() -> None:
    """Have every router that this process builds from here on choose the next experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    begin: Any = TopKRouter.__init__

    def begin_bent(router: Any, *given: Any, **named: Any) -> None:
        begin(router, *given, **named)
        router.router_replay = NextExperts()

    TopKRouter.__init__ = begin_bent  # type: ignore[method-assign]


if "megarl.workers.rank" in sys.modules:  # neither the driver nor an engine imports it
    bend_routers()

ARCHITECTURE = Architecture(
    name="of_crooked_ranks",  # no model is of it
    hf_classes=("CrookedForCausalLM",),
    transformer_config_kwargs=qwen3_moe.ARCHITECTURE.transformer_config_kwargs,
    gpt_kwargs=qwen3_moe.ARCHITECTURE.gpt_kwargs,
    weight_map=qwen3_moe.ARCHITECTURE.weight_map,
)
