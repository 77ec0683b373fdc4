"""One SGLang HTTP server, on one node or on several: started, watched until it answers, and ended without remains.

On every node there is one process tree (`server_process.py`); the one of the first node answers, and the engine owns it. The
others' are started where they belong by `OtherNode`s, and end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from megarl.config.secrets import bearer
from megarl.errors import EngineError
from megarl.models.adapters import AdapterSpec
from megarl.rollout.engines.sglang.server_process import ServerProcess, claim_port, host, log_tail
from megarl.system.http_requests import AnswerError, open_url, parsed, read_answer
from megarl.weights.staging import SLICED

FREEZE_S = 10.0
LEADER_PORTS = 8
"""Free ports, one after the other, where ranks of an engine on several nodes meet."""
WORKING_BYTES = 10 * 2**30
"""Bytes that SGLang reserves on a GPU of 60 GB and more for activations and CUDA graphs (0.5.23: arg_groups/memory_hook.py)."""

SEVERAL = ("lora_target_modules",)
"""Arguments whose values follow one after the other."""

# Keeps glibc from handing large blocks back to the kernel after every forward pass.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 27),
}


@dataclass(frozen=True)
class ServerOptions:
    """Options that a server is started with.

    `threads` are CPU cores per tensor-parallel rank (None: all cores shared by the ranks), bound to those of this process's
    affinity from the `first_core`-th on. `gpus` are the GPUs of the ranks on this node, evenly spaced, by their numbers
    among those that this process sees; the server sees all of these, so that it can open what processes on other GPUs of
    the node share with it. `other_nodes` are the GPUs on each further node, equally many; `node` is this node's number
    among them all and `leader` the address at which its ranks meet those of the others, which is chosen at the start.
    `max_total_tokens` is the size of the KV cache; on a GPU it takes what others (`beside_bytes` on each GPU) and the
    server's own work leave, or what SGLang finds free as it starts (0). `memory_saver` lets `sleep` free GPU memory.
    `updates_draft`: the layer for multi-token prediction that it drafts with comes with the policy's weights. `lora`:
    adapters that the server adds, which come with every update. `extra` are further SGLang arguments by their Python names,
    which win over those chosen here.
    """

    model_path: str
    log_file: Path
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tp: int = 1
    gpus: tuple[int, ...] = ()
    other_nodes: tuple[tuple[int, ...], ...] = ()
    node: int = 0
    leader: str | None = None
    port: int | None = None
    threads: int | None = None
    first_core: int = 0
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    beside_bytes: int = 0
    memory_saver: bool = True
    start_timeout_s: float = 300.0
    media_folder: Path | None = None
    updates_draft: bool = False
    lora: AdapterSpec | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, port: int, start_id: str) -> list[str]:
        """SGLang's command line for a server on `port`; `start_id` is what it calls its weights until they have a version."""
        chosen: dict[str, Any] = {
            "model_path": self.model_path,
            "host": host(),
            "port": port,
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.tp,
            "nnodes": self.nodes if self.nodes > 1 else None,
            "node_rank": self.node if self.nodes > 1 else None,
            "dist_init_addr": self.leader,
            "weight_version": start_id,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "skip_server_warmup": True,  # the first real request does the same work
            "sleep_on_idle": True,  # else the scheduler burns a core while training runs
            "max_total_tokens": self.max_total_tokens,
            "max_running_requests": self.max_running_requests,
            "custom_weight_loader": SLICED,
            "log_level": "warning",
        }
        if self.device == "cpu":
            chosen |= {"attention_backend": "torch_native", "disable_overlap_schedule": True}
            chosen["disable_hybrid_swa_memory"] = True  # torch_native looks for windows where the other layers have their cache
        else:
            chosen |= {"enable_memory_saver": self.memory_saver}
            if self.beside_bytes and "mem_fraction_static" not in self.extra:
                chosen["mem_fraction_static"] = static_fraction(gpu_bytes(), self.beside_bytes)
            if self.gpus:  # SGLang's rank r takes GPU base_gpu_id + r * gpu_id_step (0.5.23: entrypoints/engine.py)
                step = self.gpus[1] - self.gpus[0] if len(self.gpus) > 1 else 1
                chosen |= {"base_gpu_id": self.gpus[0], "gpu_id_step": step}
        chosen |= self.extra
        line: list[str] = []
        for name, value in chosen.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                line.append(flag)
            elif name in SEVERAL:
                line += [flag, *map(str, value)]
            elif value is not None and value is not False:
                line += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
        return line

    @property
    def nodes(self) -> int:
        """Nodes that the engine is on."""
        return 1 + len(self.other_nodes)

    def on_node(self, node: int, leader: str) -> ServerOptions:
        """The options of the engine's process on its `node`-th node; the first one's ranks meet the others' at `leader`."""
        log = self.log_file.with_stem(f"{self.log_file.stem}-node-{node}") if node else self.log_file
        gpus = (self.gpus, *self.other_nodes)[node]
        return replace(self, gpus=gpus, node=node, leader=leader, log_file=log, port=self.port if node == 0 else None)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Environment of the server: `base` and, on a CPU, which cores it may use and how it waits and allocates."""
        here = str(Path(__file__).parents[4])
        chosen = {**base, "PYTHONPATH": os.pathsep.join(filter(None, [here, base.get("PYTHONPATH", "")]))}
        # by default features of pictures outlive the weights that made them: flushing the cache leaves them (0.5.23)
        chosen |= {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
        if self.device == "cuda":
            return chosen
        cores = sorted(os.sched_getaffinity(0))
        threads = min(self.threads or max(1, len(cores) // self.tp), len(cores))
        # ranks beyond the machine's cores share them again from the first on
        starts = range(self.first_core, self.first_core + self.tp * threads, threads)
        bound = [[cores[(start + i) % len(cores)] for i in range(threads)] for start in starts]
        return chosen | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, ids)) for ids in bound),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not take cores from the trainer
            "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_NCCL_SO_PATH": "none",  # a CUDA build of torch brings NCCL along, and ranks that find it want GPUs
            # ranks ask for the machine's free memory one after another, which others use meanwhile
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            **KEEP_MEMORY,
        }


class OtherNode(Protocol):
    """A further node of an engine, as the process on its first node reaches it."""

    def start(self, options: ServerOptions) -> None:
        """Start the engine's process there, in place of one that is left from before; raises EngineError if that fails."""

    def wait(self) -> str:
        """Wait until that process has ended, or its node is lost; returns what is known of its end."""

    def stop(self) -> None:
        """End that process, if the node is still there."""


