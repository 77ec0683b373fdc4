"""The trainer's side of a weight update into an SGLang server, for the processes that hold the weights.

The driver opens the update with `SglangEngine.begin_update`; each sender then sends its buckets from its own process; the
driver closes it with `end_update(version, checksums of all senders)`. Synchronous, no SGLang import on a CPU.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from megarl.bearer import bearer
from megarl.errors import EngineError
from megarl.reshard.pieces import Held, Piece
from megarl.reshard.targets import EVERY_RANK
from megarl.rollout.checksums import UNCHECKED, EngineLayout, digest
from megarl.rollout.engine import Bucket
from megarl.rollout.payload import ALIGN_BYTES, SLICED, Staged, Staging

POLL_S = 0.001
ALIVE_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """Where a server is and how it holds weights; can be sent to another process."""

    url: str
    layout: EngineLayout
    token: str = field(repr=False)
    """What the server wants to see in every request."""


class _Sender:
    """What both transports share: `send` for one caller, `deliver` for a caller that stages and hashes for many engines."""

    align_bytes = ALIGN_BYTES
    in_flight = 1

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self._staging: Staging | None = None
        self._checksums: dict[Held, str] = {}

    def pieces(self, bucket: Bucket) -> list[Piece]:
        """What `Staging.stage` must be given of whole weights for this engine."""
        return [Piece(Held.whole(name, weight), weight) for name, weight in bucket]

    def held(self, staged: Staged) -> list[Piece]:
        """What the engine's ranks must hold of what was staged, cut as they hold it."""
        raise NotImplementedError

    def deliver(self, staged: Staged) -> None:
        """Send what has been staged; returns when its buffer may be filled again, or raises EngineError."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when the engine has taken over everything that was delivered, or raise EngineError."""

    def send(self, bucket: Bucket) -> None:
        """Send `bucket`, whole weights, in the engine's dtype; returns when it has taken them over.

        Raises:
            EngineError: no update is open, or the engine refused the weights. A process group is then out of step: close it.
        """
        if not bucket:
            return
        self._staging = self._staging or Staging(1, self.align_bytes)
        staged = self._staging.stage(self.pieces([(name, weight.to(self.endpoint.layout.dtype)) for name, weight in bucket]))
        self._checksums |= taken(self.held(staged))
        self.deliver(staged)
        self.finish()

    def checksums(self) -> dict[Held, str]:
        """Checksums of everything that `send` sent since the last call; ends this sender's part of the update."""
        done, self._checksums = self._checksums, {}
        return done

    def close(self) -> None:
        """Give back what the engine and this process hold for the connection."""


def taken(pieces: Sequence[Piece], values: bool = True) -> dict[Held, str]:
    """The checksums of `pieces`; without `values`, and of what SGLang's own loader cuts, that there is none."""
    return {held: digest(tensor) if values and held.engine_rank != EVERY_RANK else UNCHECKED for held, tensor in pieces}


class TensorSender(_Sender):
    """Sends weights through shared memory (CPU) or CUDA IPC to a server on the same machine, each rank its own slices."""

    in_flight = 2  # the server takes one after the other, in any order, and need not wait for the next to come

    def __init__(self, endpoint: Endpoint, timeout_s: float = 300.0) -> None:
        super().__init__(endpoint, timeout_s)

    def pieces(self, bucket: Bucket) -> list[Piece]:
        """The slices of every rank."""
        return [piece for name, weight in bucket for piece in self.endpoint.layout.pieces(name, weight)]

    def held(self, staged: Staged) -> list[Piece]:
        """What was staged."""
        return [Piece(place.held, place.view(staged.buffer)) for place in staged.places]

    def deliver(self, staged: Staged) -> None:
        """Tell the engine where the staged weights are; returns when it has read them, or raises EngineError."""
        body = {
            "serialized_named_tensors": staged.payloads(self.endpoint.layout.target.ranks),
            "load_format": SLICED,
            "flush_cache": False,  # once, at the end of the update
        }
        call(self.endpoint, "update_weights_from_tensor", body, self.timeout_s)


