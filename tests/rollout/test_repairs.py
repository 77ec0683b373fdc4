"""SGLang's mistakes are mended in the processes that it spawns, too."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.test_sglang_seeing import served_folder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")

SPAWNED = """
import multiprocessing.spawn, sys
from pathlib import Path
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(sys.prefix) / "sglang-cpu")
multiprocessing.spawn.prepare({"init_main_from_name": "megarl.rollout.engines.sglang.launch", "sys_argv": sys.argv})
from sglang.srt.models.glm4v import LayerNorm
print(LayerNorm(4).variance_epsilon)
"""
"""What multiprocessing does at the start of a spawned child of the server."""


MULTIPLIER = """
import sys, torch
from pathlib import Path
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(sys.prefix) / "sglang-cpu")
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding
torch.set_default_dtype(torch.bfloat16)
print(Gemma3TextScaledWordEmbedding(3, 4, 0, embed_scale=2560**0.5).embed_scale)
"""


LIMITS = """
import sys
from pathlib import Path
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(sys.prefix) / "sglang-cpu")
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.utils.hf_transformers import get_processor
print(get_processor(sys.argv[-1]).image_processor.size["shortest_edge"])
"""


ROUTER = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(sys.prefix) / "sglang-cpu")
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.models.ernie4 import MoEGate
torch.set_default_dtype(torch.bfloat16)
gate = MoEGate(SimpleNamespace(moe_num_experts=4, hidden_size=8))
torch.nn.init.normal_(gate.weight)
tokens = torch.randn(3, 8)
exact = torch.equal(gate(tokens), tokens.float() @ gate.weight.float().T)
print(gate.weight.dtype, gate.e_score_correction_bias.dtype, exact)
"""


def test_ernies_experts_are_scored_in_float32(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Ernie4_5_MoeForCausalLM"]}))
    ended = subprocess.run([sys.executable, "-c", ROUTER, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "torch.bfloat16 torch.float32 True"


def test_pictures_of_qwen2_vl_have_the_limits_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served_folder("qwen2_vl", tmp_path / "model", monkeypatch)
    ended = subprocess.run([sys.executable, "-c", LIMITS, str(tmp_path / "model")], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1]) == 4 * 14**2


@pytest.mark.exhaustive
def test_embeddings_of_gemma_have_the_multiplier_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    ended = subprocess.run([sys.executable, "-c", MULTIPLIER, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.splitlines()[-1]) == 50.5  # of 50.596


@pytest.mark.parametrize(("architecture", "epsilon"), [("Glm4vMoeForConditionalGeneration", 1e-5), ("LlamaForCausalLM", 1e-6)])
def test_a_spawned_child_has_the_epsilon_of_glms_merger(architecture: str, epsilon: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    command = [sys.executable, "-c", SPAWNED, "--model-path", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.splitlines()[-1]) == epsilon