class SglangServer:
    """One server. `start` returns when it answers; `stop` returns when nothing of it is left.

    It listens on loopback, in a run over several machines on their network, and answers only who brings `token`.
    """

    def __init__(self, options: ServerOptions, others: Sequence[OtherNode] = ()) -> None:
        assert len(others) == len(options.other_nodes), "every further node is reached by somebody"
        self.options, self.others, self.token = options, others, secrets.token_urlsafe(32)
        self.url = self._start_id = ""
        self._process: ServerProcess | None = None
        self._lost: str | None = None
        """How the process on another node ended, if that is why this one is gone."""

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: the port is taken, a process ended, or it did not answer within `start_timeout_s`; the message
                ends with the last lines of the log. Nothing is left running.
        """
        if self._process is not None:
            raise EngineError(f"the SGLang server at {self.url} is already running")
        port = claim_port(self.options.port)
        self.url = f"http://{host()}:{port}"
        self._start_id = f"started-{secrets.token_hex(8)}"
        self._lost = None
        options = self.options
        try:
            if self.others:
                # with DP attention SGLang takes the next ports for its own messages (0.5.23: PortArgs.init_new)
                options = options.on_node(0, f"{host()}:{claim_port(count=LEADER_PORTS)}")
                for node, other in enumerate(self.others, 1):
                    other.start(self.options.on_node(node, str(options.leader)))
            arguments = options.arguments(port, self._start_id)
            process = ServerProcess(arguments, options.environment(os.environ), options.log_file, self.token)
            self._process = process
            for node, other in enumerate(self.others, 1):
                threading.Thread(target=self._end_with, args=(process, node, other), daemon=True).start()
            self._wait_until_it_answers(process)
            self._freeze_gc()
        except BaseException:
            self.stop()
            raise

    def _end_with(self, process: ServerProcess, node: int, other: OtherNode) -> None:
        """End this node's process when that of another one has ended: what is left would wait for it."""
        report = other.wait()
        if self._process is process:
            self._lost = f"its process on node {node} ended: {report}"
            process.kill()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request to the server."""
        return bearer(self.token)

    def _wait_until_it_answers(self, process: ServerProcess) -> None:
        deadline = time.monotonic() + self.options.start_timeout_s
        question = urllib.request.Request(f"{self.url}/model_info", headers=self.headers)
        while True:
            if process.code is not None:
                if self._lost is not None:
                    raise EngineError(self.exit_report())
                raise EngineError(
                    f"the SGLang server ended with exit code {process.code} before it answered; {self.log_tail()}"
                )
            with (
                contextlib.suppress(OSError, AnswerError, AttributeError),
                open_url(question, 2) as answer,
            ):
                # another program may have taken the port meanwhile, and it may be a server just like this one
                if parsed(read_answer(answer)).get("weight_version") == self._start_id:
                    return
            if time.monotonic() > deadline:
                limit_s = self.options.start_timeout_s
                raise EngineError(f"the SGLang server at {self.url} did not answer within {limit_s:g} s; {self.log_tail()}")
            time.sleep(0.1)

    def _freeze_gc(self) -> None:
        """Spare what lives since the start from collections, of which every update makes one: 0.4 s.

        The server asks itself for this when it starts, often before it listens.
        """
        request = urllib.request.Request(f"{self.url}/freeze_gc", data=b"", headers=self.headers)
        with contextlib.suppress(OSError):  # it costs time only
            open_url(request, FREEZE_S).close()

    @property
    def alive(self) -> bool:
        """Return whether the server's main process runs (it ends when one of its children, or its process on another
        node, ends)."""
        return self._process is not None and self._process.code is None

    @property
    def pid(self) -> int | None:
        """Process id of the server's main process, which leads its process group; None when it is not running."""
        return self._process.pid if self._process is not None else None

    def exit_report(self) -> str:
        """Describe the end of the server's main process and the last lines of its log, for error messages."""
        if self._lost is not None:
            return f"the SGLang server at {self.url} was stopped: {self._lost}"
        code = self._process.code if self._process is not None else None
        ended = "was stopped" if code is None else f"ended with exit code {code}"
        return f"the SGLang server at {self.url} {ended}; {self.log_tail()}"

    def log_tail(self) -> str:
        """`<file> ends with:` and the last lines of the log, for error messages."""
        return log_tail(self.options.log_file)

    def stop(self) -> None:
        """End the server on all its nodes; returns when every process is gone. There is no state to save.

        A start that waits for the server in another thread raises EngineError then.
        """
        process, self._process = self._process, None
        for other in self.others:
            other.stop()
        if process is not None:
            process.kill()


