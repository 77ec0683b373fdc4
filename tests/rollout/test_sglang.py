"""SGLang alone: its process, weights over a process group, several senders, and values that were damaged on the way."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.data.prefills import PrefillCounts
from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.rollout.engines.sglang.server_process import host
from megarl.system.process_tree import tree_of
from megarl.weights import group_sender, staging
from megarl.weights.checksums import UNCHECKED
from megarl.weights.digests import SentDigests, by_engine, sums_by_rank
from megarl.weights.group_sender import GroupSender
from megarl.weights.pusher import Pusher
from megarl.weights.sglang_senders import TensorSender
from tests.rollout.tiny import (
    CONNECTIONS,
    PROMPTS,
    TINY,
    Weights,
    halves,
    largest_difference,
    load,
    reference_log_probs,
    sync,
    weights_of,
    weights_that_never_end,
)

SENDS_A_FILE = """
import pickle, sys, torch
from megarl.weights.checksums import EngineLayout
from megarl.weights.sglang_senders import ServerEndpoint, TensorSender
url, token, host, port, model_path, weights_file = sys.argv[1:]
sender = TensorSender(ServerEndpoint(url, EngineLayout.of_model(model_path, "float32"), token, (host, int(port))))
sender.send(list(torch.load(weights_file).items()))
print(pickle.dumps(sender.checksums()).hex())
"""


def stages(weights: Weights) -> list[Weights]:
    """`weights` as two pipeline stages hold them: the layers before 1, and the rest."""
    first = [pair for pair in weights if ".layers.0." in pair[0] or "embed" in pair[0]]
    return [first, [pair for pair in weights if pair[0] not in dict(first)]]


@pytest.mark.parametrize("paused", [False, True])
def test_an_idle_engine_costs_no_core(sglang_engine: SglangEngine, paused: bool) -> None:
    """Seconds of processors, not of the clock: its processes wait, in which they are not to look for work all the time."""

    def cpu_s() -> float:
        assert sglang_engine.server.pid is not None
        times = [process.cpu_times() for process in tree_of(sglang_engine.server.pid)]
        return sum(one.user + one.system for one in times)

    if paused:
        asyncio.run(sglang_engine._client.pause())
    try:
        time.sleep(1)  # what follows a start or a request
        began, before = time.monotonic(), cpu_s()
        time.sleep(4)
        spent, passed = cpu_s() - before, time.monotonic() - began
    finally:
        if paused:
            asyncio.run(sglang_engine._client.resume())
    assert spent < 0.1 * passed


def test_several_processes_send_the_weights_of_one_update(sglang_engine: SglangEngine, tiny_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        new = load(tiny_path, seed=3)
        mine, theirs = stages(weights_of(new))
        torch.save(dict(theirs), tmp_path / "stage1.pt")
        await sglang_engine.begin_update(4)
        where = sglang_engine.endpoint
        store = [where.store[0], str(where.store[1])]
        arguments = [where.url, where.token, *store, str(tiny_path), str(tmp_path / "stage1.pt")]
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDS_A_FILE, *arguments, stdout=subprocess.PIPE)
        await sglang_engine.apply_update(mine)
        printed, _ = await asyncio.wait_for(other.communicate(), 120)
        await sglang_engine.end_update(4, pickle.loads(bytes.fromhex(printed.decode())))
        groups = await sglang_engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8), n=2))
        assert largest_difference(new, PROMPTS, groups) < 1e-5

    asyncio.run(scenario())


def test_weights_over_a_process_group_are_the_senders_values(sglang_engine: SglangEngine, tiny_path: Path) -> None:
    async def scenario() -> None:
        new = load(tiny_path, seed=4)

        def send() -> dict[str, str]:
            with GroupSender(sglang_engine.endpoint, connection=next(CONNECTIONS), timeout_s=60) as sender:
                for bucket in halves(weights_of(new)):
                    sender.send(bucket)
                return sender.checksums()

        for version in (11, 12):  # the group is made and destroyed each time
            await sglang_engine.begin_update(version)
            await sglang_engine.end_update(version, await asyncio.to_thread(send))
        groups = await sglang_engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.7), n=2))
        assert largest_difference(new, PROMPTS, groups, 0.7) < 1e-5
        assert {version for group in groups for one in group for version in one.weight_versions} == {12}

    asyncio.run(scenario())


def test_responses_that_are_cut_go_on_under_new_weights_and_hits_of_the_cache_are_told(
    sglang_engine: SglangEngine, tiny_path: Path
) -> None:
    old, new = load(tiny_path, seed=5), load(tiny_path, seed=6)
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    prompt = PROMPTS[1]

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        await sync(sglang_engine, weights_of(old), 20)
        shorter, begun_at = SamplingParams(max_new_tokens=60, ignore_eos=True), time.monotonic()
        await sglang_engine.generate(EngineRequest([PROMPTS[0]], shorter, keys=["how fast the machine is"]))
        asked = asyncio.create_task(sglang_engine.generate(EngineRequest([prompt], params, n=2, keys=["a"])))
        beside = asyncio.create_task(sglang_engine.generate(EngineRequest([PROMPTS[0]], shorter, keys=["b"])))
        await asyncio.sleep(time.monotonic() - begun_at)
        while not asked.done():
            await sglang_engine.cut(["a"])
            await asyncio.sleep(0.05)
        [cut] = await asked
        [[other]] = await beside
        assert (other.finish_reason, len(other.response_ids)) == ("length", 60), "it was not to be cut"
        await sync(sglang_engine, weights_of(new), 21)
        [whole] = await sglang_engine.generate(EngineRequest([prompt], params, n=2, keys=["a"], begun=[cut]))
        assert await sglang_engine.generate(EngineRequest([prompt], params, n=2, keys=["a"], begun=[whole])) == [whole]
        return cut, whole

    cut, whole = asyncio.run(scenario())
    for begun, one in zip(cut, whole, strict=True):
        had = len(begun.response_ids)
        assert begun.finish_reason == "abort"
        assert 0 < had < 200
        assert (one.response_ids[:had], one.log_probs[:had]) == (begun.response_ids, begun.log_probs)
        assert one.weight_versions == [20] * had + [21] * (200 - had)
        assert one.finish_reason == "length"
        by_version = [reference_log_probs(model, prompt, one.response_ids, 1.0) for model in (old, new)]
        expected = torch.cat([by_version[0][:had], by_version[1][had:]])
        # over 200 tokens SGLang and transformers are each up to 1e-5 from float64, so twice that from each other
        assert (torch.tensor(one.log_probs) - expected).abs().max() < 2e-5
    # the first one's are those of the request that computes the prompt, too; nothing of the old weights is a hit
    size = len(prompt)
    assert cut[0].prefill == PrefillCounts(2 * size, size - 1)
    assert cut[1].prefill == PrefillCounts(size, size - 1)
    for number, (begun, one) in enumerate(zip(cut, whole, strict=True)):
        behind = size + len(begun.response_ids)
        again = 0 if number else size
        assert one.prefill.asked - begun.prefill.asked == behind + again
        assert one.prefill.cached - begun.prefill.cached in (size, size - 1), "the prompt, computed once under the new weights"


def test_a_later_turn_finds_the_one_before_in_the_cache_and_nothing_of_other_weights(
    sglang_engine: SglangEngine, tiny_path: Path
) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)

    async def scenario() -> None:
        await sync(sglang_engine, weights_of(load(tiny_path, seed=7)), 30)
        [[first]] = await sglang_engine.generate(EngineRequest([PROMPTS[1]], params, keys=["a"]))
        told = [*PROMPTS[1], *first.response_ids, 31, 32]
        [[second]] = await sglang_engine.generate(EngineRequest([told], params, keys=["b"]))
        assert first.prefill == PrefillCounts(len(PROMPTS[1]), 0)
        assert second.prefill == PrefillCounts(len(told), len(told) - 3), "all but the last token of a turn, and what was told"
        await sync(sglang_engine, weights_of(load(tiny_path, seed=8)), 31)
        [[again]] = await sglang_engine.generate(EngineRequest([told], params, keys=["b"]))
        assert again.prefill == PrefillCounts(len(told), 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_sending_without_an_open_update_is_refused(sglang_engine: SglangEngine, tiny_path: Path, transport: str) -> None:
    weights = weights_of(load(tiny_path))
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        if transport == "shared_memory":
            TensorSender(sglang_engine.endpoint).send(weights)
        else:
            with GroupSender(sglang_engine.endpoint, connection=next(CONNECTIONS), timeout_s=60) as sender:
                sender.send(weights)


def told_by_sums(checksums: Any) -> SentDigests:
    """What the driver tells an engine of what was sent to it."""
    return by_engine([sums_by_rank(checksums)])[0]


def damaging(name: str, of_rank: int) -> Any:
    """`TensorSender.deliver`, but one bit of a tensor's piece for a rank is changed on the way."""
    deliver = TensorSender.deliver

    def wrongly(sender: TensorSender, staged: staging.StagedSlices) -> None:
        for held, values in staged.pieces:
            if (held.tensor, held.engine_rank) == (name, of_rank):
                values.view(-1).view(torch.uint8)[8] ^= 1
        deliver(sender, staged)

    return wrongly


