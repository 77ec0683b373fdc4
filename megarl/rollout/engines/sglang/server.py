"""One SGLang HTTP server as a process tree of its own: started, watched until it answers, and ended without remains.

Assumes Linux. Nothing of SGLang is imported here; the server runs `megarl.rollout.engines.sglang.launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarl.config.secrets import bearer
from megarl.errors import EngineError
from megarl.system.process_tree import end_tree
from megarl.weight_sync.staging import SLICED

HOST = os.environ.get("MEGARL_NODE_ADDRESS", "127.0.0.1")
"""Where servers listen: loopback, or where a job over several nodes says (megarl/launch): ranks elsewhere send weights."""
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 10.0
FREEZE_S = 10.0
WORKING_BYTES = 10 * 2**30
"""What SGLang reserves on a GPU of 60 GB and more for activations and CUDA graphs (0.5.23: arg_groups/memory_hook.py)."""

# Keeps glibc from handing large blocks back to the kernel after every forward pass (docs/DESIGN section 5).
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 27),
}


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with.

    `threads` are CPU cores per tensor-parallel rank, bound to the first cores of this process's affinity (None: all cores
    shared by the ranks). `gpus` are the ranks' GPUs, evenly spaced, by their numbers among those that this process sees; the
    server sees all of these, so that it can open what processes on other GPUs of the node share with it. `max_total_tokens`
    is the size of the KV cache; on a GPU it takes what others (`beside_bytes` on each GPU) and the server's own work leave, or
    what SGLang finds free as it starts (0). `memory_saver` lets `sleep` free GPU memory. `extra` are further SGLang arguments
    by their Python names, which win over those chosen here.
    """

    model_path: str
    log_file: Path
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tp: int = 1
    gpus: tuple[int, ...] = ()
    port: int | None = None
    threads: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    beside_bytes: int = 0
    memory_saver: bool = True
    start_timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, port: int, start_id: str) -> list[str]:
        """SGLang's command line for a server on `port`; `start_id` is what it calls its weights until they have a version."""
        chosen: dict[str, Any] = {
            "model_path": self.model_path,
            "host": HOST,
            "port": port,
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.tp,
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
            elif value is not None and value is not False:
                line += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
        return line

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Environment of the server: `base` and, on a CPU, which cores it may use and how it waits and allocates."""
        here = str(Path(__file__).parents[4])
        chosen = {**base, "PYTHONPATH": os.pathsep.join(filter(None, [here, base.get("PYTHONPATH", "")]))}
        if self.device == "cuda":
            return chosen
        cores = sorted(os.sched_getaffinity(0))
        threads = min(self.threads or max(1, len(cores) // self.tp), len(cores))
        # ranks beyond the machine's cores share them again from the first on
        bound = [[cores[(rank * threads + i) % len(cores)] for i in range(threads)] for rank in range(self.tp)]
        return chosen | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, ids)) for ids in bound),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not take cores from the trainer
            "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_NCCL_SO_PATH": "none",  # a CUDA build of torch brings NCCL along, and ranks that find it want GPUs
            **KEEP_MEMORY,
        }


class SglangServer:
    """One server process tree. `start` returns when it answers; `stop` returns when nothing of it is left.

    It listens on loopback, in a job over several nodes on their network, and answers only who brings `token`.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.token = options, secrets.token_urlsafe(32)
        self.url = self._start_id = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: the port is taken, the process ended, or it did not answer within `start_timeout_s`; the message
                ends with the last lines of the log. Nothing is left running.
        """
        if self._process is not None:
            raise EngineError(f"the SGLang server at {self.url} is already running")
        port = _claim_port(self.options.port)
        self.url = f"http://{HOST}:{port}"
        self._start_id = f"started-{secrets.token_hex(8)}"
        self.options.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.options.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rollout.engines.sglang.launch", *self.options.arguments(port, self._start_id)],
                stdin=subprocess.PIPE,  # closes when this process is gone, and the server ends with it
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.options.environment(os.environ),
                start_new_session=True,
            )
        try:
            self._hand_over_token()
            self._wait_until_it_answers()
            self._freeze_gc()
        except BaseException:
            self.stop()
            raise

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the server must bring."""
        return bearer(self.token)

    def _hand_over_token(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended already, which is said where it is waited for
            self._process.stdin.write(f"{self.token}\n".encode())
            self._process.stdin.flush()

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.options.start_timeout_s
        question = urllib.request.Request(f"{self.url}/model_info", headers=self.headers)
        while True:
            code = self._process.poll()
            if code is not None:
                raise EngineError(f"the SGLang server ended with exit code {code} before it answered; {self.log_tail()}")
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(question, timeout=2) as answer,
            ):
                # another program may have taken the port meanwhile, and it may be a server just like this one
                if json.load(answer).get("weight_version") == self._start_id:
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
            urllib.request.urlopen(request, timeout=FREEZE_S).close()

    @property
    def alive(self) -> bool:
        """Whether the server's main process runs (it ends itself when one of its children dies)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the server's main process, which leads its process group; None when it is not running."""
        return self._process.pid if self._process is not None else None

    def exit_report(self) -> str:
        """How the server's main process ended and the last lines of its log, for error messages."""
        code = self._process.poll() if self._process is not None else None
        ended = "was stopped" if code is None else f"ended with exit code {code}"
        return f"the SGLang server at {self.url} {ended}; {self.log_tail()}"

    def log_tail(self) -> str:
        """`<file> ends with:` and the last lines of the log, for error messages."""
        try:
            lines = self.options.log_file.read_text(errors="replace").splitlines()
        except OSError:
            return f"its log {self.options.log_file} cannot be read"
        return "\n".join([f"{self.options.log_file} ends with:", *lines[-LOG_TAIL_LINES:]])

    def stop(self) -> None:
        """Kill the server and everything it started; returns when every process is gone. There is no state to save."""
        process, self._process = self._process, None
        if process is None:
            return
        end_tree(process.pid)
        process.wait(timeout=STOP_TIMEOUT_S)
        if process.stdin is not None:
            process.stdin.close()


def gpu_bytes() -> int:
    """Memory of the smallest GPU of this machine, asked without taking any of it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return min(int(line) for line in answer.split()) * 2**20


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


def _claim_port(wanted: int | None) -> int:
    """`wanted` if it is free, or a free port of the loopback interface.

    A port of our choice lies below those that the kernel hands out: the server binds it only after its long start.

    Raises:
        EngineError: `wanted` is in use.
    """
    if wanted is not None:
        if not _is_free(wanted):
            raise EngineError(
                f"rollout.servers.port is {wanted}, which is in use on {HOST}; choose a free port or leave it out"
            )
        return wanted
    ceiling = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else 32768
    return next(port for port in iter(lambda: secrets.choice(range(10_000, max(ceiling, 11_000))), None) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