class NodeProcess:
    """The process of an engine on a further node, for the process that starts it there."""

    def __init__(self, options: ServerOptions) -> None:
        self.log_file = options.log_file
        arguments = options.arguments(claim_port(), "on another node")
        self._process = ServerProcess(arguments, options.environment(os.environ), self.log_file, secrets.token_urlsafe(32))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait(self) -> str:
        """Wait as `OtherNode.wait` does."""
        return f"exit code {self._process.wait()}; {log_tail(self.log_file)}"

    def stop(self) -> None:
        """End it; returns when nothing of it is left."""
        self._process.kill()


def gpu_bytes() -> int:
    """Memory of the smallest GPU of this machine."""
    return min(map(int, _of_gpus("memory.total"))) * 2**20


def compute_capability() -> tuple[int, int]:
    """The highest one of this machine's GPUs."""
    return max((int(major), int(minor)) for major, minor in (capability.split(".") for capability in _of_gpus("compute_cap")))


def _of_gpus(quantity: str) -> list[str]:
    """A quantity of each GPU of this machine, asked without taking any of them."""
    command = ["nvidia-smi", f"--query-gpu={quantity}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def static_fraction(total: int, beside: int) -> float:
    """The share of a GPU of `total` bytes for weights and KV cache (SGLang's `mem_fraction_static`) that leaves `beside` bytes.

    Raises:
        EngineError: nothing would be left.
    """
    fraction = round(1 - (beside + WORKING_BYTES) / total, 3)
    if fraction <= 0:
        raise EngineError(
            f"of the {total / 2**30:.1f} GiB of a GPU the trainer keeps {beside / 2**30:.1f} and an SGLang server works in "
            f"{WORKING_BYTES / 2**30:.0f}: none is left for the KV cache; policy.layout.tp must be larger"
        )
    return fraction
