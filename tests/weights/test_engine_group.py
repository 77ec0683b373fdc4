"""Weights over process groups: from where a sender holds them to where a rank of an engine does, without SGLang."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

from megarl.errors import EngineError
from megarl.weights import group_ranks, group_sender, sglang_loader
from megarl.weights.checksums import EngineLayout, digest, digests
from megarl.weights.engine_group import CONNECTIONS, STEPS, EngineGroup, Turns, steps_of
from megarl.weights.group_sender import GroupSender, _in_steps
from megarl.weights.intake import OPEN, Intake
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.payloads import receiving, taking
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.received import ReceivedBoxes
from megarl.weights.sglang_senders import ServerEndpoint
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.staging import StagedSlices
from tests.weights.test_sglang_loader import Model, asked
from tests.world import World

Q, K, V = (torch.arange(8.0 * rows).reshape(rows, 8) + 100 * rows for rows in (4, 2, 2))
NORM = torch.arange(8.0)
OUT = torch.arange(24.0).reshape(3, 8)
MATRICES = (("q", Q), ("k", K), ("v", V))
EXPERT = torch.arange(12.0).reshape(3, 4)


def endpoint(store: tuple[str, int]) -> ServerEndpoint:
    """An engine of two ranks, with its store at an address."""
    layout = EngineLayout(ServedModel({}, "float32"), EngineTarget(tp=2))
    return ServerEndpoint("http://engine", layout, "token", store)


class Answered:
    """Payloads that an engine's ranks take: `already`, or not before the values are there."""

    def __init__(self, already: bool = False) -> None:
        self._already = already

    def ended(self) -> bool:
        """Whether there is an answer."""
        return self._already

    def raise_if_failed(self) -> None:
        """It is a good one."""

    def result(self) -> None:
        """It took them."""


class Owner:
    """Opens and ends updates of an engine of `ranks`, in one of the processes of its senders."""

    def __init__(self, address: tuple[str, int], ranks: int) -> None:
        self._address, self._ranks = address, ranks
        self._store = TCPStore(*address, is_master=False)

    def begins(self, number: int) -> None:
        """Senders may send from here on."""
        self._store.set(OPEN, str(number))

    def ends(self, number: int) -> None:
        """The ranks leave."""
        for rank in range(self._ranks):
            Intake(number, self._address, "token", 30).put(self._store, rank, b"")


def takes(model: Model, address: tuple[str, int], number: int, rank: int) -> str:
    """Take an update as a rank of the engine; what the rank says when it leaves."""
    intake = Intake(number, address, "token", 30)
    sglang_loader.load(model, taking(intake, rank))
    return TCPStore(*address, is_master=False).get(intake.left(rank)).decode()


def pieces_of(sender: int, factor: int) -> list[WeightSlice]:
    """What one of two senders has for the two ranks of an engine, which hold four columns of each matrix."""
    if sender == 1:
        return [
            WeightSlice(SliceKey("x.o_proj.weight", rank, 3, 0, col, 3, 4), (factor * OUT)[:, col : col + 4])
            for rank in range(2)
            for col in (4, 0)  # halves that lie on two ranks of the trainer
        ]
    pieces = [WeightSlice(SliceKey.whole("x.experts.0.up_proj.weight", EXPERT), factor * EXPERT)]
    for rank in range(2):
        pieces.append(WeightSlice(SliceKey("x.norm.weight", rank, 8, 0, 0, 8, 1), (factor * NORM).bfloat16()))
        for name, matrix in MATRICES:
            held = SliceKey(f"x.self_attn.{name}_proj.weight", rank, len(matrix), 0, 0, len(matrix), 4)
            pieces.append(WeightSlice(held, factor * matrix[:, 4 * rank : 4 * rank + 4]))
    return pieces


def sends(number: int, address: tuple[str, int]) -> int:
    """Two connections in turn; over each, two updates of both senders. How many groups were made over the first one."""
    owner, updates, made = Owner(address, 2), iter(range(1, 100)), 0
    with mock.patch.object(group_sender, "check_alive"):
        for connection in range(2):
            before = c10d._world.group_count
            with GroupSender(endpoint(address), connection=connection, number=number, senders=2, timeout_s=30) as sender:
                for factor in (1, 2):
                    update = next(updates)
                    if number == 0:
                        owner.begins(update)
                    torch.distributed.barrier()
                    # first all together, then each alone
                    with mock.patch.object(group_sender, "SMALL_BYTES", {"cpu": 2**20 if factor == 1 else 0}):
                        sender.deliver(StagedSlices(pieces_of(number, factor)))
                    torch.distributed.barrier(SENDERS)
                    if number == 0:
                        owner.ends(update)
                    torch.distributed.barrier()
                made = made or len([name for name in list(c10d._world.pg_names.values()) if "megarl_weights" in name])
            assert c10d._world.group_count == before
    return made


