"""Weights over process groups (`rollout.weight_transport: process_group`): a training rank's side of an engine's group.

The engine's side is `group_ranks.py`, and the groups are in `engine_group.py`.
"""

from __future__ import annotations

import contextlib
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import groupby
from typing import Any

import torch

from megarl.config.secrets import bearer
from megarl.errors import EngineError
from megarl.system.http_requests import open_url
from megarl.weights.engine_group import EngineGroup, Groups, Turns, in_a_thread, leave, start_sending, steps_of, together
from megarl.weights.intake import PutBefore, give_up
from megarl.weights.payloads import joining, receiving
from megarl.weights.rank_plan import WeightSlice
from megarl.weights.sglang_senders import POLL_S, ServerEndpoint, ServerSender, put_before
from megarl.weights.staging import BUFFERS, StagedSlices, Staging, ZeroCopy, dtype_name, pack, packed_starts, serialize

OTHERS_POLL_S = 0.02
"""How often senders that wait for an answer to another one look for it."""
FAILED_POLL_S = 0.02
"""How often senders look whether an engine that they send to has failed."""
ALIVE_S = 30.0
AHEAD_BYTES = {"cpu": sys.maxsize, "cuda": 2**30}
"""By device the bytes given to a process group that the engine need not have received yet, at most; beside one message.

On a CPU they are read where they lie, and a sender that must wait before it gives the next ones slows a transfer by a fifth. On
a GPU what has arrived is looked for every `engine_group.POLL_S`, in which NVLink moves up to half a gigabyte: an estimate, not
measured.
"""
COPIED_BYTES = 64 * 2**20
"""How many of these bytes may be copies made on the way, which take memory: a rank may send to many engines at once."""
SMALL_BYTES, TOGETHER_BYTES = {"cpu": 2**16, "cuda": 2**20}, 8 * 2**20
"""Pieces smaller than the first travel together, in messages of about the second: each message takes time of its own. On a CPU
that is less than to copy the pieces takes, on both sides, unless they are small.
"""

SliceMessage = Sequence[WeightSlice]
InSteps = Sequence[tuple[int, SliceMessage]]
"""Messages in order, each with its step (`engine_group.steps_of`)."""


