"""Changes that make SGLang start in a third of the time on a CPU, where imports are most of a start. For SGLang 0.5.23."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

from megarl.rollout.engines.sglang.repairs import architectures_of


def import_models_of(model_path: str) -> None:
    """Let SGLang import the files that define the architectures of the folder `model_path`, instead of all of its 268 models.

    Call it before SGLang is imported. Where no file defines one, SGLang imports all, and its error says what there is.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    files = sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py"))
    class_lines = tuple(f"class {architecture}(" for architecture in architectures_of(model_path))
    unused = [file.stem for file in files if not any(line in file.read_text() for line in class_lines)]
    if len(unused) < len(files):
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused))


def leave_out_unused() -> None:
    """Keep packages out of this process that transformers and accelerate import where they are, and that no server uses."""
    for package in ("megatron", "sklearn", "wandb"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # importing it is an ImportError


def fork_children() -> None:
    """Keep multiprocessing's start method "fork" whatever is asked for: children then have what their parent imported."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None