def receives(rank: int, address: tuple[str, int]) -> list[dict[str, Tensor]]:
    """What rank `rank` of the engine holds after each update."""
    found = []
    sglang_loader._boxes.take(since_base=False)  # of other tests in this process
    model = Model(x__self_attn__qkv_proj__weight=(8, 4), x__norm__weight=(8,), x__o_proj__weight=(3, 8))
    for update in range(1, 5):
        torch.distributed.barrier()
        assert not takes(model, address, update, rank)
        assert len(group_ranks._groups) == 1  # of a connection that was replaced nothing is kept
        found.append({name: value.detach().clone() for name, value in [*model.parameters.items(), *model.loaded]})
        noted = {held for held, _ in sglang_loader._boxes.take(since_base=False)}
        assert noted == {piece.held for number in range(2) for piece in pieces_of(number, 1) if piece.held.engine_rank == rank}
        torch.distributed.barrier()
    return found


SENDERS: Any = None
"""The group of the ranks that send."""


def played(rank: int, world_size: int) -> Any:
    """Ranks 0 and 1 send, the others are the engine; the first keeps its store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [("127.0.0.1", store.port) if store is not None else None]
    torch.distributed.broadcast_object_list(address, src=0)
    assert address[0] is not None
    global SENDERS
    SENDERS = torch.distributed.new_group([0, 1])
    answer = receives(rank - 2, address[0]) if rank > 1 else sends(rank, address[0])
    torch.distributed.barrier()
    return answer


def test_slices_of_two_senders_arrive_in_each_rank_over_one_group_and_over_new_connections_too(world: World) -> None:
    first, second, *ranks = world.call(played, size=4)
    assert first == second == CONNECTIONS["gloo"]  # whoever sends, and to how many ranks
    for rank, answers in enumerate(ranks):
        assert len(answers) == 4
        for answer, factor in zip(answers, (1, 2, 1, 2), strict=True):
            columns = slice(4 * rank, 4 * rank + 4)
            assert torch.equal(answer["x.self_attn.qkv_proj.weight"], factor * torch.cat([Q, K, V])[:, columns])
            assert torch.equal(answer["x.norm.weight"], factor * NORM)  # a float32 parameter of a bfloat16 model
            assert torch.equal(answer["x.o_proj.weight"], factor * OUT)
            assert torch.equal(answer["x.experts.0.up_proj.weight"], factor * EXPERT)


def test_a_message_goes_over_the_group_that_was_given_the_fewest_bytes() -> None:
    groups: list[Any] = ["first", "second"]
    turns = Turns(groups)
    assert [turns.group_for(nbytes) for nbytes in (100, 30, 60, 20, 1, 40)] == [
        "first", "second", "second", "second", "first", "first",
    ]  # fmt: skip


def test_each_step_has_an_even_part_of_what_two_members_exchange() -> None:
    assert steps_of([1] * STEPS) == list(range(STEPS))
    assert steps_of([5]) == [STEPS // 2]
    assert steps_of([2, 1, 1]) == [STEPS // 4, 5 * STEPS // 8, 7 * STEPS // 8]
    assert steps_of([]) == []


def test_what_a_sender_has_announced_is_not_taken_for_received() -> None:
    group = EngineGroup("of two", "127.0.0.1", 0, 2, 1, "gloo", 20)
    model, box = Model(x__norm__weight=(8,)), SliceKey("x.norm.weight", 0, 8, 0, 0, 8, 1)
    parameters = sglang_loader.ModelParameters.of(model)
    first_of_two = receiving(group, 0, 0, 0, [(0, [(*box, "float32", 0, 32)])], checked=True)
    boxes = ReceivedBoxes()
    with (
        mock.patch.object(sglang_loader, "_boxes", boxes),
        mock.patch.dict(group_ranks._groups, {group.name: (group, None, [])}),
    ):
        come = sglang_loader._take_payload(model, parameters, set(), first_of_two)
        assert come is not None
        assert not come.done()
        group_ranks.give_up()
        with pytest.raises(RuntimeError, match="given up before all its senders had begun"):
            come.result(20)
    assert boxes.take(since_base=True) == []


CHECKED = (True, False, True)
"""Of three updates whether digests will be asked for; after the last one more comes, which the model's loader takes."""