class GroupSender(ServerSender):
    """Sends each rank of an engine its own slices over the engine's process group, which all of its senders are in.

    The values go from where they lie to where the rank holds them; small ones and columns cut from a matrix are copied.
    As a context manager it closes when left.
    """

    waits_for_others = True

    def __init__(
        self,
        endpoint: ServerEndpoint,
        *,
        connection: int = 0,
        number: int = 0,
        senders: int = 1,
        backend: str = "gloo",
        device: torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """The `number`-th of the engine's `senders`, with its weights on `device`. `backend`: `gloo` on CPU, `nccl` on CUDA.

        `connection` tells the engine's groups apart: all senders name the same, and no group has had it before.
        """
        super().__init__(endpoint, timeout_s)
        check_alive(endpoint)
        ranks = endpoint.layout.target.ranks
        self._wanted = EngineGroup(str(connection), *endpoint.store, senders, ranks, backend, timeout_s)
        self._number, self._device = number, device
        self._store = self._wanted.store()
        self._groups: Groups | None = None
        self._calls = 0

    def staging(self, name: str, buffers: int = BUFFERS) -> Staging | ZeroCopy:
        """Pieces stay where they are."""
        return ZeroCopy()

    def join(self) -> None:
        """Join the engine's group with its other senders, of whom the first has the engine do so.

        Raises:
            EngineError: the engine did not; every sender hears why.
        """
        if self._groups is not None:
            return
        with self._telling_others():
            self._join()

    @contextlib.contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Have the engine's other senders hear of an error: its ranks take nothing until all senders have begun."""
        try:
            yield
        except EngineError as error:
            give_up(self._store, f"{error}")
            raise

    def _join(self) -> None:
        group, ranks = self._wanted, range(self._wanted.ranks)
        join_call = None
        if self._number == 0:
            payloads = [serialize(joining(group, rank)) for rank in ranks]
            try:
                join_call = put_before(self.endpoint, payloads, self.timeout_s)
            except EngineError as error:
                self._store.set(group.failed, f"{error}")
                raise
        try:
            self._wait_for([group.joining(rank) for rank in ranks], join_call)
        except EngineError as error:
            if join_call is not None:
                self._store.set(group.failed, f"{error}")
            raise
        try:
            self._groups = group.join(self._store, self._number, self._device)
        except RuntimeError as error:
            raise EngineError(f"{self.endpoint.url} did not join the process group of its senders: {error}") from error
        if join_call is not None:
            join_call.result()

    def _wait_for(self, keys: Sequence[str], asked: PutBefore | None) -> None:
        """Wait until the engine's ranks have set `keys` in the store, in answer to this process or to another sender.

        Raises:
            EngineError: they did not.
        """
        ends_at = time.monotonic() + self.timeout_s
        while not self._store.check(list(keys)):
            if asked is not None:
                if asked.ended():
                    asked.raise_if_failed()
                    raise EngineError(f"{self.endpoint.url} answered an update before it had asked for the weights")
                time.sleep(POLL_S)
            else:
                if self._store.check([self._wanted.failed]):
                    raise EngineError(self._store.get(self._wanted.failed).decode())
                time.sleep(OTHERS_POLL_S)
            if time.monotonic() > ends_at:
                raise EngineError(f"{self.endpoint.url} did not join the process group within {self.timeout_s:g} s")

    def deliver(self, staged: StagedSlices) -> None:
        """Send the weights; returns when the engine has them, or raises EngineError. Then it is out of step: close it.

        All of the engine's senders must call it as often, if with nothing: its ranks take what all of them send.
        """
        self.join()
        with self._telling_others():
            self._deliver(staged)

    def _deliver(self, staged: StagedSlices) -> None:
        ranks = range(self.endpoint.layout.target.ranks)
        pieces: dict[int, list[WeightSlice]] = {rank: [] for rank in ranks}
        for piece in staged.pieces:
            for rank in piece.held.ranks(len(ranks)):
                pieces[rank].append(piece)
        of_ranks = {rank: _in_steps(list(_messages(some))) for rank, some in pieces.items()}
        announced = [self._announced(rank, of_ranks[rank], checked=staged.checked) for rank in ranks]
        loading = put_before(self.endpoint, announced, self.timeout_s)
        keys = [self._wanted.ready(self._number, self._calls, rank) for rank in of_ranks]
        self._wait_for(keys, loading)
        for key in keys:
            self._store.delete_key(key)
        self._calls += 1
        sent = in_a_thread(partial(self._send_from_a_thread, of_ranks))  # it waits for the engine in a way that cannot be left
        while not wait([sent], FAILED_POLL_S).done:  # an engine that fails, but lives, is not waited for until the timeout
            if loading.ended():
                loading.raise_if_failed()
        try:
            sent.result()
        except RuntimeError as error:
            raise EngineError(f"{self.endpoint.url} left the process group during a weight update: {error}") from error
        loading.result()

    def _announced(self, rank: int, messages: InSteps, *, checked: bool) -> str:
        """The payload that tells `rank` what comes."""
        content = []
        for step, message in messages:
            starts = packed_starts(message)[:-1]
            pieces = [
                (*piece.held, dtype_name(piece.tensor), start, start + piece.tensor.nbytes)
                for piece, start in zip(message, starts, strict=True)
            ]
            content.append((step, pieces))
        return serialize(receiving(self._wanted, self._number, self._calls, rank, content, checked=checked))

    def _send_from_a_thread(self, of_ranks: Mapping[int, InSteps]) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._send(of_ranks)

    def _send(self, of_ranks: Mapping[int, InSteps]) -> None:
        """Hand every rank its messages, step by step, the ranks in turn; raises RuntimeError."""
        assert self._groups is not None, "it has joined"
        under_way: deque[tuple[Any, int]] = deque()
        turns = {rank: Turns(self._groups) for rank in of_ranks}
        nbytes = copied = 0
        first = self._number % max(1, len(of_ranks))  # so that not all senders begin at the same rank
        in_turn = [*of_ranks.items()][first:] + [*of_ranks.items()][:first]
        all_messages = [(step, rank, message) for rank, messages in in_turn for step, message in messages]
        all_messages.sort(key=lambda entry: entry[0])
        for _, of_step in groupby(all_messages, key=lambda entry: entry[0]):
            with together(self._groups, self._device) as begun:
                for _, rank, message in of_step:
                    values = _values(message)
                    begun.append(start_sending(values, turns[rank].group_for(values.nbytes), self._wanted.senders + rank))
                    under_way.append((begun[-1], 0 if _lies_alone(message) else values.nbytes))
                    nbytes, copied = nbytes + values.nbytes, copied + under_way[-1][1]
            while under_way and (nbytes > AHEAD_BYTES[values.device.type] or copied > COPIED_BYTES):
                sending, of_copy = under_way.popleft()
                sending.wait()
                nbytes, copied = nbytes - sending.nbytes, copied - of_copy
        for sending, _ in reversed(under_way):  # those before the last ones have then arrived, and need no waking up
            sending.wait()

    def close(self) -> None:
        """Leave the group; the engine drops its side when senders connect anew."""
        groups, self._groups = self._groups, None
        if groups is not None:
            leave(groups)

    def __enter__(self) -> GroupSender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _messages(pieces: Sequence[WeightSlice]) -> Iterator[SliceMessage]:
    """Pieces as they travel: large ones alone, small ones together."""
    small: list[WeightSlice] = []
    nbytes = 0
    for piece in pieces:
        if piece.tensor.nbytes >= SMALL_BYTES[piece.tensor.device.type]:
            yield [piece]
            continue
        small.append(piece)
        nbytes += piece.tensor.nbytes
        if nbytes >= TOGETHER_BYTES:
            yield small
            small, nbytes = [], 0
    if small:
        yield small


def _in_steps(messages: Sequence[SliceMessage]) -> InSteps:
    """Messages to one rank, each with its step."""
    return list(zip(steps_of([packed_starts(message)[-1] for message in messages]), messages, strict=True))


def _values(message: SliceMessage) -> torch.Tensor:
    """The tensor that travels: the only piece where it lies, if it lies in one block, or a copy of all."""
    first = message[0].tensor.detach()
    if _lies_alone(message):
        return first
    buffer = torch.empty(packed_starts(message)[-1], dtype=torch.uint8, device=first.device)
    pack(message, buffer)
    return buffer


def _lies_alone(message: SliceMessage) -> bool:
    return len(message) == 1 and message[0].tensor.is_contiguous()


def check_alive(server: ServerEndpoint) -> None:
    """Return if the server answers, else raise EngineError."""
    try:
        question = urllib.request.Request(f"{server.url}/model_info", headers=bearer(server.token))
        open_url(question, ALIVE_S).close()
    except OSError as error:
        raise EngineError(f"{server.url} does not answer: {error}") from error
