"""`megarl doctor`: what is installed, which devices, what `auto` will choose and why, and how to mend what is missing.

Whatever may crash on import (transformer_engine without a GPU, SGLang) is imported in a child process, never here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.markup import escape
from rich.table import Table

from megarl.config.fp8 import RECIPES, device_problem
from megarl.megatron.options import untested_pair
from megarl.observe.summary import machine, versions
from megarl.system.redaction import redacted

GIB = 1024**3
PROBE_DEADLINE_S = 120
FREE_DISK_BYTES = 10 * GIB
FREE_MEMORY_BYTES = 8 * GIB

Health = Literal["ok", "note", "problem"]
NEEDED = ("torch", "megarl", "python", "megatron-core", "ray", "transformers", "numpy", "pydantic", "safetensors")
"""Packages that every run needs; the others of the summary's list are optional."""

# Asks the rooms themselves what they will use, so that doctor cannot tell another story than a run.
_TRAINER_PROBE = """
import json, warnings; warnings.simplefilter("ignore")
from megarl.platform import install
platform = install()
import torch
found = {"platform": platform.name, "torch_cuda": torch.version.cuda}
found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if platform.name == "cuda" else []
from megarl.megatron.optimizer import describe_optimizer
from megarl.megatron.options import OptimizerOptions, choose_layer_spec
found["optimizer"] = describe_optimizer(OptimizerOptions(lr=0.0))
found["layer_spec"] = choose_layer_spec("auto", platform.name)
if platform.name == "cuda":
    found["capability"] = torch.cuda.get_device_capability()
print("PROBE" + json.dumps(found))
"""
_IMPORT_PROBE = "import importlib, sys; importlib.import_module(sys.argv[1]); print('PROBE{}')"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` says what to do about a note or a problem."""

    subject: str
    what: str
    health: Health = "ok"
    fix: str = ""


def examine() -> list[Finding]:
    """Look at this machine; takes some seconds, as the trainer's libraries are imported in a child process."""
    return [
        *_machine_findings(),
        *_version_findings(versions()),
        *_trainer_findings(probe(_TRAINER_PROBE)),
        _transformer_engine_finding(),
        *_sglang_findings(),
        _ray_finding(),
    ]


def is_healthy(findings: list[Finding]) -> bool:
    """Return whether nothing that a run needs is missing."""
    return all(finding.health != "problem" for finding in findings)


def render(findings: list[Finding]) -> Table:
    """The report as a table, each fix under its finding."""
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    table = Table("", "subject", "finding", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(marks[finding.health], finding.subject, escape(redacted(finding.what)))
        if finding.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(redacted(finding.fix))}")  # an extra's brackets are no markup
    return table


def probe(code: str, *arguments: str) -> dict[str, Any]:
    """Run `code` in a fresh Python and return the JSON object that it prints after PROBE, or `{"error": last line}`."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_DEADLINE_S} s"}
    for line in child.stdout.splitlines():
        if line.startswith("PROBE"):
            return json.loads(line.removeprefix("PROBE"))
    lines = child.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit code {child.returncode}"}


def _machine_findings() -> list[Finding]:
    here = machine()
    free_memory = psutil.virtual_memory().available
    free_disk = shutil.disk_usage(Path.cwd()).free
    memory = f"{free_memory / GIB:.1f} of {here['memory_bytes'] / GIB:.1f} GiB free"
    disk = f"{free_disk / GIB:.1f} GiB free here"
    is_tight = free_memory < FREE_MEMORY_BYTES, free_disk < FREE_DISK_BYTES
    return [
        Finding("machine", f"{here['system']}, {here['processor']}, {here['cores']} cores"),
        _noted_if(Finding("memory", memory), "the quickstart needs about 8 GiB; close something", is_noted=is_tight[0]),
        _noted_if(Finding("disk", disk), "checkpoints need room; set run.folder to a larger disk", is_noted=is_tight[1]),
    ]


def _noted_if(finding: Finding, fix: str, *, is_noted: bool) -> Finding:
    return replace(finding, health="note", fix=fix) if is_noted else finding


def _version_findings(found: dict[str, str | None]) -> list[Finding]:
    findings = [Finding("versions", ", ".join(f"{name} {number}" for name, number in found.items() if number))]
    missing = [name for name, number in found.items() if number is None and name in NEEDED]
    if missing:
        findings.append(Finding("packages", f"missing: {', '.join(missing)}", "problem", "make venv, or pip install megarl"))
    optional = {
        "wandb": "pip install 'megarl[wandb]' for trackers.backends=[wandb]",
        "tensorboard": "pip install tensorboard",
        "nixl": "pip install 'megarl[rdma]' for rollout.weight_transport=rdma",
    }
    findings += [
        Finding("packages", f"{name} is not installed (optional)", "note", fix)
        for name, fix in optional.items()
        if found.get(name) is None
    ]
    return findings


def _trainer_findings(found: dict[str, Any]) -> list[Finding]:
    if "error" in found:
        missing = f"megatron-core cannot be imported: {found['error']}"
        return [Finding("trainer", missing, "problem", "make venv; then ask again")]
    is_cuda = found["platform"] == "cuda"
    devices = ", ".join(found["devices"]) if is_cuda else "no CUDA device: training runs on the CPU under Gloo"
    findings = [Finding("devices", devices, *_cuda_hint(found["torch_cuda"], is_cuda=is_cuda))]
    why = {
        "transformer_engine": "there is a GPU and transformer_engine imports",
        "local": "megatron-core's own layers",
        "reference": "there is no GPU" if not is_cuda else "transformer_engine does not import",
    }
    spec = found["layer_spec"]
    layers = Finding("layer spec", f"{spec}: {why[spec]}")
    if is_cuda and spec != "transformer_engine":
        layers = Finding("layer spec", f"{layers.what}; this is slow", "note", "bash requirements/install-gpu.sh")
    return [*findings, layers, _optimizer_finding(found["optimizer"], is_cuda=is_cuda), _fp8_finding(found)]


def _cuda_hint(torch_cuda: str | None, *, is_cuda: bool) -> tuple[Health, str]:
    if is_cuda or not Path("/dev/nvidiactl").exists():
        return "ok", ""
    if torch_cuda is None:
        return "problem", "this machine has an NVIDIA driver, but torch is a CPU build: install a CUDA build of torch"
    fix = "compare nvidia-smi's CUDA version with torch's, and check the container's --gpus"
    return "problem", f"torch cannot use the GPU: {fix}"


def _optimizer_finding(name: str, *, is_cuda: bool) -> Finding:
    if name.startswith("transformer_engine"):
        return Finding("optimizer", f"{name}: megatron-core prefers transformer_engine's fused Adam")
    if name.startswith("apex"):
        return Finding("optimizer", f"{name}: transformer_engine is missing, apex is the next choice")
    text = f"{name}: neither transformer_engine nor apex is there"
    if not is_cuda:
        return Finding("optimizer", f"{text}, and on a CPU neither is needed")
    return Finding("optimizer", text, "note", "bash requirements/install-gpu.sh, for fused Adam")


def _fp8_finding(found: dict[str, Any]) -> Finding:
    """The values of model.fp8_recipe that can run here."""
    if found["platform"] != "cuda":
        return Finding("FP8", "none: there is no GPU")
    if found["layer_spec"] != "transformer_engine":
        return Finding("FP8", "none: only transformer_engine has it")
    capability = tuple(found["capability"])
    problems = {recipe: device_problem(recipe, capability, found["torch_cuda"]) for recipe in RECIPES}
    can = [recipe for recipe, problem in problems.items() if problem is None]
    here = f"compute capability {capability[0]}.{capability[1]}, CUDA {found['torch_cuda']}"
    lacking = "".join(f"; {recipe} needs {RECIPES[recipe].gpus}" for recipe in RECIPES if recipe not in can)
    return Finding("FP8", f"{', '.join(can) or 'none'} ({here}){lacking}")


def _transformer_engine_finding() -> Finding:
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("transformer_engine", "not installed (used only with a GPU)")
    result = probe(_IMPORT_PROBE, "transformer_engine.pytorch")
    if "error" in result:
        fix = "expected without a GPU; with one, reinstall it for this torch and CUDA"
        return Finding("transformer_engine", f"installed, but does not import: {result['error']}", "note", fix)
    untested = untested_pair("transformer_engine", versions()["megatron-core"] or "0.0")
    return Finding("transformer_engine", f"imports; {untested}" if untested else "imports", "note" if untested else "ok")


def _sglang_findings() -> list[Finding]:
    if importlib.util.find_spec("sglang") is None:
        missing = "SGLang is not installed; rollout.engine may still be 'embedded'"
        return [Finding("rollouts", missing, "note", "make venv installs it")]
    if importlib.util.find_spec("sgl_kernel") is not None:
        return [Finding("rollouts", "SGLang with its GPU kernels")]
    side_folder = Path(sys.prefix) / "sglang-cpu"
    if not (side_folder / "torchvision").is_dir():
        fix = f"pip install --no-deps --target {side_folder} torchvision==0.28.0"
        return [Finding("rollouts", f"SGLang on the CPU needs torchvision in {side_folder}", "problem", fix)]
    findings = [Finding("rollouts", f"SGLang is installed for the CPU, its torchvision in {side_folder}")]
    if importlib.util.find_spec("torchvision") is not None:
        fix = "pip uninstall torchvision; SGLang's server finds its own copy"
        findings.append(Finding("torchvision", "is in this environment, where it breaks transformers on a CPU", "problem", fix))
    return findings


def _ray_finding() -> Finding:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return Finding("ray", f"runs join the cluster at {address} (RAY_ADDRESS)")
    return Finding("ray", "runs start a local Ray that ends with them (RAY_ADDRESS is not set)")
