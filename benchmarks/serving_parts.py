"""Parts of benchmarks/serving.py that need no engines: the server outside the ranks, switching models, and grouped products.

`overhead`: a server over HTTP with a session's rank under Ray, whose passes answer at once: what is left is the server's. The
bodies are made before, as the client cuts them. CPU seconds are the server's process with all its threads (it also sends the
bodies), and the rank's, of all that it does around a pass. `switching`: `RankModels` in this process; `grouped`: products.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from workload import MODEL, ROOT

sys.path.insert(0, str(ROOT))

DATUMS, TOKENS, PASSES, LARGEST = 1024, 1024, 5, 8192
"""Datums of a batch and their tokens, how often it is sent, and tokens of a micro-batch."""
SHARE = 0.05
RANK, SWITCHED, ON_DISK, ROWS, ROW_TOKENS, SWITCHES = 32, 8, 4, 4, 128, 8
"""Rank of adapters; models in memory; models on disk; rows of a pass and their tokens; switches that are timed."""
SHAPES = {"SmolLM2-135M, gate": (576, 1536, (16, 64, 256, 1024)), "Llama-3.2-1B, q": (2048, 2048, (16, 64, 256))}
"""Inputs and outputs of a linear layer, and tokens of each model."""
MODELS, REPEATS = 8, 3
"""Models of a micro-batch, and how often a case is tried."""
Arrays = np.ndarray[Any, Any]


class Clock:
    """Seconds on the wall and of this process's threads since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> tuple[float, float]:
        """(on the wall, of CPU)."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


# the server outside the ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerAtOnce:
    """A question to a rank: have its passes answer zeros at once, whatever they are sent."""

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return "stand-in"

    def __call__(self, role: Any) -> None:
        """Answer on each rank, for its `RankModel`."""
        from megarl.options.serve.losses import LOSS
        from megarl.runs.update_metrics import LOG_PROBS

        def update(micro_batches: Any, loss_function: Any, **_: Any) -> dict[str, Any]:
            responses = [response for units in micro_batches for unit in units for response in unit.responses]
            shown = {one.index: torch.zeros(len(one.token_ids), dtype=torch.float64) for one in responses}
            return {LOSS: 0.0, LOG_PROBS: shown}

        role.update = update


@dataclass(frozen=True)
class CpuSeconds:
    """A question to a rank: seconds of CPU that its process has used."""

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return "clock"

    def __call__(self, role: Any) -> float:
        """Answer on each rank."""
        return time.process_time()


def bodies(model: str, first: int) -> list[bytes]:
    """The batch in as many requests as the client makes of it (`CHUNK_BYTES` at most), packed by zstd."""
    import zstandard
    from tinker.proto import tinker_public_pb2 as pb

    from megarl.options.serve.service import CHUNK_BYTES

    draw, packed = np.random.default_rng(first), zstandard.ZstdCompressor(level=3)
    of_datum = TOKENS * (4 + 8 + 4 + 4)
    per_body = max(1, CHUNK_BYTES // of_datum)
    found = []
    for number, start in enumerate(range(0, DATUMS, per_body)):
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=first + number, loss_fn="importance_sampling")
        for _ in range(min(per_body, DATUMS - start)):
            one, tokens = message.data.add(), draw.integers(0, 16, TOKENS + 1)
            one.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
            values = draw.normal(size=(2, TOKENS)).astype("<f4")
            for name, array, kind in (
                ("target_tokens", tokens[1:].astype("<i8"), pb.DTYPE_INT64),
                ("logprobs", values[0], pb.DTYPE_FLOAT32),
                ("advantages", values[1], pb.DTYPE_FLOAT32),
            ):
                tensor = one.loss_fn_inputs[name]
                tensor.dtype, tensor.dense = kind, array.tobytes()
                tensor.shape.append(TOKENS)
        found.append(packed.compress(message.SerializeToString()))
    return found


class Asking:
    """A client without the package: routes of the protocol over one connection for each request."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, route: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """The answer to a request, which is sent again while the server says so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        sent = {"X-API-Key": "tml-local", "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1/{route}", body, {**sent, **headers})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status == 408:
            return self.post(route, body, headers)
        if answer.status != 200:
            sys.exit(f"{route} answered {answer.status}: {content[:500]!r}")
        return content

    def json(self, route: str, **fields: Any) -> Any:
        """The same in JSON."""
        return json.loads(self.post(route, json.dumps(fields).encode()))

    def passed(self, body: bytes) -> bytes:
        """The answer to a pass, as protobuf."""
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
        future = json.loads(self.post("forward_backward", body, headers))
        content = self.post("retrieve_future", json.dumps({"request_id": future["request_id"]}).encode())
        if b'"error"' in content[:100]:
            sys.exit(content.decode()[:500])
        return content


