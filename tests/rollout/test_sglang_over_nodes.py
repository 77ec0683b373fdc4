"""One SGLang engine with a process on each of two nodes: its answers, updates, and its end when one of the processes ends."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineProcess, EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import NodeProcess, ServerOptions
from megarl.system.process_tree import tree_of
from tests.rollout.tiny import PROMPTS, halves, largest_difference, load, weights_of


class SecondNode:
    """The other node, which is this machine; `started` are its processes, one after the other."""

    def __init__(self) -> None:
        self.options: list[ServerOptions] = []
        self.started: list[NodeProcess] = []

    def start(self, options: ServerOptions) -> None:
        self.stop()
        self.options.append(options)
        process: EngineProcess = SglangEngine.start_on_node(options)
        assert isinstance(process, NodeProcess)
        self.started.append(process)

    def wait(self) -> str:
        return self.started[-1].wait()

    def stop(self) -> None:
        for process in self.started:
            process.stop()


@pytest.mark.exhaustive  # tests/themes/rehearsal has a run whose engine is over two nodes
@pytest.mark.slow
def test_an_engine_over_two_nodes_answers_like_the_model_it_was_sent_and_ends_with_any_of_its_processes(
    tiny_path: Path, tmp_path: Path
) -> None:
    sizes = {"threads": 1, "max_total_tokens": 4096, "max_running_requests": 8}
    options = ServerOptions(
        str(tiny_path), tmp_path / "engine-0.log", tp=2, gpus=(3,), other_nodes=((5,),), **sizes, start_timeout_s=240
    )  # type: ignore[arg-type]
    node = SecondNode()

    async def update(engine: SglangEngine, seed: int, version: int) -> None:
        new = load(tiny_path, seed=seed)
        await engine.begin_update(version)
        for bucket in halves(weights_of(new)):
            await engine.apply_update(bucket)
        await engine.end_update(version)
        groups = await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8), n=2))
        assert largest_difference(new, PROMPTS, groups) < 1e-5

    async def scenario() -> None:
        engine = await SglangEngine.open(options, nodes=[node])
        try:
            [given] = node.options
            assert (given.node, given.nodes, given.gpus) == (1, 2, (5,))
            assert given.log_file == tmp_path / "engine-0-node-1.log"
            await update(engine, 3, 1)
            assert engine.server.pid is not None
            trees = [process for pid in (engine.server.pid, node.started[-1].pid) for process in tree_of(pid)]
            node.started[-1].stop()
            ends_at = time.monotonic() + 20
            while engine.server.alive and time.monotonic() < ends_at:
                await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match=r"was stopped: its process on node 1 ended: exit code (-9|0); .*node-1.log"):
                await engine.health()
            assert psutil.wait_procs(trees, timeout=20)[1] == []  # ended processes are for init to reap
        finally:
            await engine.stop()
        again = await SglangEngine.open(options, nodes=[node])
        try:
            await update(again, 4, 1)
        finally:
            await again.stop()
        assert node.started[-1].wait().startswith("exit code")

    asyncio.run(scenario())


def test_the_processes_of_an_engine_meet_at_one_address_and_have_the_gpus_of_their_own_node(tmp_path: Path) -> None:
    options = ServerOptions("model", tmp_path / "log", device="cuda", tp=8, gpus=(0, 1, 2, 3), other_nodes=((4, 5, 6, 7),))
    for node, first in ((0, "0"), (1, "4")):
        line = options.on_node(node, "10.0.0.1:2000").arguments(3000 + node, "id")
        given = dict(pairwise(line))
        assert (given["--nnodes"], given["--node-rank"], given["--dist-init-addr"]) == ("2", str(node), "10.0.0.1:2000")
        assert (given["--tp-size"], given["--base-gpu-id"], given["--gpu-id-step"]) == ("8", first, "1")
    assert "--nnodes" not in ServerOptions("model", tmp_path / "log").arguments(1, "id")
