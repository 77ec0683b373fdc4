"""Conversion of a random Llama-shaped checkpoint, beside a plain safetensors loop and mbridge on the same files.

    python benchmarks/convert.py --model 1b --rounds 5 --out benchmarks/results/convert_1b.json [--mbridge FOLDER]

Each round runs, one after another and each in a fresh process: the plain loop (`load_file`, `save_file`, per file), `import` to
a distributed checkpoint, `export` back, and mbridge's `load_weights` and `save_weights` (`pip install mbridge==0.15.1 --no-deps
--target FOLDER`). `seconds` is the first call of what is measured, after imports; `process_s` the whole process with them;
`peak_mib`, from one more round, the largest resident memory during the call beyond what was resident before it, all processes
together, mapped files included. The source is in the page cache if memory holds it. Before each measurement dirty pages are
written out and as many pages freed as it will write: on a virtual machine fresh memory is slow. Figures are medians; outputs
are removed after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from measured_code import code_of
from workload import machine

ROOT = Path(__file__).resolve().parent.parent
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")
SHAPES = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, sizes in {
        "tiny": (256, 512, 4, 4, 4096),
        "1b": (2048, 5632, 22, 4, 32000),
        "8b": (4096, 14336, 32, 8, 128256),
    }.items()
}
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 32, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
BLOCK = 16 * 2**20


def make_model(name: str, folder: Path) -> None:
    """Write config.json and random bfloat16 weights in files of at most 5 GB, as a hub checkpoint has them."""
    from megarl.models.registry import architecture_for
    from megarl.models.safetensors_layout import header_and_entries

    config = COMMON | SHAPES[name]
    shapes = architecture_for(config).weight_map(config).hf_shapes()
    files: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for tensor, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if held + nbytes > 5e9:
            files.append({})
            held = 0
        files[-1][tensor] = shape
        held += nbytes
    folder.mkdir(parents=True)
    noise = (torch.randn(BLOCK // 2) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    index = {}
    for number, tensors in enumerate(files):
        file = "model.safetensors" if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        header, entries = header_and_entries((tensor, torch.bfloat16, shape) for tensor, shape in tensors.items())
        with (folder / file).open("wb") as out:
            out.write(header)
            for place, entry in enumerate(entries.values()):
                left, start = entry.nbytes, 2 * (place * 7919 % (BLOCK // 4))  # another stretch of the noise for each tensor
                while left:
                    left -= out.write(noise[start : start + min(left, BLOCK - start)])
                    start = 0
        index |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def plain_loop(source: Path, target: Path) -> Callable[[], None]:
    from safetensors.torch import load_file, save_file

    def run() -> None:
        target.mkdir()
        for file in sorted(source.glob("*.safetensors")):
            save_file(load_file(file), target / file.name, metadata={"format": "pt"})

    return run


def megarl(action: str, source: Path, target: Path, layout: str, workers: int) -> Callable[[], None]:
    import torch.distributed.checkpoint  # noqa: F401  (otherwise imported at the first use)

    from megarl.cli.convert import parse_layout
    from megarl.convert.plan import plan_dist, plan_hf
    from megarl.convert.run import run_plan
    from megarl.convert.sources import open_dist, open_hf

    def run() -> None:
        if action == "import":
            plan = plan_dist("import", open_hf(source), parse_layout(layout), None)
        else:
            plan = plan_hf("export", open_dist(source), None)
        run_plan(plan, target, workers=workers)

    return run


def mbridge(source: Path, target: Path, installed: str) -> Callable[[], None]:
    """mbridge on a megatron-core model with the local layer spec, whose names of norms its mapping gets in addition."""
    sys.path.append(installed)
    from megarl import platform

    platform.install()
    from mbridge.models.llama import LLaMABridge
    from transformers import AutoConfig

    from megarl.config.layout import Layout
    from megarl.megatron.build import build_model, initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.models.hf_folder import HFFolder

    class Bridge(LLaMABridge):
        _OTHER_MAPPING = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}  # noqa: RUF012
        _MLP_MAPPING = LLaMABridge._MLP_MAPPING | {
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
        }

    store = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    initialize_layout(Layout(), seed=0)
    options = ModelOptions(str(source), Layout(), dtype="bfloat16", layer_spec="local", trainable=False)
    chunks = build_model(options, HFFolder(source))
    bridge = Bridge(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)

    def run() -> None:
        with torch.no_grad():
            bridge.load_weights(chunks, str(source))
            bridge.save_weights(chunks, str(target))

    return run


class Memory:
    """The largest resident memory of this process and its children together, sampled every 20 ms."""

    def __init__(self) -> None:
        self.peak = self.base = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        """Proportional set sizes, which count a page that processes share once, and a mapped file as far as it is resident."""
        own = psutil.Process()
        total = 0
        for process in (own, *own.children()):
            with contextlib.suppress(OSError, psutil.Error):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
        return total


def measure_here(arguments: argparse.Namespace) -> None:
    """In a fresh process: make ready, then time the call."""
    source, target = Path(arguments.source), Path(arguments.target)
    if arguments.what == "plain":
        call = plain_loop(source, target)
    elif arguments.what == "mbridge":
        call = mbridge(source, target, arguments.mbridge)
    else:
        call = megarl(arguments.what, source, target, arguments.layout, arguments.workers)
    if arguments.memory:
        with Memory() as memory:
            call()
        print(json.dumps({"peak_mib": (memory.peak - memory.base) / 2**20}))
        return
    started, cpu = time.perf_counter(), os.times()
    call()
    seconds, after = time.perf_counter() - started, os.times()
    print(json.dumps({"seconds": seconds, "cpu_s": sum(after[:4]) - sum(cpu[:4])}))


def measured(what: str, source: Path, target: Path, arguments: argparse.Namespace, *, memory: bool) -> dict[str, float]:
    """One measurement in a process of its own: of its time, or of its memory (watching it slows it down)."""
    command = [sys.executable, __file__, "--what", what, "--source", str(source), "--target", str(target)]
    command += ["--layout", arguments.layout, "--workers", str(arguments.workers), "--mbridge", arguments.mbridge or ""]
    command += ["--memory"] if memory else []
    settle(target.parent, arguments.settle_bytes)
    started = time.perf_counter()
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    return json.loads(answer.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - started}


def settle(folder: Path, nbytes: int) -> None:
    """The same start for everyone: nothing left to be written to the disk, and memory for as many pages just freed."""
    os.sync()
    scratch = folder / "scratch"
    with scratch.open("wb") as file:
        for _ in range(nbytes // BLOCK):
            file.write(bytes(BLOCK))
    scratch.unlink()


def rounds(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every measurement of every round, and the medians."""
    source = work / "hf"
    make_model(arguments.model, source)
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    for file in source.glob("*.safetensors"):  # into the page cache, as far as memory goes
        with file.open("rb") as stream:
            while stream.read(BLOCK):
                pass
    arguments.settle_bytes = min(nbytes, 4 * 10**9)
    found: dict[str, list[dict[str, float]]] = {}
    peaks: dict[str, float] = {}
    for number in range(arguments.rounds + 1):
        steps = [("plain", source, work / "plain"), ("import", source, work / "dist"), ("export", work / "dist", work / "back")]
        if arguments.mbridge:
            steps.append(("mbridge", source, work / "mbridge"))
        for what, read, written in steps:
            figures = measured(what, read, written, arguments, memory=number == arguments.rounds)
            print(number, what, {name: round(value, 2) for name, value in figures.items()}, flush=True)
            if "peak_mib" in figures:
                peaks[what] = figures["peak_mib"]
            else:
                found.setdefault(what, []).append(figures | {"load": os.getloadavg()[0]})
            if what != "import":
                shutil.rmtree(written)
        shutil.rmtree(work / "dist")
    names = ("seconds", "cpu_s", "process_s")
    medians = {what: {name: statistics.median(r[name] for r in runs) for name in names} for what, runs in found.items()}
    for what, peak in peaks.items():
        medians[what]["peak_mib"] = peak
    for figures in medians.values():
        figures["gb_per_s"] = nbytes / 1e9 / figures["seconds"]
        figures["share_of_plain"] = medians["plain"]["seconds"] / figures["seconds"]
    return {"bytes": nbytes, "medians": medians, "rounds": found}


def main() -> None:
    """Run all rounds and write the JSON, or one measurement with --what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="tp=2,pp=2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbridge", default="", help="folder where mbridge is installed")
    parser.add_argument("--work", type=Path, default=None, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    for name in ("--what", "--source", "--target"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what:
        measure_here(arguments)
        return
    before = machine()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        results = rounds(arguments, Path(work))
    versions = {name: version(name) for name in ("torch", "safetensors", "xxhash", "megatron-core")}
    settings = {"model": arguments.model, "layout": arguments.layout, "workers": arguments.workers}
    report = {"settings": settings, "machine": before, "versions": versions, "code": code_of("convert"), **results}
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(json.dumps(report["medians"], indent=1))


if __name__ == "__main__":
    main()
