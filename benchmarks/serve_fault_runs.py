"""Servers and clients of `serve_faults.py`: `megarl serve` as a process that is watched from outside, and the loop of a client.

A client is the protocol's own package, in a process that is forked from this one. The server's processes are forked from such
as have imported what they need (`tests/warm_workers.py`, `warm_servers.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import tinker
import yaml
from fault_runs import ROOT, WarmWorkers, environment
from tinker import types
from warm_servers import WarmSglang, forked_command
from workload import free_port

from tests.warm_workers import PYTHON_OF_WORKERS

NAME, KEY, VOCABULARY = "tiny/arithmetic", "tml-local", 16
STEPS, STATE_EVERY, SAMPLE_EVERY = 10, 3, 4
"""Steps of a client's loop; it saves its state, and samples by its newest weights, after so many of them."""
START_S = 500.0
LOSSES = ("cross_entropy", "importance_sampling", "custom")
LAYOUTS: dict[str, dict[str, int]] = {"one rank": {}, "tp=2": {"tp": 2}, "pp=2": {"pp": 2}}
REFERENCE = "reference"
"""In a layout's place: the server without ranks and engines (`reference_server.py`)."""
TRAINED = ({"rank": 8, "seed": 11}, {"rank": 4, "seed": 12, "train_unembed": False})
"""The adapters of a client's first model, and of its second."""


# --- the server ------------------------------------------------------------------------------------------------------------


def config(folder: Path, layout: str, port: int, snapshot_every_s: float) -> dict[str, Any]:
    """A server of the tiny model with one engine."""
    return {
        "run": {"folder": str(folder), "name": "served"},
        "model": {"path": str(ROOT / "models/tiny-arithmetic"), "dtype": "float32"},
        "policy": {"layout": LAYOUTS[layout], "threads_per_rank": 1, "max_tokens_per_micro_batch": 512},
        "serve": {"models": {NAME: None}, "max_rank": 8, "live_models": 4, "context_tokens": 32, "port": port}
        | {"snapshot_every_s": snapshot_every_s},
        "rollout": {"threads": 1},
        "resources": {"deadlines": {"start_s": 400, "step_s": 120}},
    }


@dataclass
class Warm:
    """Processes that others are forked from."""

    workers: WarmWorkers
    sglang: WarmSglang


class Server:
    """A `megarl serve` process on a port that it keeps when it is started again."""

    def __init__(self, folder: Path, layout: str, warm: Warm | None, snapshot_every_s: float) -> None:
        self.folder, self.layout, self.port, self._warm = folder, layout, free_port(), warm
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._config = folder / "serve.yaml"
        self.is_reference, self._snapshot_every_s = layout == REFERENCE, snapshot_every_s
        if not self.is_reference:
            self._config.write_text(yaml.safe_dump(config(folder, layout, self.port, snapshot_every_s)))
        self.log = folder / "serve.log"
        self.starts = 0
        self.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def journal(self) -> Path:
        """Journals of its models."""
        return self.folder / "served" / "serve" / "journal"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of its clients."""
        return self.folder / "served" / "serve" / "checkpoints"

    def start(self) -> None:
        """Start the command, a second time after it has ended."""
        self.starts += 1
        if self._warm is None:
            from reference_server import forked_server

            self.process = forked_server(self.folder / "served/serve", NAME, self.port, self._snapshot_every_s, self.log)
            return
        environ = environment(ROOT) | self._warm.workers.environment | {PYTHON_OF_WORKERS: self._warm.sglang.python}
        self.process = forked_command(["serve", str(self._config)], environ, self.log)

    def is_up(self) -> bool:
        """Return whether it answers."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/api/v1/healthz", timeout=2).status_code == 200
        return False

    def wait(self) -> float:
        """Return the seconds until it answers."""
        began = time.monotonic()
        while not self.is_up():
            if self.process.poll() is not None or time.monotonic() > began + START_S:
                raise SystemExit(f"the server did not start; see {self.log}")
            time.sleep(0.1)
        return time.monotonic() - began

    def see_to(self) -> None:
        """Start it again if it has ended, as a service manager would."""
        if self.process.poll() is not None:
            self.start()

    def below(self) -> list[psutil.Process]:
        """All processes of the server now."""
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self.process.pid).children(recursive=True)
            if self._warm is None:
                return below
            return below + self._warm.workers.forked + self._warm.sglang.forked
        return []

    def find(self, target: str) -> list[psutil.Process]:
        """The processes of that kind."""
        if target == "server" or self._warm is None:
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        if target == "engine":
            return sorted(self._warm.sglang.forked, key=lambda process: process.pid)
        found, fork = [], psutil.Process(self.process.pid).cmdline()
        for process in self.below():
            with contextlib.suppress(psutil.Error):
                line, own_child = " ".join(process.cmdline()), process.ppid() == self.process.pid
                is_it = {
                    "driver": own_child and process.cmdline() == fork,
                    "rank": "ray::RankProcess" in line,
                    "actor": "ray::EngineActor" in line,
                }
                if is_it[target]:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def stop(self) -> None:
        """End it and all that it has started."""
        below = self.below()
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait(30)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()


