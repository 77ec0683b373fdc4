"""Parts of benchmarks/serving.py that need no engines: the server outside the ranks, switching models, and grouped products.

`overhead`: a server over HTTP with a session's rank under Ray. First passes that the rank answers at once, so that what is left
is the server's: their bodies are made before, as the client cuts them. Then updates of GRPO by the protocol's client and by the
calls of the built-in loop, in turns, on that rank. CPU seconds are those of the server's process, which is also the client's,
and of the rank. `switching`: `RankModels` in this process; `grouped`: products.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from workload import MODEL, ROOT

sys.path.insert(0, str(ROOT))

NAME, LAYERS, UPDATES = "served/base", 6, 2
"""The model's name for clients, its first layers that there are, and pairs of updates."""
DATUMS, TOKENS, PASSES, LARGEST = 1024, 1024, 3, 8192
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


def answer_at_once(role: Any) -> None:
    """A question to each rank, which gets its `RankModel`: its passes answer zeros at once, whatever they are sent."""
    from megarl.options.serve.losses import LOSS
    from megarl.runs.update_metrics import LOG_PROBS

    def update(micro_batches: Any, loss_function: Any, **_: Any) -> dict[str, Any]:
        responses = [response for units in micro_batches for unit in units for response in unit.responses]
        shown = {one.index: torch.zeros(len(one.token_ids), dtype=torch.float64) for one in responses}
        return {LOSS: 0.0, LOG_PROBS: shown}

    role.update = update


def compute_again(role: Any) -> None:
    """A question to each rank: `answer_at_once` is over."""
    del role.update


def cpu_seconds(role: Any) -> float:
    """A question to each rank: the seconds of CPU that its process has used."""
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
    """A server without engines, in this process: its port, and its session."""
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
    from megarl.trainers.inputs import read_inputs

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not know this folder
    file = work / "serve.yaml"
    file.write_text(yaml.safe_dump(config_of(shortened(work, LAYERS), work)))
    config = load(file)
    with ExitStack() as stack:
        inputs = read_inputs(config, train=False)
        stack.callback(inputs.close)
        session = stack.enter_context(Session(config, inputs, ranks_alone))
        session.start(work / "logs")
        options = ServiceOptions(models={NAME: 2 * TOKENS}, scratch=work / "scratch", max_rank=RANK, snapshot_every_s=1e9)
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
            yield listening.getsockname()[1], session
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


def shortened(work: Path, layers: int | None) -> Path:
    """The model's folder, or one with the first of its layers alone."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if layers is None:
        return MODEL
    folder = work / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    left_out = tuple(f"model.layers.{number}." for number in range(layers, config["num_hidden_layers"]))
    with safe_open(MODEL / "model.safetensors", "pt") as tensors:
        kept = {name: tensors.get_tensor(name) for name in tensors.keys() if not name.startswith(left_out)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(model: Path, work: Path) -> dict[str, Any]:
    """A server's config."""
    return {
        "run": {"folder": str(work), "name": "served"},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"threads_per_rank": 1, "max_tokens_per_micro_batch": LARGEST, "share_prefix": True},
        "algorithm": {"name": "grpo"},
        "serve": {"models": {NAME: None}, "max_rank": RANK, "context_tokens": 2 * TOKENS},
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
    without: Any = SimpleNamespace(stale=False, takes_turns=False)
    return Processes(roles, without, cluster.platform.name)


def overhead(work: Path) -> dict[str, Any]:
    """The update of a GRPO step by the API over that of the loop, and the server's seconds per million tokens of passes."""
    from megarl.runs.training_side import POLICY

    with served(work) as (port, session):
        session.roles.ask(POLICY, answer_at_once)
        alone = passes_alone(port, session.roles)
        session.roles.ask(POLICY, compute_again)
        return {**alone, "update": updates(port, session)}


