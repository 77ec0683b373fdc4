"""Senders for a training rank's pusher: to an SGLang server, or to the Ray actor of an engine without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.errors import EngineError
from megarl.option_list import part
from megarl.rollout.engines.protocol import Engine
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.plan import ReshardPlan, bucket_of_load, plan_of_map, plan_reshard
from megarl.weights.pusher import Sender
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.sglang_senders import ServerEndpoint, TensorSender
from megarl.weights.staging import StagedSlices, Staging
from megarl.workers.engine_calls import submit

if TYPE_CHECKING:
    from megarl.megatron.weights import Quantiser

SendTarget = Any
"""An SGLang server's `ServerEndpoint`, or the Ray handle of an actor that holds an engine without a server."""


class SentTensor:
    """A tensor of any type and place, which unpickles as a tensor of its own, in main memory.

    As torch pickles a tensor, a process that reads one of a rank's needs megarl's megatron-core (0.19 puts a function of its in
    the pickle), float8 is refused, and the values are copied into the message instead of lying beside it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        flat = self.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor_of, (flat.numpy(), self.tensor.dtype, tuple(self.tensor.shape))


def _tensor_of(values: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose bytes are a copy of `values`, which may be read-only."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = values
    return tensor


class ActorSender:
    """Sends through the engine's actor; the engine itself takes the checksums."""

    in_flight = 1
    waits_for_others = False
    is_checked = False

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def staging(self, name: str) -> Staging:
        """Buffers of this process."""
        return Staging(name=name)

    def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[WeightSlice]:
        """Whole tensors."""
        return [WeightSlice(SliceKey.whole(name, tensor), tensor) for name, tensor in bucket]

    def join(self) -> None:
        """There is nothing to join."""

    def deliver(self, staged: StagedSlices) -> None:
        """Hand the tensors to the engine by way of Ray's object store."""
        sent: Any = [(name, SentTensor(tensor)) for name, tensor in staged.tensors()]
        try:
            ray.get(submit(self.actor, Engine.apply_update, sent))
        except ray.exceptions.RayError as error:
            raise EngineError(f"the engine's actor did not take the weights: {error}") from error

    def close(self) -> None:
        """Nothing is held."""


def model_of(target: SendTarget) -> ServedModel | None:
    """The model that an engine serves; None: that cannot be asked, or it does not matter to it."""
    if isinstance(target, ServerEndpoint):
        return target.layout.model
    try:
        facts: ServedModel | None = ray.get(target.model.remote())
    except ray.exceptions.RayError:  # what is sent to it next will say so
        return None
    return facts


@dataclass(frozen=True)
class Membership:
    """The place of a rank among an engine's senders, in process groups: the `number`-th of `senders`, with its weights
    on `device`.

    `connection` tells an engine's groups apart; all of its senders name the same.
    """

    connection: int = 0
    number: int = 0
    senders: int = 1
    backend: str = "gloo"
    device: torch.device | None = None


def open_sender(target: SendTarget, transport: str, member: Membership, timeout_s: float = 300.0) -> Sender:
    """The sender for `target`. `transport` is `shared_memory`, `process_group` or `rdma`.

    An engine that has not answered after `timeout_s` seconds has failed.
    """
    if not isinstance(target, ServerEndpoint):
        return ActorSender(target)
    if transport == "shared_memory":
        return TensorSender(target, timeout_s)
    if transport == "rdma":
        sender: Sender = part("transports", "sender", "rollout.weight_transport").ReadSender(target, timeout_s)
        return sender
    from megarl.weights.group_sender import GroupSender  # where no group is made, nothing of one is imported

    return GroupSender(target, **vars(member), timeout_s=timeout_s)


def plans_for(target: SendTarget, trainer: ServedModel, layout: Layout, engines: int, load_bytes: int) -> list[ReshardPlan]:
    """Plan how ranks in `layout` send their slices to `engines` servers like `target`, in loads of at most `load_bytes`.

    The plan of the weights and, where adapters are sent, that of these; none if the engines take whole tensors only.
    """
    if not isinstance(target, ServerEndpoint):
        return []
    to = replace(target.layout.target, engines=engines)
    itemsize = target.layout.dtype.itemsize
    bucket_bytes = bucket_of_load(load_bytes, to)
    weights = plan_reshard(
        dict(trainer.config),
        layout,
        to,
        itemsize=itemsize,
        bucket_bytes=bucket_bytes,
        format=target.layout.model.format,
        predicts=trainer.predicts,
    )
    if trainer.lora is None:
        return [weights]
    return [weights, plan_of_map(trainer.adapter_map, layout, to, weights.padded_vocab, itemsize, bucket_bytes)]


def quantiser_for(target: SendTarget) -> Quantiser | None:
    """The quantiser that makes an engine's weights of the trainer's, if it serves them in few bits; None: they are sent
    as they are."""
    model = target.layout.model if isinstance(target, ServerEndpoint) else model_of(target)
    format = model.format if model is not None else None
    if format is None:
        return None
    quantiser: Quantiser = part("few_bits", "quantise", f"an engine that serves {format.name}").FormatQuantiser(format)
    return quantiser