def test_a_value_damaged_on_the_way_is_named(
    sglang_engine: SglangEngine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one value of one weight, changed between the sender and the engine."""

    async def scenario() -> None:
        weights = weights_of(load(tiny_path, seed=5))
        monkeypatch.setattr(TensorSender, "deliver", damaging("model.layers.1.mlp.up_proj.weight", of_rank=0))
        with pytest.raises(EngineError, match=r"1 differ, 0 missing.*model\.layers\.1\.mlp\.up_proj\.weight@0$"):
            await sync(sglang_engine, weights, 20)
        assert sglang_engine.weight_version is None
        monkeypatch.undo()
        await sync(sglang_engine, weights, 21)

    asyncio.run(scenario())


def test_weights_in_another_dtype_arrive_rounded_to_the_engines(sglang_engine: SglangEngine, tiny_path: Path) -> None:
    async def scenario() -> None:
        weights = [(name, weight.bfloat16()) for name, weight in weights_of(load(tiny_path))]
        rounded = load(tiny_path)
        rounded.load_state_dict({name: weight.float() for name, weight in weights}, strict=False)
        await sync(sglang_engine, weights, 22)
        groups = await sglang_engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8)))
        assert largest_difference(rounded, PROMPTS, groups) < 1e-5

    asyncio.run(scenario())


def test_a_group_shares_one_prefill(sglang_engine: SglangEngine, tiny_path: Path) -> None:
    """All but one token of the prompt come from the cache for each sample."""

    async def scenario() -> None:
        await sync(sglang_engine, weights_of(load(tiny_path)), 23)
        cached: list[int] = []
        client = sglang_engine._client
        post = client._post

        async def watching(session: Any, endpoint: str, body: dict[str, Any]) -> Any:
            answer = await post(session, endpoint, body)
            if "return_logprob" in body:
                cached.append(answer["meta_info"]["cached_tokens"])
            return answer

        client._post = watching  # type: ignore[method-assign]
        try:
            await sglang_engine.generate(EngineRequest([list(range(3, 103))], SamplingParams(max_new_tokens=2), n=4))
        finally:
            del client._post  # type: ignore[method-assign]
        assert cached == [99] * 4

    asyncio.run(scenario())


async def holds_what_was_sent(engine: SglangEngine, model: Any) -> None:
    """The engine's log-probs are those of `model`."""
    groups = await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8), n=2))
    assert largest_difference(model, PROMPTS, groups) < 1e-5