def asked_after_each_update(rank: int, world_size: int) -> list[tuple[list[str], int]]:
    """Rank 0 sends to rank 1, an engine: what that answers when it is asked for digests, and how many it takes then."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [("127.0.0.1", store.port) if store is not None else None]
    torch.distributed.broadcast_object_list(address, src=0)
    assert address[0] is not None
    boxes = [WeightSlice(SliceKey.whole(f"x.self_attn.{n}_proj.weight", m)._replace(engine_rank=0), m) for n, m in MATRICES]
    if rank == 0:
        send_to_one(address[0], boxes)
        torch.distributed.barrier()  # the store lives until the other has read from it
        return []
    answers = []
    model = Model(x__self_attn__qkv_proj__weight=(8, 8))
    for number in range(1, len(CHECKED) + 2):
        torch.distributed.barrier()
        assert not takes(model, address[0], number, 0)
        if number != len(CHECKED):  # the model's loader has its update still to come
            with mock.patch.object(sglang_loader, "digests", side_effect=digests) as taken:
                answers.append((asked(model, *(piece.held for piece in boxes))[0], taken.call_count))
    torch.distributed.barrier()
    return answers


def send_to_one(address: tuple[str, int], boxes: list[WeightSlice]) -> None:
    """The updates of `CHECKED`, each of other values, and a tensor for the model's loader."""
    owner = Owner(address, 1)
    to = ServerEndpoint("http://engine", EngineLayout(ServedModel({}, "float32")), "token", address)
    whole = [WeightSlice(SliceKey.whole("x.other.weight", EXPERT), EXPERT)]
    with (
        mock.patch.object(group_sender, "check_alive"),
        mock.patch.object(group_sender, "SMALL_BYTES", {"cpu": 0}),
        GroupSender(to, senders=1, timeout_s=30) as sender,
    ):
        for number in range(1, len(CHECKED) + 2):
            staged = StagedSlices(whole)
            if number <= len(CHECKED):
                staged = StagedSlices([WeightSlice(held, number * matrix) for held, matrix in boxes])
                staged.checked = CHECKED[number - 1]
            owner.begins(number)
            torch.distributed.barrier()
            sender.deliver(staged)
            owner.ends(number)


def test_digests_are_taken_as_the_values_come_unless_something_else_writes_after(world: World) -> None:
    _, answers = world.call(asked_after_each_update, size=2)
    first, second, third = ([digest(factor * matrix) for _, matrix in MATRICES] for factor in (1, 2, 3))
    assert answers == [(first, 0), (second, 3), (third, 3)]


def copies_ahead(limits: dict[str, Any]) -> int:
    """Most bytes of copies that a sender of four copies of 96 bytes holds at once, which the engine takes at its leisure."""
    held, most = list[Any](), 0

    class Kept:
        def __init__(self, values: Tensor, *_: Any) -> None:
            nonlocal most
            self.nbytes = values.nbytes
            held.append(self)
            most = max(most, sum(one.nbytes for one in held))

        def wait(self) -> None:
            held.remove(self)

    with (
        mock.patch.object(group_sender, "check_alive"),
        mock.patch.multiple(group_sender, start_sending=Kept, SMALL_BYTES={"cpu": 0}, **limits),
    ):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sender = GroupSender(endpoint(("127.0.0.1", store.port)), timeout_s=30)
        sender._groups = [mock.Mock()]
        columns = [[WeightSlice(SliceKey.whole("x", OUT), OUT.t())] for _ in range(4)]
        sender._send({0: _in_steps(columns)})
    return most


@pytest.mark.parametrize("limits", [{"COPIED_BYTES": 192}, {"AHEAD_BYTES": {"cpu": 192}}])
def test_few_bytes_that_had_to_be_copied_are_under_way_at_once(limits: dict[str, Any]) -> None:
    assert copies_ahead(limits) == 3 * 96  # one message beside the limit
    assert copies_ahead({}) == 4 * 96


class Refused(Answered):
    """A request that the engine refused."""

    def __init__(self) -> None:
        super().__init__(already=True)

    def raise_if_failed(self) -> None:
        raise EngineError("http://engine answered 400: must run between begin_weight_update and end_weight_update")


def test_an_engine_that_fails_while_weights_are_sent_is_not_waited_for() -> None:
    never = threading.Event()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        mock.patch.object(group_sender, "check_alive"),
        mock.patch.object(group_sender, "put_before", return_value=Refused()),
        mock.patch.object(group_sender, "start_sending", return_value=mock.Mock(wait=never.wait, nbytes=1)),
    ):
        sender = GroupSender(endpoint(("127.0.0.1", store.port)), timeout_s=30)
        sender._groups = [mock.Mock()]
        for rank in range(2):
            store.set(sender._wanted.ready(0, 0, rank), "")
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            sender.deliver(StagedSlices(pieces_of(1, 1)))
    never.set()


def test_every_sender_hears_why_the_engine_did_not_join() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    to = endpoint(("127.0.0.1", store.port))
    with (
        mock.patch.object(group_sender, "check_alive"),
        mock.patch.object(group_sender, "put_before", return_value=Refused()),
        ThreadPoolExecutor(2) as pool,
    ):
        senders = [GroupSender(to, number=number, senders=2, timeout_s=30) for number in (1, 0)]
        for joined in [pool.submit(sender.join) for sender in senders]:
            with pytest.raises(EngineError, match="must run between begin_weight_update"):
                joined.result(timeout=20)


def test_an_engine_that_answers_without_asking_for_the_weights_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        mock.patch.object(group_sender, "check_alive"),
        mock.patch.object(group_sender, "put_before", return_value=Answered(already=True)),
        GroupSender(endpoint(("127.0.0.1", store.port)), timeout_s=30) as sender,
        pytest.raises(EngineError, match="http://engine answered an update before it had asked for the weights"),
    ):
        sender.deliver(StagedSlices([WeightSlice(SliceKey.whole("x.experts.0.up_proj.weight", EXPERT), EXPERT)]))