class Proxy:
    """A connection in the way of a client. While `loses`, requests arrive, and half of their answers are lost."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self._to, self._draw, self.loses, self.lost = port, draw, False, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                continue
            return

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to), 5) as server:
            server.settimeout(None)
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
            while data := server.recv(65536):
                if self.loses and self._draw.random() < 0.5:
                    self.lost += 1
                    break
                client.sendall(data)
            for side in (client, server):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()


# --- the loop of a client --------------------------------------------------------------------------------------------------


@dataclass
class Learned:
    """The end of a model of a loop: losses by step, a hash of its adapters, log-probs of fixed rows, greedy samples."""

    losses: list[float] = field(default_factory=list)
    adapters: str = ""
    log_probs: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)


def rows_of(model: int, step: int) -> list[types.Datum]:
    """Rows of a step: fixed tokens, with the inputs of its loss."""
    draw, rows = random.Random(f"{model} {step}"), []
    loss = LOSSES[step % len(LOSSES)]
    for _ in range(4):
        tokens = [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(6, 16))]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss == "importance_sampling":
            inputs["logprobs"] = [-draw.uniform(1, 4) for _ in tokens[1:]]
            inputs["advantages"] = [draw.uniform(-1, 1) for _ in tokens[1:]]
        else:
            inputs["weights"] = [draw.uniform(0, 1) for _ in tokens[1:]]
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def squared(logprobs: Any, weights: Any) -> Any:
    """A loss that the client defines, which the server computes by its graph."""
    loss = (logprobs * logprobs * weights).sum()
    return loss, {"custom/squared:sum": loss}


class Loop:
    """A loop over one or two models, whose progress is told by lines of JSON in a file."""

    def __init__(self, url: str, progress: Path, models: int, resumed: dict[str, Any] | None) -> None:
        warnings.simplefilter("ignore")
        os.environ["TINKER_TELEMETRY"] = "0"
        self.url, self._progress = url, progress
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.first = resumed["step"] if resumed is not None else 0
        made = [
            self.service.create_training_client_from_state_with_optimizer(resumed["paths"][number])
            if resumed is not None
            else self.service.create_lora_training_client(base_model=NAME, **TRAINED[number])
            for number in range(models)
        ]
        self.models = [one.result(timeout=600) for one in made]
        self.loss = self.service.create_custom_loss(squared, input_ranks={"logprobs": 1, "weights": 1}).result(timeout=600)
        self.learned = [Learned(**one) for one in resumed["learned"]] if resumed is not None else [Learned() for _ in made]

    def run(self) -> None:
        """Do all steps; the last line has what was learned."""
        for step in range(self.first, STEPS):
            self.tell(step=step)
            self._step(step)
            if step % SAMPLE_EVERY == 1:
                self._sample()
            if (step + 1) % STATE_EVERY == 0:
                kept = [model.save_state(f"state-{step + 1}") for model in self.models]
                paths = [one.result(timeout=600).path for one in kept]
                self.tell(state={"step": step + 1, "paths": paths, "learned": [vars(one) for one in self.learned]})
        self._end()
        self.service.close("success").result(timeout=600)
        self.tell(done=[vars(one) for one in self.learned])

    def _step(self, step: int) -> None:
        """Passes and steps of all models, sent before any is waited for."""
        loss, sent = LOSSES[step % len(LOSSES)], []
        for number, model in enumerate(self.models):
            rows = rows_of(number, step)
            passed = model.forward_backward_custom(rows, self.loss) if loss == "custom" else model.forward_backward(rows, loss)
            sent.append((passed, model.optim_step(types.AdamParams(learning_rate=3e-3))))
        for learned, (passed, stepped) in zip(self.learned, sent, strict=True):
            learned.losses.append(passed.result(timeout=600).metrics["loss:sum"])
            stepped.result(timeout=600)

    def _sample(self) -> None:
        """Greedy answers by each model's newest weights."""
        prompt, params = types.ModelInput.from_ints([3, 4, 5]), types.SamplingParams(max_tokens=6, temperature=0.0)
        for learned, model in zip(self.learned, self.models, strict=True):
            sampler = model.save_weights_and_get_sampling_client().result(timeout=600)
            learned.samples += [list(one.tokens) for one in sampler.sample(prompt, 2, params).result(timeout=600).sequences]

    def _end(self) -> None:
        for number, (learned, model) in enumerate(zip(self.learned, self.models, strict=True)):
            answer = model.forward(rows_of(number, 0), "cross_entropy").result(timeout=600)
            learned.log_probs = [float(value) for one in answer.loss_fn_outputs for value in one["logprobs"].tolist()]
            learned.adapters = self._downloaded(model.save_weights_for_sampler("final").result(timeout=600).path)

    def _downloaded(self, path: str) -> str:
        """A hash of a PEFT archive's files."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        url = f"{self.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
        link = asked_again(lambda: httpx.get(url, headers={"X-API-Key": KEY}, timeout=20))
        archive = asked_again(lambda: httpx.get(link.headers["location"], timeout=20))
        found = hashlib.sha256()
        with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
            for entry in sorted(tar.getmembers(), key=lambda one: one.name):
                content = tar.extractfile(entry)
                found.update(entry.name.encode() + (content.read() if content is not None else b""))
        return found.hexdigest()

    def tell(self, **what: Any) -> None:
        """Add a line."""
        with self._progress.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")


def asked_again(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The answer to a plain request, asked again where the connection fails or the server does."""
    ends_at = time.monotonic() + 300
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = ask()
            if answer.status_code < 500:
                return answer
        if time.monotonic() > ends_at:
            raise TimeoutError("the server did not answer")
        time.sleep(0.3)