def test_an_update_whose_values_are_not_compared_must_still_be_complete(sglang_engine: SglangEngine, tiny_path: Path) -> None:
    async def scenario() -> None:
        new, pusher = load(tiny_path, seed=7), Pusher()
        pusher.connect(0, lambda: TensorSender(sglang_engine.endpoint))

        async def update(version: int, weights: Weights) -> None:
            await sglang_engine.begin_update(version)
            pushed = await asyncio.to_thread(lambda: pusher.push(iter(weights), verify=False))
            assert set(pushed[0].checksums.values()) == {UNCHECKED}
            await sglang_engine.end_update(version, pushed[0].checksums)

        await update(51, weights_of(new))
        await holds_what_was_sent(sglang_engine, new)
        with pytest.raises(EngineError, match=r"0 differ, 1 missing.*nobody sent model\.norm\.weight@0"):
            await update(52, [pair for pair in weights_of(new) if pair[0] != "model.norm.weight"])
        assert sglang_engine.weight_version is None
        await update(53, weights_of(new))

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "first"), [(TensorSender, 61), (GroupSender, 71)])
def test_a_server_that_is_sent_changes_alone_holds_the_whole_new_model(
    sglang_engine: SglangEngine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, first: int
) -> None:
    """The comparison at the end is of every tensor, whether it was sent or not."""

    async def scenario() -> None:
        model, pusher, sent = load(tiny_path, seed=9), Pusher(), list[str]()
        connection = {"connection": next(CONNECTIONS)} if kind is GroupSender else {}
        pusher.connect(0, lambda: kind(sglang_engine.endpoint, **connection))
        deliver = kind.deliver

        def watched(sender: Any, staged: staging.StagedSlices) -> None:
            sent.extend(piece.held.tensor for piece in staged.pieces)
            deliver(sender, staged)

        monkeypatch.setattr(kind, "deliver", watched)

        async def update(version: int, base: int | None) -> None:
            sent.clear()
            await sglang_engine.begin_update(version, base)
            pushed = await asyncio.to_thread(pusher.push, iter(weights_of(model)), {0: base}, version)
            assert len(pushed[0].checksums) > 10
            assert not await sglang_engine.end_update_by_sums(version, told_by_sums(pushed[0].checksums))
            await holds_what_was_sent(sglang_engine, model)

        await update(first, None)
        changed = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
        with torch.no_grad():
            for name in changed:
                model.get_parameter(name).mul_(1.25)
        await update(first + 1, first)
        assert sent == changed
        with pytest.raises(EngineError, match=f"builds on {first}, but the engine has version {first + 1}; send all weights"):
            await sglang_engine.begin_update(first + 2, first)
        assert sglang_engine.weight_version == first + 1
        pusher.disconnect(0)

    asyncio.run(scenario())


