"""Weight updates of an SGLang engine on this machine, beside a plain transfer of the same bytes in the same run.

    python benchmarks/reshard.py --out benchmarks/results/reshard.json

Colocated updates (shared memory) are compared with two processes that hand the same bytes through shared memory, bucket by
bucket: one copies them in, the other copies them out, neither while the other does. Disaggregated updates (a process group,
RDMA) are compared with a plain Gloo broadcast of the same bytes. RDMA is NIXL's here: within a machine it reads the other
process's memory by the kernel's help, so it is measured over TCP too, as between two machines without RDMA. An update is what
a run with one training rank does: begin, all that the reshard plan says, cut from Megatron's parameters, end; with the
comparison of every checksum, and without it. Plain transfers and updates take turns. The plain readers have one thread each,
engine and sender all cores, as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measured_code import code_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from workload import free_port, machine

from megarl.config.layout import Layout
from megarl.models.hf_folder import HFFolder
from megarl.models.weight_tensors import shard_from_hf
from megarl.platform.shared_memory import share, sharing_by_file
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.plan import LOAD_BYTES
from megarl.weights.pusher import Pusher
from megarl.weights.rank_plan import RankPlan
from megarl.workers.senders import Membership, open_sender, plans_for

REAL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
ONE_BILLION = LlamaConfig(
    vocab_size=49152, hidden_size=2048, intermediate_size=5632, num_hidden_layers=20, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
Weights = list[tuple[str, Tensor]]


HOST = "127.0.0.1"


def loaded(folder: Path, dtype: torch.dtype) -> tuple[Weights, Tensor]:
    """The model's weights, and the one block of bytes in which they lie."""
    source = HFFolder(folder)
    sizes = {name: torch.Size(source.get_slice(name).get_shape()) for name in source.names}
    flat = torch.empty(sum(shape.numel() for shape in sizes.values()), dtype=dtype)
    weights, start = [], 0
    for name, shape in sizes.items():
        weights.append((name, flat[start : start + shape.numel()].view(shape)))
        weights[-1][1].copy_(source.get_slice(name)[:])
        start += shape.numel()
    return weights, flat.view(torch.uint8)


def read_from_shared_memory(shared: Tensor, sizes: list[int], pipe: Any) -> None:
    """The other side of `SharedMemory`: copies what it is told has come to memory of its own."""
    torch.set_num_threads(1)
    mine = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    while (number := pipe.recv()) is not None:
        mine[number].copy_(shared[: sizes[number]])
        pipe.send(number)


class SharedMemory:
    """All bytes from this process into another's memory, through one shared buffer; `once` is what is timed."""

    def __init__(self, flat: Tensor) -> None:
        self._source = flat.split(LOAD_BYTES["cpu"])
        self._shared = torch.zeros(max(map(len, self._source)), dtype=torch.uint8)
        with sharing_by_file():
            self._shared.share_memory_()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (self._shared, [len(chunk) for chunk in self._source], theirs)
        self._process = context.Process(target=read_from_shared_memory, args=arguments)
        self._process.start()

    def once(self) -> None:
        """Bucket by bucket: in, and out again."""
        for number, chunk in enumerate(self._source):
            self._shared[: len(chunk)].copy_(chunk)
            self._pipe.send(number)
            self._pipe.recv()

    def close(self) -> None:
        """End the other process."""
        self._pipe.send(None)
        self._process.join()


