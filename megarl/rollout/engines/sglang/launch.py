"""Entry point of the SGLang server process: `python -m megarl.rollout.engines.sglang.launch <SGLang's own arguments>`.

The first line of its standard input is the token that every request must bring: there, unlike among the arguments, nobody
else on the machine reads it. The process ends with all its children as soon as that pipe closes, that is when the process
that started it is gone, however it went.

On CUDA SGLang spawns its children, which import everything again, this file first. On a CPU they are forked: what is
imported, and the stand-ins, hold in all of them.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path

from megarl.models.adapters import adapter_part
from megarl.option_list import functions
from megarl.rollout.engines.sglang import repairs, text_stops
from megarl.system.process_tree import end_tree


def _read_token() -> str:
    """The first line of standard input; ends the process if its parent is gone already."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    return line.decode().strip()


def _end_with_parent() -> None:
    """Wait until standard input closes, then end this process and every child SGLang made."""
    while os.read(0, 4096):
        pass
    end_tree(os.getpid(), spare_root=True)
    os._exit(1)


_ADAPTERS = "--enable-lora"
_BY_NAME = "--max-loaded-loras"
"""Servers with this argument load adapters by name; others have one place, for those of the policy."""
_CPU_BACKEND = ("--lora-backend", "torch_native")


def _prepare_for_cpu(arguments: list[str]) -> None:
    """Prepare what SGLang needs on a CPU before it is imported, and what makes it start and decode faster there; `arguments`
    get those that it needs there."""
    from megarl.rollout.engines.sglang.on_cpu import cuda_only, quick_start, stand_ins

    model_path = _model_path(arguments)
    stand_ins.install(Path(sys.prefix) / "sglang-cpu")
    quick_start.import_models_of(model_path)
    quick_start.leave_out_unused()
    quick_start.fork_children()
    attention = importlib.import_module("megarl.rollout.engines.sglang.on_cpu.attention")
    importlib.import_module("megarl.rollout.engines.sglang.on_cpu.drawing").install()
    names = repairs.architectures_of(model_path)
    if any(name.startswith("GptOss") for name in names):
        attention.allow_sinks()
    if any(name.startswith("Exaone") for name in names):
        attention.allow_windows()
    cuda_only.install()
    if _ADAPTERS in arguments:
        adapter_part("served").allow_on_cpu()
        if _CPU_BACKEND[0] not in arguments:
            arguments += _CPU_BACKEND


def _model_path(arguments: list[str]) -> str:
    return arguments[arguments.index("--model-path") + 1]


def _install(arguments: list[str]) -> None:
    """Install what every process of the server needs before it makes the model."""
    repairs.install(_model_path(arguments))
    text_stops.install()
    if _ADAPTERS in arguments and _BY_NAME not in arguments:
        adapter_part("served").install()
    for install in functions("sglang_process", "install"):
        install(arguments)


def main(arguments: list[str]) -> None:
    """Serve until killed; `arguments` are those of `sglang serve`. Children never outlive this process."""
    token = _read_token()
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _prepare_for_cpu(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    _install(arguments)
    try:
        run_server(prepare_server_args([*arguments, f"--api-key={token}"]))  # a token may begin with a dash
    finally:
        end_tree(os.getpid(), spare_root=True)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # in a spawned child
    _install(sys.argv)
