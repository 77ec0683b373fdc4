"""A measurement of the network between nodes: one process on each joins a world and measures clocks, bandwidth and latency.

Rank r sends to rank r + 1, one pair after the other in two rounds (even ranks, then odd ones), so links are loaded alone.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

MESSAGE_BYTES = 64 * 1024**2
ROUNDS = 4
PINGS = 20


def measure(plan: dict[str, Any]) -> dict[str, float | None]:
    """`clock_s`: how far this clock is ahead of rank 0's; `gb_per_s` and `latency_s` to the next rank (None if alone).

    `plan` has rank, world_size, address and port of rank 0, interface and backend (gloo or nccl).
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = plan["interface"]
    import torch
    import torch.distributed as dist

    rank, size = plan["rank"], plan["world_size"]
    if size == 1:
        return {"clock_s": 0.0, "gb_per_s": None, "latency_s": None}
    device = "cuda" if plan["backend"] == "nccl" else "cpu"
    dist.init_process_group(
        f"cpu:gloo,cuda:{plan['backend']}" if device == "cuda" else "gloo",
        init_method=f"tcp://{plan['address']}:{plan['port']}", rank=rank, world_size=size, timeout=timedelta(seconds=120),
    )  # fmt: skip
    try:
        clock_s = _clock(dist, torch, rank, size)
        message = torch.zeros(MESSAGE_BYTES // 4, dtype=torch.float32, device=device)
        small = torch.zeros(1, device=device)
        rates: dict[str, float | None] = {"gb_per_s": None, "latency_s": None}
        for sender in [*range(0, size, 2), *range(1, size, 2)]:
            receiver = (sender + 1) % size
            dist.barrier()
            if rank in (sender, receiver):
                sent = _link(dist, torch, message, small, receiver if rank == sender else sender, is_sender=rank == sender)
                rates = sent if rank == sender else rates
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {"clock_s": clock_s, **rates}


def _link(dist: Any, torch: Any, message: Any, small: Any, peer: int, *, is_sender: bool) -> dict[str, float | None]:
    """Round trips of a small message, then a large one several times, each answered by a small one."""

    def trip(tensor: Any) -> None:
        if is_sender:
            dist.send(tensor, peer)
            dist.recv(small, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(small, peer)
        if tensor.is_cuda:
            torch.cuda.synchronize()

    trip(small)
    latencies, seconds = [], []
    for _ in range(PINGS):
        began = time.perf_counter()
        trip(small)
        latencies.append(time.perf_counter() - began)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        trip(message)
        seconds.append(time.perf_counter() - began)
    return {"gb_per_s": MESSAGE_BYTES / min(seconds) / 1e9, "latency_s": min(latencies) / 2}


def _clock(dist: Any, torch: Any, rank: int, size: int) -> float:
    """This clock minus rank 0's, by the quickest of several round trips: the answer is dated at its middle."""
    lead = torch.zeros(1, dtype=torch.float64)
    for other in range(1, size):
        if rank == 0:
            for _ in range(PINGS):
                dist.recv(lead, other)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
        elif rank == other:
            best, answer = (float("inf"), 0.0), torch.zeros(1, dtype=torch.float64)
            for _ in range(PINGS):
                began = time.time()
                dist.send(lead, 0)
                dist.recv(answer, 0)
                ended = time.time()
                best = min(best, (ended - began, (began + ended) / 2 - float(answer)))
            return best[1]
    return 0.0