def join_gloo(rank: int, port: int) -> None:
    """A world of two under Gloo."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2)


def receive_broadcasts(port: int, sizes: list[int], pipe: Any) -> None:
    """The other side of `Gloo`."""
    join_gloo(1, port)
    mine = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    while pipe.recv():
        for buffer in mine:
            torch.distributed.broadcast(buffer, src=0)
        pipe.send(True)


class Gloo:
    """A plain broadcast of all bytes, bucket by bucket, from this process to another; `once` is what is timed."""

    def __init__(self, flat: Tensor) -> None:
        self._source, port = flat.split(LOAD_BYTES["cpu"]), free_port()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        sizes = [len(chunk) for chunk in self._source]
        self._process = context.Process(target=receive_broadcasts, args=(port, sizes, theirs))
        self._process.start()
        threads = torch.get_num_threads()
        join_gloo(0, port)
        torch.set_num_threads(threads)

    def once(self) -> None:
        """Until the last byte is in the other process."""
        self._pipe.send(True)
        for chunk in self._source:
            torch.distributed.broadcast(chunk, src=0)
        self._pipe.recv()

    def close(self) -> None:
        """End the other process and the group."""
        self._pipe.send(False)
        self._process.join()
        torch.distributed.destroy_process_group()


def timed(action: Callable[[], None]) -> float:
    """Seconds that `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def moved(weights: list[Tensor], by: float) -> None:
    """Change every weight a little, in place, as a training step does."""
    for weight in weights:
        weight.mul_(1 + by)


def as_a_rank(
    pusher: Pusher, engine: SglangEngine, weights: Weights, transport: str
) -> tuple[list[Tensor], Callable[[bool], Any]]:
    """What a run's only training rank holds, and what sends that to the engine, with or without checksums."""
    [plan] = plans_for(engine.endpoint, engine.endpoint.layout.model, Layout(), 1, LOAD_BYTES["cpu"])
    mine, hf = RankPlan(plan, 0, single_batch=transport == "process_group"), dict(weights)
    shards = {rule.megatron_name: shard_from_hf(rule, hf.__getitem__, 0, 1) for rule in plan.weight_map.bound_rules()}
    shards = in_one_block(shards)
    if transport == "shared_memory":
        share(shards.values())
    return list(shards.values()), lambda verify: pusher.push_loads(mine.loads(shards, [0]), {0: None}, None, verify=verify)


def in_one_block(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies as views of one tensor, which megatron-core's buffer of parameters is."""
    block = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = block.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


@contextmanager
def over_tcp() -> Any:
    """Agents of NIXL that are made inside know TCP alone, and whoever reads from them must take it."""
    os.environ["UCX_TLS"] = "tcp"
    yield
    del os.environ["UCX_TLS"]


WAYS = (
    ("shared_memory", "shared_memory", SharedMemory, nullcontext),
    ("process_group", "process_group", Gloo, nullcontext),
    ("rdma", "rdma", Gloo, nullcontext),
    ("rdma_over_tcp", "rdma", Gloo, over_tcp),
)
"""What is measured: its name, the transport, the plain transfer beside it, and the setting."""


async def updates(engine: SglangEngine, weights: Weights, transport: str, plain: Any, repeats: int) -> dict[str, Any]:
    """The plain transfer and whole updates, each of new values, in turn; seconds, with every checksum compared and without."""
    pusher = Pusher()
    pusher.connect(0, partial(open_sender, engine.endpoint, transport, Membership()))
    assert not pusher.unreachable, pusher.unreachable
    held, push = as_a_rank(pusher, engine, weights, transport)
    number = (engine.weight_version or 0) + 1
    rows: dict[str, list[dict[str, float]]] = {"plain": [], "checked": [], "unchecked": []}
    for _ in range(repeats + 1):
        rows["plain"].append({"total_s": timed(plain.once)})
        for how in ("checked", "unchecked"):
            moved(held, 1e-4)
            began = time.perf_counter()
            await engine.begin_update(number)
            begun = time.perf_counter()
            pushed = await asyncio.to_thread(push, how == "checked")
            sent = time.perf_counter()
            assert pushed[0].error is None, pushed[0].error
            await engine.end_update(number, pushed[0].checksums)
            ended = time.perf_counter()
            number += 1
            times = {"begin_s": begun - began, "push_s": sent - begun, "end_s": ended - sent, "total_s": ended - began}
            rows[how].append(times)
    pusher.disconnect(0)
    figures: dict[str, Any] = {"staging_bytes": pusher.staging_bytes}
    for how, all_times in rows.items():
        kept = all_times[1:]  # the first one makes the buffers
        figures[how] = {part: statistics.median(times[part] for times in kept) for part in kept[0]}
        figures[how]["best_total_s"] = min(times["total_s"] for times in kept)
        if how != "plain":
            figures[how]["times_plain"] = figures[how]["total_s"] / figures["plain"]["total_s"]
            figures[how]["best_times_best_plain"] = figures[how]["best_total_s"] / figures["plain"]["best_total_s"]
    return figures


def measure(folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    """All figures of one model."""
    weights, flat = loaded(folder, getattr(torch, dtype))
    figures: dict[str, Any] = {"dtype": dtype, "bytes": flat.nbytes, "tensors": len(weights)}

    async def run() -> None:
        with tempfile.TemporaryDirectory() as logs:
            options = ServerOptions(
                str(folder), Path(logs) / "server.log", dtype=dtype, max_total_tokens=1024, max_running_requests=4
            )
            engine = await SglangEngine.open(options)
            try:
                for name, transport, plain_transfer, setting in WAYS:
                    plain = plain_transfer(flat)
                    try:
                        with setting():
                            figures[name] = await updates(engine, weights, transport, plain, repeats)
                    finally:
                        plain.close()
            finally:
                await engine.stop()

    asyncio.run(run())
    return figures


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=["135m", "1b"], choices=["135m", "1b"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder, dtype = REAL, "float32"
            if name == "1b":
                folder, dtype = Path(scratch), "bfloat16"
                LlamaForCausalLM(ONE_BILLION).bfloat16().save_pretrained(folder)
            results[name] = measure(folder, dtype, arguments.repeats)
            print(json.dumps({name: results[name]}, indent=1), flush=True)
    record = {
        "command": shlex.join(["python", "benchmarks/reshard.py", *sys.argv[1:]]),
        "machine": machine(),
        "setup": {"bucket_bytes": LOAD_BYTES["cpu"], "repeats": arguments.repeats, "figures": "medians"},
        "code": code_of("reshard"),
        "versions": {"torch": torch.__version__, "sglang": version("sglang"), "python": platform.python_version()},
        "models": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