def _in_process(url: str, progress: Path, models: int, resumed: dict[str, Any] | None, log: Path) -> None:
    with log.open("ab") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    loop = None
    try:
        loop = Loop(url, progress, models, resumed)
        loop.run()
    except BaseException as error:  # noqa: BLE001 - what ends a client is what the trial is about
        with progress.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), "failed": f"{type(error).__name__}: {error}"[:600]}) + "\n")
        os._exit(1)
    os._exit(0)  # not to wait for connections that are cut


class Client:
    """A loop in a process of its own."""

    def __init__(self, folder: Path, url: str, models: int) -> None:
        self._folder, self.url, self.models = folder, url, models
        folder.mkdir(parents=True, exist_ok=True)
        self.progress = folder / "progress.jsonl"
        self.progress.unlink(missing_ok=True)
        self._read: tuple[int, list[dict[str, Any]]] = 0, []
        self._start(None)

    def _start(self, resumed: dict[str, Any] | None) -> None:
        arguments = (self.url, self.progress, self.models, resumed, self._folder / "client.log")
        self.process = multiprocessing.get_context("fork").Process(target=_in_process, args=arguments, daemon=True)
        self.process.start()

    def start_again(self) -> None:
        """After it was killed: a new client that loads the last state, or begins anew where none was saved."""
        states = [line["state"] for line in self.lines() if "state" in line]
        self._start(states[-1] if states else None)

    def lines(self) -> Sequence[dict[str, Any]]:
        """Its progress; a line that is written in part is left out."""
        size = self.progress.stat().st_size if self.progress.exists() else 0
        if size != self._read[0]:
            self._read = size, [json.loads(line) for line in self.progress.read_text().split("\n")[:-1]]
        return self._read[1]

    @property
    def step(self) -> int:
        """The step that it is in; -1 before the first."""
        return max((line["step"] for line in self.lines() if "step" in line), default=-1)

    @property
    def done(self) -> list[dict[str, Any]] | None:
        """The end that its loop came to, of each model."""
        return next((line["done"] for line in self.lines() if "done" in line), None)

    @property
    def failure(self) -> str:
        """What ended it, if something did."""
        return next((line["failed"] for line in self.lines() if "failed" in line), "")

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join(10)


def snapshots_under_way(journal: Path) -> list[Path]:
    """Folders of snapshots that are being written."""
    return [*journal.glob("*/.snapshot-*")]