@contextmanager
def served(work: Path) -> Iterator[tuple[int, Any]]:
    """A server on a tiny model whose rank answers at once, without engines: its port, and the roles of its session."""
    import ray
    import uvicorn

    from megarl.core.session import Session
    from megarl.options.serve.app import build_app
    from megarl.options.serve.command import load
    from megarl.options.serve.journal import RequestJournal
    from megarl.options.serve.service import Service
    from megarl.options.serve.settings import ServiceOptions
    from megarl.options.serve.store import open_store
    from megarl.options.serve.tenants import Tenants
    from megarl.options.serve.trainer import SessionTrainer
    from megarl.runs.training_side import POLICY
    from megarl.trainers.inputs import read_inputs

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not know this folder
    file = work / "serve.yaml"
    file.write_text(yaml.safe_dump(config_of(tiny(work / "model"), work)))
    config = load(file)
    with ExitStack() as stack:
        inputs = read_inputs(config, train=False)
        stack.callback(inputs.close)
        session = stack.enter_context(Session(config, inputs, ranks_alone))
        session.start(work / "logs")
        session.roles.ask(POLICY, AnswerAtOnce())
        options = ServiceOptions(models={"tiny": TOKENS}, scratch=work / "scratch", max_rank=8, max_body_bytes=1 << 28)
        service = Service(
            options,
            trainer=SessionTrainer(session, work / "models"),
            sampler=NoSampler(),
            store=open_store(work / "store"),
            tenants=Tenants(None),
            journal=RequestJournal(work / "journal"),
        )
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_app(service), log_config=None, lifespan="on", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.05)
        try:
            yield listening.getsockname()[1], session.roles
        finally:
            server.should_exit = True
            thread.join(60)
            listening.close()


class NoSampler:
    """Stands for engines, of which nobody asks anything."""

    async def add(self, adapter: str, folder: Path) -> None:
        """Load nothing."""

    async def drop(self, adapter: str) -> None:
        """Forget nothing."""

    async def sample(self, request: Any) -> Any:
        """Answer nothing."""
        raise NotImplementedError


def tiny(folder: Path) -> Path:
    """A model of one layer with the tokenizer of the tiny example."""
    import transformers

    source = ROOT / "models/tiny-arithmetic"
    config = transformers.AutoConfig.from_pretrained(source)
    config.update({"num_hidden_layers": 1, "max_position_embeddings": 2 * TOKENS})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def config_of(model: Path, work: Path) -> dict[str, Any]:
    """A server's config."""
    return {
        "run": {"folder": str(work), "name": "served"},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"threads_per_rank": 1, "max_tokens_per_micro_batch": LARGEST},
        "serve": {"models": {"tiny": None}, "max_rank": 8, "context_tokens": 2 * TOKENS},
    }


def ranks_alone(config: Any, inputs: Any, stack: ExitStack, logs: Any, *, doing: Any, say: Any, placed: Any) -> Any:
    """Start Ray and the policy's ranks, and no engines (`StartProcesses`)."""
    from megarl.core.protocols import Processes
    from megarl.runs.training_side import POLICY
    from megarl.trainers.start import open_cluster, open_roles
    from megarl.workers.roles import group_requests

    cluster = stack.enter_context(open_cluster(config, group_requests(config), logs))
    placed(cluster.placement)
    roles = open_roles(config, cluster.start_groups(config.run.seed))
    roles.load(POLICY)
    return Processes(roles, None, cluster.platform.name)  # type: ignore[arg-type]