@pytest.mark.slow
def test_two_ranks_hold_an_untied_model_with_biases_and_a_padded_vocabulary(tmp_path: Path) -> None:
    """Both transports into an engine with tp 2, whose ranks have their one KV head in common."""
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "initializer_range")
    sizes = {name: getattr(TINY, name) for name in names} | {"num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=500, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, **sizes)
    Qwen2ForCausalLM(config).float().save_pretrained(tmp_path / "model")
    options = ServerOptions(
        str(tmp_path / "model"), tmp_path / "server.log", tp=2, threads=1, max_total_tokens=2048, max_running_requests=8
    )

    def moved(seed: int) -> Any:
        model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=noise)
        return model

    async def scenario() -> None:
        engine = await SglangEngine.open(options)
        try:
            model = moved(1)
            await sync(engine, weights_of(model), 1)
            await holds_what_was_sent(engine, model)
            model = moved(2)
            await engine.begin_update(2)
            with GroupSender(engine.endpoint, connection=next(CONNECTIONS), timeout_s=60) as sender:
                for bucket in halves(weights_of(model)):
                    await asyncio.to_thread(sender.send, bucket)
                await engine.end_update(2, sender.checksums())
            await holds_what_was_sent(engine, model)
            wrong = "model.layers.1.mlp.up_proj.weight"
            await engine.begin_update(3)
            with mock.patch.object(TensorSender, "deliver", damaging(wrong, of_rank=1)):
                sender = TensorSender(engine.endpoint)
                await asyncio.to_thread(sender.send, weights_of(model))
            sent = sender.checksums()
            assert await engine.end_update_by_sums(3, told_by_sums(sent)) == [1]
            with pytest.raises(EngineError, match=rf"1 differ, 0 missing.*{wrong}@1$"):
                await engine.end_update(3, {box: checksum for box, checksum in sent.items() if box.engine_rank == 1})
            assert engine.weight_version is None
        finally:
            await engine.stop()

    asyncio.run(scenario())


