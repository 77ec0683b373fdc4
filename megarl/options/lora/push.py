"""The update of engines that add adapters themselves: a rank sends these alone."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.megatron.rank_model import RankModel
from megarl.megatron.weights import adapter_shards, local_shards
from megarl.weights.merged_pushes import merge
from megarl.weights.pusher import Pushed
from megarl.workers.rank import Rank


def push_adapters(rank: Rank, policy: RankModel, bases: Mapping[int, int | None], *, verify: bool) -> dict[int, Pushed]:
    """Send adapters. Engines that have none yet must hold the weights beside them: of these they are sent checksums."""
    assert rank.pusher is not None, "who has a plan has opened senders"
    weights, adapters = rank.parts
    own_bases = dict.fromkeys(rank.engines & bases.keys())
    shards = adapter_shards(policy.chunks, policy.weight_map)
    pushed = [adapters.push(rank.pusher, shards, own_bases, bases, None, verify=verify)]
    if new := [engine for engine, base in bases.items() if base is None]:
        weight_shards = local_shards(policy.chunks, policy.options, policy.weight_map, at_once=False, merged=False)
        pushed.append(weights.checksums(weight_shards, new))
    return merge(pushed)