def overhead(work: Path) -> dict[str, Any]:
    """Seconds of the server per million tokens of `forward_backward`, on the wall and of CPU, and of the rank around a pass."""
    from megarl.runs.training_side import POLICY

    rounds: list[dict[str, float]] = []
    with served(work) as (port, roles), ThreadPoolExecutor(16) as threads:
        asking = Asking(port)
        session = asking.json("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
        lora = {"rank": 8, "seed": 1}
        made = asking.json("create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=lora)
        asking.post("retrieve_future", json.dumps({"request_id": made["request_id"]}).encode())
        first = 1
        for number in range(PASSES + 1):
            sent = bodies(made["model_id"], first)
            first += len(sent)
            of_rank, clock = roles.ask(POLICY, CpuSeconds())[0], Clock()
            answers = list(threads.map(asking.passed, sent))
            wall, cpu = clock.seconds()
            rank_cpu = roles.ask(POLICY, CpuSeconds())[0] - of_rank
            assert sum(map(len, answers)) > 4 * DATUMS * TOKENS
            if number:  # the first is slower
                rounds.append({"wall_s": wall, "server_cpu_s": cpu, "rank_cpu_s": rank_cpu})
    millions = DATUMS * TOKENS / 1e6
    per_million = {name: statistics.median(row[name] for row in rounds) / millions for name in rounds[0]}
    return {
        "setup": {"datums": DATUMS, "tokens": TOKENS, "requests": len(sent), "passes": PASSES, "micro_batch_tokens": LARGEST},
        "rounds": rounds,
        "per_million_tokens": per_million,
        "tokens_per_s_below_the_goal": 1e6 * SHARE / (1 - SHARE) / per_million["server_cpu_s"],
    }


# switching models -----------------------------------------------------------------------------------------------------


def switching(work: Path) -> dict[str, Any]:
    """Seconds of giving the place to another model, beside those of a pass and a step; each is a median."""
    from megarl import platform

    platform.install()
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.lora.weight_map import Lora
    from megarl.options.serve.rank_models import RankModels
    from megarl.options.serve.values import AdapterChoice

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    initialize_layout(Layout(), seed=1)
    lora = Lora(RANK, 32.0, targets=("all-linear", "lm_head"))
    role = RankModel(ModelOptions(str(MODEL), Layout(), dtype="float32", lora=lora), OptimizerOptions(lr=1e-5))
    models = RankModels(role, SWITCHED, work / "models")
    for number in range(SWITCHED):
        models.create(f"model{number}", AdapterChoice(RANK, number))
    trained = partial(train, role, models)
    trained(ROWS, ROW_TOKENS)  # what is made once is made here
    in_memory, passes, steps = [], [], []
    for number in range(SWITCHES):
        in_memory.append(timed(partial(models.switch, f"model{number % SWITCHED}")))
        if number < 2:
            of_pass, of_step = trained(ROWS, ROW_TOKENS)
            passes.append(of_pass)
            steps.append(of_step)
    kept = models._kept["model0"]
    kept_bytes = sum(tensor.nbytes for tensor in kept.tensors.values())
    models.live = SWITCHED - ON_DISK  # from here on each switch moves a model to the disk, and one back
    of_disk = [timed(partial(models.switch, f"model{number % SWITCHED}")) for number in range(SWITCHES + ON_DISK)][ON_DISK:]
    one = trained(1, TOKENS)
    torch.distributed.destroy_process_group()
    switch, disk, of_pass, of_step = map(middle, (in_memory, of_disk, passes, steps))
    step = {key: of_pass[key] + of_step[key] for key in of_pass}
    return {
        "setup": {"model": MODEL.name, "rank": RANK, "models": SWITCHED, "rows": ROWS, "row_tokens": ROW_TOKENS},
        "bytes_of_a_model": kept_bytes,
        "switch": switch,
        "switch_by_disk": disk,
        "pass": of_pass,
        "optimizer_step": of_step,
        "switch_of_a_step": {key: switch[key] / (switch[key] + step[key]) for key in switch},
        "switch_by_disk_of_a_step": {key: disk[key] / (disk[key] + step[key]) for key in disk},
        "rank_cpu_s_per_million_tokens": 1e6 * one[0][1] / TOKENS,
    }


def train(role: Any, models: Any, rows: int, tokens: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """A pass over `rows` rows of `tokens` tokens and a step; the seconds of each."""
    from megarl.data.stream import Response, Unit
    from megarl.options.serve.losses import ServedLoss
    from megarl.options.serve.values import AdamParams

    def unit(row: int) -> Unit:
        ids, ones = torch.arange(row, row + tokens) % 4000, torch.ones(tokens)
        return Unit(ids[:1], [Response(row, ids, ones > 0, {"weights": ones})])

    micro_batch, loss = [unit(row) for row in range(rows)], ServedLoss("cross_entropy", {}, rows)
    of_pass = timed(partial(role.update, [micro_batch], loss, applies=False))
    return of_pass, timed(partial(models.optimizer_step, AdamParams()))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """The seconds of a call, on the wall and of CPU."""
    clock = Clock()
    work()
    return clock.seconds()


def middle(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians."""
    return {"wall_s": statistics.median(wall for wall, _ in found), "cpu_s": statistics.median(cpu for _, cpu in found)}


# grouped products -----------------------------------------------------------------------------------------------------


def grouped(work: Path) -> dict[str, Any]:
    """A layer with adapters, forward and backward: rows of several models in one product, over one model after the other."""
    torch.set_num_threads(1)
    cases = [
        {"layer": name, "tokens": tokens, **layer(inputs, outputs, tokens)}
        for name, (inputs, outputs, lengths) in SHAPES.items()
        for tokens in lengths
    ]
    return {"setup": {"rank": RANK, "models": MODELS, "dtype": "float32", "threads": 1, "repeats": REPEATS}, "cases": cases}


def layer(inputs: int, outputs: int, tokens: int) -> dict[str, float]:
    """CPU seconds of both ways in turns (medians), and the ratio."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=draw)
    shapes = (tokens, inputs), (inputs, RANK), (RANK, outputs)
    of_all = [torch.randn(MODELS, *shape, generator=draw).requires_grad_() for shape in shapes]
    of_each = [[part.detach().clone().requires_grad_() for part in whole] for whole in of_all]

    def together() -> Tensor:
        rows, low, high = of_all
        return (rows.view(-1, inputs) @ weight.t()).view(MODELS, tokens, outputs) + torch.bmm(torch.bmm(rows, low), high)

    def alone(number: int) -> Tensor:
        rows, low, high = (parts[number] for parts in of_each)
        return rows @ weight.t() + (rows @ low) @ high

    def one_by_one() -> None:
        for number in range(MODELS):
            alone(number).backward(torch.ones(tokens, outputs))

    assert torch.allclose(together(), torch.stack([alone(number) for number in range(MODELS)]), rtol=1e-3, atol=1e-2)
    found: dict[str, list[float]] = {"grouped": [], "one_by_one": []}
    for number in range(REPEATS + 1):
        for key, work in (
            ("grouped", lambda: together().backward(torch.ones(MODELS, tokens, outputs))),
            ("one_by_one", one_by_one),
        ):
            _, cpu = timed(work)
            found[key] += [cpu] if number else []
            for part in (*of_all, *chain(*of_each)):
                part.grad = None
    seconds = {f"{key}_cpu_s": statistics.median(took) for key, took in found.items()}
    return seconds | {"one_by_one_over_grouped": seconds["one_by_one_cpu_s"] / seconds["grouped_cpu_s"]}