@pytest.mark.exhaustive  # test_sglang_killed.py kills one in an update and starts it again without weights
@pytest.mark.slow
def test_a_server_that_died_is_named_leaves_nothing_and_starts_again_without_weights(tiny_path: Path, tmp_path: Path) -> None:
    options = ServerOptions(
        str(tiny_path), tmp_path / "server.log", threads=1, max_total_tokens=512, max_running_requests=2, start_timeout_s=240
    )

    async def scenario() -> None:
        engine = await SglangEngine.open(options)
        try:
            await sync(engine, weights_that_never_end(tiny_path), 1)
            assert engine.server.pid is not None
            tree = tree_of(engine.server.pid)
            under_way = asyncio.create_task(engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=400), n=4)))
            await asyncio.sleep(0.3)
            psutil.Process(engine.server.pid).kill()
            with pytest.raises(
                EngineError, match=r"/generate did not answer: .*ended with exit code -9; .*server\.log ends with:"
            ):
                await under_way
            _, left = psutil.wait_procs(tree, timeout=20)
            assert left == []
            with pytest.raises(EngineError, match=r"ended with exit code -9; .*server\.log ends with:"):
                await engine.health()
            engine = await SglangEngine.open(options)
            with pytest.raises(EngineError, match="no weights of a known version"):
                await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
            model = load(tiny_path, seed=6)
            await sync(engine, weights_of(model), 1)
            await holds_what_was_sent(engine, model)
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_a_late_refusal_over_a_process_group_is_not_waited_out(
    sglang_engine: SglangEngine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses only after a while; more is to be sent than the sockets' buffers take."""
    put_before = group_sender.put_before

    def busy(*arguments: Any) -> Any:
        time.sleep(0.5)
        return put_before(*arguments)

    monkeypatch.setattr(group_sender, "put_before", busy)
    large = [("model.embed_tokens.weight", torch.zeros(2**18, 64))]
    begun = time.monotonic()
    with (
        pytest.raises(EngineError, match="must run between begin_weight_update"),
        GroupSender(sglang_engine.endpoint, connection=next(CONNECTIONS), timeout_s=120) as sender,
    ):
        sender.send(large)
    assert time.monotonic() - begun < 60


@pytest.mark.exhaustive  # of tests/themes/e2e/test_bad_input.py a whole run ends so
@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    options = ServerOptions(str(tmp_path / "no-such-model"), tmp_path / "server.log", start_timeout_s=120)
    server = SglangServer(options)
    with pytest.raises(EngineError, match=r"(?s)ended with exit code .*server\.log ends with:.*no-such-model"):
        server.start()
    assert not server.alive


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((host(), 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"rollout.servers.port is {port}, which is in use"):
            SglangServer(ServerOptions("model", tmp_path / "server.log", port=port)).start()


STARTS_A_SERVER = """
import sys, time
from pathlib import Path
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
server = SglangServer(ServerOptions(sys.argv[1], Path(sys.argv[2]), threads=1, max_total_tokens=512, max_running_requests=2))
server.start()
print(server.url, server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_server_whose_owner_was_killed(tiny_path: Path, tmp_path: Path) -> None:
    """That `stop` leaves nothing is asserted where the shared server is stopped, in conftest."""
    arguments = [str(tiny_path), str(tmp_path / "server.log")]
    owner = subprocess.Popen([sys.executable, "-c", STARTS_A_SERVER, *arguments], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    tree: list[psutil.Process] = []
    try:
        url, pid = owner.stdout.readline().split()
        tree = tree_of(int(pid))
        assert len(tree) > 2  # the server, its scheduler and its detokenizer at least
        urllib.request.urlopen(f"{url}/health", timeout=10).close()  # all that it answers to anybody
        owner.kill()
        _, left = psutil.wait_procs(tree, timeout=20)
        assert left == []
    finally:
        owner.kill()
        owner.wait()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