def updates(port: int, session: Any) -> dict[str, Any]:
    """Updates by the protocol's client and by the calls of the built-in loop, in turns, on the same rank."""
    import tinker
    from tinker import types

    from megarl.data.sample import Sample
    from megarl.runs.training_side import POLICY

    service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-local")
    model = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1)
    rows = [[*range(100 + 60 * group, 147 + 60 * group), *range(500 + n, 532 + n)] for n, group in _members()]
    rewards = [float(n % 5) for n, _ in _members()]

    def by_api() -> None:
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": [0.0] * 46 + [-8.0] * 32,
                    "advantages": [0.0] * 46 + [reward - 2.0] * 32,
                },
            )
            for tokens, reward in zip(rows, rewards, strict=True)
        ]
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=1e-5)).result(timeout=600)
        passed.result(timeout=600)

    def by_loop() -> None:
        samples = [
            Sample(str(n), str(group), str(group), rows[n][:47], rows[n][47:], [1] * 32, [-8.0] * 32, [0] * 32, "length")
            for n, group in _members()
        ]
        batch = session.batch(samples)
        session.advantages(batch, rewards)
        session.update(batch)

    found: dict[str, list[dict[str, float]]] = {"api": [], "loop": []}
    for number in range(UPDATES + 1):
        for name, work in (("api", by_api), ("loop", by_loop)):
            of_rank, clock = session.roles.ask(POLICY, cpu_seconds)[0], Clock()
            work()
            wall, cpu = clock.seconds()
            row = {"wall_s": wall, "cpu_s": cpu, "rank_cpu_s": session.roles.ask(POLICY, cpu_seconds)[0] - of_rank}
            found[name] += [row] if number else []  # the first is slower
    holder = service.holder
    if holder._begin_close():
        holder.run_coroutine_threadsafe(holder._async_cleanup()).result(30)
    pairs = [*zip(found["api"], found["loop"], strict=True)]
    both = [[row["cpu_s"] + row["rank_cpu_s"] for row in pair] for pair in pairs]
    return {
        "setup": {"layers": LAYERS or "all", "rank": RANK, "rows": len(rows), "prompt_tokens": 47, "new_tokens": 32},
        "rounds": found,
        "over_loop": statistics.median(api["wall_s"] / loop["wall_s"] for api, loop in pairs),
        "cpu_over_loop": statistics.median(api / loop for api, loop in both),
    }


def _members() -> list[tuple[int, int]]:
    """Numbers of answers, and of the prompt that each is to."""
    return [(number, number // 8) for number in range(16)]


def passes_alone(port: int, roles: Any) -> dict[str, Any]:
    """Seconds of the server per million tokens of `forward_backward`, on the wall and of CPU, and of the rank around a pass."""
    from megarl.runs.training_side import POLICY

    rounds: list[dict[str, float]] = []
    with ThreadPoolExecutor(16) as threads:
        asking = Asking(port)
        session = asking.json("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
        lora = {"rank": 8, "seed": 1}
        made = asking.json("create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora)
        asking.post("retrieve_future", json.dumps({"request_id": made["request_id"]}).encode())
        first = 1
        for number in range(PASSES + 1):
            sent = bodies(made["model_id"], first)
            first += len(sent)
            of_rank, clock = roles.ask(POLICY, cpu_seconds)[0], Clock()
            answers = list(threads.map(asking.passed, sent))
            wall, cpu = clock.seconds()
            rank_cpu = roles.ask(POLICY, cpu_seconds)[0] - of_rank
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


def rank_of_this_process(model: Path) -> Any:
    """The `RankModel` of a layout of one rank, in this process on one thread, with adapters of all layers that have them."""
    from megarl import platform

    platform.install()
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.lora.weight_map import Lora

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    initialize_layout(Layout(), seed=1)
    lora = Lora(RANK, 32.0, targets=("all-linear", "lm_head"))
    return RankModel(ModelOptions(str(model), Layout(), dtype="float32", lora=lora), OptimizerOptions(lr=1e-5))


def switching(work: Path) -> dict[str, Any]:
    """Seconds of giving the place to another model, beside those of a pass and a step; each is a median."""
    role = rank_of_this_process(MODEL)
    from megarl.options.serve.rank_models import RankModels
    from megarl.options.serve.values import AdapterChoice

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
    from megarl.megatron.gathered_updates import gather
    from megarl.options.serve.losses import ServedLoss
    from megarl.options.serve.values import AdamParams

    def unit(row: int) -> Unit:
        ids, ones = torch.arange(row, row + tokens) % 4000, torch.ones(tokens)
        return Unit(ids[:1], [Response(row, ids, ones > 0, {"weights": ones})])

    micro_batch, loss = [unit(row) for row in range(rows)], ServedLoss("cross_entropy", {}, rows)
    of_pass = timed(partial(gather, role, [micro_batch], loss))
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