class DistributedSender(_Sender):
    """Sends weights over a process group of this process (rank 0) and the server's tensor-parallel ranks.

    `backend` is `gloo` on CPU and `nccl` on CUDA. Use as a context manager: leaving it destroys the group on both sides.
    """

    align_bytes = 1  # SGLang's receiving side, whose format is `flattened_bucket`, knows no gaps

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        master_address: str,
        master_port: int,
        backend: str = "gloo",
        group_name: str = "megarl_weights",
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(endpoint, timeout_s)
        self.group_name = group_name
        world_size = 1 + endpoint.layout.target.ranks
        check_alive(endpoint)  # else the rendezvous would wait for a server that is gone
        joining = _Call(
            endpoint,
            "init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": 1,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
            timeout_s,
        )
        self._loading: _Call | None = None
        init_method = f"tcp://{master_address}:{master_port}"
        self._group: Any = _join_group(backend, init_method, world_size, 0, group_name, timeout_s)
        joining.result()

    def held(self, staged: Staged) -> list[Piece]:
        """What each rank cuts from the whole weights."""
        return [piece for name, weight in staged.tensors() for piece in self.endpoint.layout.pieces(name, weight)]

    def deliver(self, staged: Staged) -> None:
        """Broadcast the staged weights to the engine's ranks; returns when they have left, or raises EngineError.

        The engine may still be loading them then: it hears of the next ones meanwhile.
        """
        places = staged.places
        body = {
            "names": [place.held.tensor for place in places],
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in places],
            "shapes": [list(place.shape) for place in places],
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        before, self._loading = self._loading, None
        loading = _Call(self.endpoint, "update_weights_from_distributed", body, self.timeout_s)
        broadcast = torch.distributed.broadcast(staged.buffer, src=0, group=self._group, async_op=True)
        # an engine that refuses, at once or late, never joins the broadcast, which would then wait for its whole timeout
        while not broadcast.is_completed() and not loading.ended_within(POLL_S):
            pass
        loading.raise_if_failed()
        try:
            broadcast.wait()
        except RuntimeError as error:
            raise EngineError(f"{self.endpoint.url} left the process group during a weight update: {error}") from error
        if before is not None:
            before.result()
        self._loading = loading

    def finish(self) -> None:
        """Return when the engine has loaded the last weights, or raise EngineError."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    def close(self) -> None:
        """Destroy the group here and, if it still answers, in the engine."""
        if self._group is not None:
            group, self._group = self._group, None
            try:
                body = {"group_name": self.group_name}
                call(self.endpoint, "destroy_weights_update_group", body, self.timeout_s)
            finally:
                torch.distributed.destroy_process_group(group)

    def __enter__(self) -> DistributedSender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_alive(server: Endpoint) -> None:
    """Return if the server answers, else raise EngineError."""
    try:
        question = urllib.request.Request(f"{server.url}/model_info", headers=bearer(server.token))
        urllib.request.urlopen(question, timeout=ALIVE_S).close()
    except OSError as error:
        raise EngineError(f"{server.url} does not answer: {error}") from error


def call(server: Endpoint, what: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """POST `body` to the path `what` of the server and return its answer.

    Raises:
        EngineError: naming the URL and what it answered.
    """
    url = f"{server.url}/{what}"
    headers = {"Content-Type": "application/json", **bearer(server.token)}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = response.read()
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:1000]}") from error
    except OSError as error:
        raise EngineError(f"{url} did not answer: {error}") from error
    try:
        return dict(json.loads(answer))
    except ValueError:
        return {"text": answer.decode(errors="replace")}


class _Call:
    """A request under way in a thread, for calls that the engine answers only after this process has done its part."""

    def __init__(self, server: Endpoint, what: str, body: dict[str, Any], timeout_s: float) -> None:
        self._error: EngineError | None = None
        self._thread = threading.Thread(target=self._run, args=(server, what, body, timeout_s), daemon=True)
        self._thread.start()

    def _run(self, server: Endpoint, what: str, body: dict[str, Any], timeout_s: float) -> None:
        try:
            call(server, what, body, timeout_s)
        except EngineError as error:
            self._error = error

    def ended_within(self, wait_s: float) -> bool:
        """Whether the call has been answered, or has failed, within `wait_s` seconds."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def raise_if_failed(self) -> None:
        """Raise the call's EngineError if there is one by now."""
        if self._error is not None:
            raise self._error

    def result(self) -> None:
        """Wait for the answer; raises EngineError if it is one."""
        self._thread.join()
        self.raise_if_failed()


def _join_group(
    backend: str, init_method: str, world_size: int, rank: int, group_name: str, timeout_s: float
) -> torch.distributed.ProcessGroup:
    """A process group beside the default one, made as SGLang's init_custom_process_group makes its side of it."""
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(c10d.rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=group_name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
