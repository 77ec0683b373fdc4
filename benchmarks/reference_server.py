"""`megarl serve` without ranks and engines: what clients speak to, with transformers and PEFT to train and sample.

It is forked from a process that has imported all that it needs, so it is there again within a second or two.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_runs import ROOT
from warm_servers import Forked, stand_alone

sys.path.insert(0, str(ROOT))

from megarl.errors import WorkerError
from megarl.options.serve.app import build_app
from megarl.options.serve.custom_graph import read_graph
from megarl.options.serve.figures import CountedSampler, CountedTrainer, ServerFigures
from megarl.options.serve.http_server import HttpServer
from megarl.options.serve.journal import RequestJournal
from megarl.options.serve.section import ServeConfig
from megarl.options.serve.service import Service
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import open_store
from megarl.options.serve.tenants import Tenants
from megarl.options.serve.values import Loss
from tests.options.serve.reference import ReferenceSampler, ReferenceTrainer, base_model

BASE = base_model()
RANK_LOST = signal.SIGUSR1
"""Signal at which whatever the trainer is asked next finds its ranks gone."""


class Trainer(ReferenceTrainer):
    """Computes losses that clients define as well, takes some time, and loses its ranks when told to."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.base, self._pause_s, self.is_lost = BASE, pause_s, threading.Event()

    def run_pass(self, model: str, data: Any, loss: Loss, *, backward: bool) -> Any:
        """Compute a loss, and gradients."""
        time.sleep(self._pause_s)
        self._check()
        if loss.name != "custom":
            return super().run_pass(model, data, loss, backward=backward)
        plain = [replace(one, inputs={name: one.inputs[name] for name in ("target_tokens",)}) for one in data]
        seen = super().run_pass(model, plain, Loss("cross_entropy"), backward=False)
        log_probs = [torch.from_numpy(np.array(output["logprobs"])) for output in seen.outputs]
        inputs = [{name: torch.from_numpy(np.array(values)) for name, values in one.inputs.items()} for one in data]
        total, weights, metrics = loss.graph.derivative(log_probs, inputs)
        if backward:
            weighted = [
                replace(one, inputs={**one.inputs, "weights": weight.numpy()})
                for one, weight in zip(plain, weights, strict=True)
            ]
            super().run_pass(model, weighted, Loss("cross_entropy"), backward=True)
        return type(seen)(seen.outputs, {"loss:sum": total, **metrics})

    def optimizer_step(self, model: str, adam: Any) -> dict[str, float]:
        """Apply the gradients."""
        self._check()
        metrics = super().optimizer_step(model, adam)
        self._check()
        return metrics

    def save(self, model: str, folder: Path) -> None:
        """Write what training goes on from."""
        self._check()
        time.sleep(self._pause_s)
        super().save(model, folder)
        self._check()

    def export(self, model: str, folder: Path) -> None:
        """Write a PEFT folder."""
        self._check()
        super().export(model, folder)
        self._check()

    def _check(self) -> None:
        if self.is_lost.is_set():
            raise WorkerError("the ranks are gone")


class Sampler(ReferenceSampler):
    """Forgets adapters that it was never given."""

    def __init__(self) -> None:
        super().__init__()
        self.base = copy.deepcopy(BASE)

    async def drop(self, adapter: str) -> None:
        """Forget adapters."""
        self.adapters.pop(adapter, None)

    async def close(self) -> None:
        """Nothing is under way elsewhere."""


def forked_server(folder: Path, name: str, port: int, snapshot_every_s: float, log: Path) -> Forked:
    """The server in a process of its own."""
    gc.collect()
    gc.freeze()
    return Forked(lambda: _become_server(log, folder, name, port, snapshot_every_s))


def _become_server(log: Path, folder: Path, name: str, port: int, snapshot_every_s: float) -> None:
    code = 1
    try:
        stand_alone(log)
        _serve(folder, name, port, snapshot_every_s)
        code = 0
    except BaseException:  # noqa: BLE001 - as at a program's end
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(folder: Path, name: str, port: int, snapshot_every_s: float) -> None:
    figures, is_down = ServerFigures(), threading.Event()
    http = HttpServer(ServeConfig(port=port), figures, is_down)
    trainer, say = Trainer(0.05), lambda text: print(text, flush=True)
    signal.signal(RANK_LOST, lambda *_: trainer.is_lost.set())
    options = ServiceOptions(
        models={name: 64}, scratch=folder / "scratch", max_rank=8, read_graph=read_graph, say=say,
        snapshot_every_s=snapshot_every_s,
    )  # fmt: skip
    sampler = Sampler()
    service = Service(
        options,
        trainer=CountedTrainer(trainer, figures, http.lost),
        sampler=CountedSampler(sampler, figures),
        store=open_store(folder, say=say),
        tenants=Tenants(None, say=say),
        journal=RequestJournal(folder / "journal"),
    )
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    asyncio.run(http.answer(build_app(service), sampler, listening))
