"""Routing replay: the routers of a role take the experts that the stream says, and their weights from what they score now.

megarl's own in the place of megatron-core's `RouterReplay`, which keeps the layers of all roles of a process in one list, knows
no token without a choice, and must be told whether a call belongs to a forward pass or to recomputation. The place is the same
in 0.16.1 and 0.19.2: a router gives its scores to `router_replay.get_replay_topk`, and computes what follows (a softmax over
the chosen, a sigmoid's normalisation, scaling) from the values at the experts that it is given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config
from torch import Tensor

from megarl.data.stream import MicroBatch, PackedStream, StreamShard
from megarl.megatron.model_config import has_experts
from megarl.megatron.options import ModelOptions
from megarl.megatron.pass_parts import PassPart
from megarl.options.routing_replay.column import COLUMN, RecordedRoutes, ReplayCounts, compact

ComputeTopK = Callable[..., tuple[Tensor, Tensor]]


class RoutingReplay(PassPart):
    """What all routers of a role's model chunks on this rank replay and record."""

    def __init__(self, chunks: Sequence[torch.nn.Module], options: ModelOptions) -> None:
        """Take over the routers of `chunks`."""
        config: Any = get_model_config(chunks[0])
        expert_layers = [layer for layer in range(config.num_layers) if has_experts(config, layer)]
        self.layout, self.num_experts = options.layout, int(config.num_moe_experts)
        self.routes: Tensor | None = None
        """`[n, layers, k]` of this rank's tokens of the micro-batch whose forward pass runs; None: they are routed live."""
        self.is_forward = self.is_training = self.is_recording = False
        self._records = options.records_routes
        self._streams: Sequence[tuple[PackedStream, StreamShard]] = ()
        self.layers: list[RouterLayer] = []
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter) and "mtp" not in name.split("."):
                    assert module.layer_number is not None
                    self.num_experts = int(module.num_experts)  # LongCat-Flash's are more than those that compute something
                    module.router_replay = RouterLayer(self, expert_layers.index(module.layer_number - 1))
                    self.layers.append(module.router_replay)

    def joins(self, *, training: bool) -> bool:
        self.is_training = training
        return True

    def begin(self, streams: Sequence[tuple[PackedStream, StreamShard]], given: Sequence[Any]) -> None:
        self.is_recording = self._records and not self.is_training and all(routes is None for routes in given)
        self._streams = streams if self.is_recording else ()
        for layer in self.layers:
            layer.waiting.clear()
            layer.recorded.clear()

    @contextmanager
    def forward(self, model: Any, given: Tensor | None) -> Iterator[None]:
        """Give routers the routes of a micro-batch; outside of this a layer is computed anew, with routes that were kept."""
        self.routes, self.is_forward = given, True
        try:
            yield
        finally:
            self.routes, self.is_forward = None, False

    def take_counts(self) -> ReplayCounts:
        """The counts since the last call."""
        counts = [layer.counts for layer in self.layers if layer.counts is not None]
        for layer in self.layers:
            layer.counts = None
        return ReplayCounts(*torch.stack(counts).sum(0).tolist()) if counts else ReplayCounts()

    def recorded(self) -> RecordedRoutes | None:
        """What the last pass recorded of its responses, on the first tensor and context rank of the stage; the others get None.

        A collective of the stage's tensor and context ranks.
        """
        by_layer = sorted(self.layers, key=lambda layer: layer.place)
        rows: list[int] = []
        parts: list[Tensor] = []
        for number, (stream, share) in enumerate(self._streams):
            local_routes = torch.stack([layer.recorded[number] for layer in by_layer], dim=1)
            whole = self._gathered(local_routes, stream, share)
            for (row, _, _), laid in zip(stream.owners, stream.laid, strict=True):
                if row < 0:  # what fills up a round of micro-batches
                    continue
                rows.append(row)
                parts.append(whole[laid.places.to(whole.device)])
        if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank() or not parts:
            return None
        return RecordedRoutes(
            np.array(rows, np.int64),
            np.array([len(part) for part in parts], np.int64),
            tuple(layer.place for layer in by_layer),
            compact(torch.cat(parts).cpu().numpy(), self.num_experts),
        )

    def _gathered(self, mine: Tensor, stream: PackedStream, share: StreamShard) -> Tensor:
        """`[S, layers, k]` of the whole stream from this rank's tokens."""
        if self.layout.sequence_parallel:
            mine = _joined(mine, parallel_state.get_tensor_model_parallel_group())
        if self.layout.cp == 1:
            return mine
        of_ranks = _joined(mine, parallel_state.get_context_parallel_group())
        whole = torch.empty_like(of_ranks)
        whole[share.layout.flatten()] = of_ranks
        return whole

    def lay(self, units: MicroBatch, stream: PackedStream, share: StreamShard, device: torch.device) -> Tensor | None:
        """`[n, layers, k]`: of a stream's routes, those of the tokens that this rank's routers see."""
        routes = stream.extra.get(COLUMN.name)
        if routes is None:
            return None
        local_routes = routes[share.positions].to(device)
        if not self.layout.sequence_parallel:
            return local_routes
        return local_routes.chunk(self.layout.tp)[parallel_state.get_tensor_model_parallel_rank()]


def _joined(mine: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Gather what the ranks of `group` have, each as much, one after the other. As bytes: NCCL knows no int16."""
    of_ranks = mine.new_empty(len(mine) * group.size(), *mine.shape[1:])
    torch.distributed.all_gather_into_tensor(of_ranks.view(torch.uint8), mine.contiguous().view(torch.uint8), group=group)
    return of_ranks


class RouterLayer:
    """One router's part, in the place of megatron-core's `RouterReplay`; `place` is its layer's among those with experts."""

    def __init__(self, replay: RoutingReplay, place: int) -> None:
        self.replay, self.place = replay, place
        self.waiting: deque[Tensor | None] = deque()
        """Of micro-batches whose activations will be computed anew. A chunk's backward passes come in the order of its forward
        passes, in every one of megatron-core's schedules that megarl runs."""
        self.recorded: list[Tensor] = []
        self.counts: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Values and experts `[n, k]` for `scores` `[n, E]`: the replayed ones where they are known, else the live choice."""
        assert default_compute_topk is not None
        replayed = self._wanted()
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if replayed is None:
            chosen = live
        else:
            if replayed.shape != live.shape:
                raise ValueError(f"routes are of {list(replayed.shape)} choices, but the router makes {list(live.shape)}")
            is_known = replayed[:, :1] != torch.iinfo(replayed.dtype).max
            chosen = torch.where(is_known, replayed.long(), live)
            values = scores.gather(1, chosen)
            if self.replay.is_forward:
                differs = is_known & (chosen[:, :, None] != live[:, None, :]).all(-1)
                counted = torch.stack([is_known.sum() * topk, differs.sum()])
                self.counts = counted if self.counts is None else self.counts + counted
        if self.replay.is_recording:
            self.recorded.append(chosen.to(torch.int16))  # of every layer until the pass ends
        return values, chosen

    def _wanted(self) -> Tensor | None:
        replay = self.replay
        if not replay.is_forward:
            return self.waiting.popleft()
        replayed = None if replay.routes is None else replay.routes[:, self.place]
        if replay.is_training and not torch.is_grad_enabled():  # so checkpointed activations are computed the first time
            self.waiting.append(replayed)
        return replayed


def take_part(chunks: Sequence[torch.nn.Module], options: ModelOptions) -> RoutingReplay | None:
    """The replay of a role that replays routes."""
    return RoutingReplay(chunks, options) if options.replays_routes else None
