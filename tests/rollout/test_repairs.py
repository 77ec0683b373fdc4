"""SGLang's mistakes are mended in the processes that it spawns, too."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.test_sglang_seeing import served_folder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")

FORKING = """
import json, os, sys, traceback
from pathlib import Path
from megarl.rollout.engines.sglang.on_cpu import stand_ins
stand_ins.install(Path(sys.prefix) / "sglang-cpu")
import sglang.srt.managers.scheduler, sglang.srt.models.glm4v
from sglang.srt.utils.hf_transformers import get_processor
for line in sys.stdin:
    program, output, *arguments = json.loads(line)
    pid = os.fork()
    if not pid:
        sys.argv, sys.stdout, code = ["-c", *arguments], open(output, "w"), 1
        try:
            exec(program, {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""A process that has imported SGLang, which is most of what follows, and runs each program that it is sent in a fork."""


SPAWNED = """
import multiprocessing.spawn, sys
multiprocessing.spawn.prepare({"init_main_from_name": "megarl.rollout.engines.sglang.launch", "sys_argv": sys.argv})
from sglang.srt.models.glm4v import LayerNorm
print(LayerNorm(4).variance_epsilon)
"""
"""What multiprocessing does at the start of a spawned child of the server."""


MULTIPLIER = """
import sys, torch
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding
torch.set_default_dtype(torch.bfloat16)
print(Gemma3TextScaledWordEmbedding(3, 4, 0, embed_scale=2560**0.5).embed_scale)
"""


LIMITS = """
import sys
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.utils.hf_transformers import get_processor
print(get_processor(sys.argv[-1]).image_processor.size["shortest_edge"])
"""


ROUTER = """
import sys, torch
from types import SimpleNamespace
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


FRESH = """
import sys, torch
from types import SimpleNamespace
from sglang.srt import runtime_context
backup = sys.argv[-2] == "backup"
runtime_context.get_exec = lambda: SimpleNamespace(features=SimpleNamespace(enable_weights_cpu_backup=backup))
from megarl.rollout.engines.sglang import repairs
repairs.install(sys.argv[-1])
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.scheduler_components import weight_updater
from megarl.weights.sglang_places import ModelParameters
model = torch.nn.Module()
fp8 = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
model.attn = RadixAttention(2, 8, 1.0, 2, 0, quant_config=fp8, prefix="attn")
model.attn.quant_method.process_weights_after_loading(model.attn)
model.padded = torch.nn.Parameter(torch.ones(1), requires_grad=False)
model.register_buffer("table", torch.full((1,), 5.0))
state = weight_updater._export_static_state(model)
for tensor in model.state_dict().values():
    tensor.fill_(7.0)  # as pages that another process has used
weight_updater._import_static_state(model, state)
held = (f"{name} {value.item()}" for name, value in sorted(model.state_dict().items()))
print(list(ModelParameters.of(model).tensors), *held)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported SGLang."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKING], text=True, **pipes) as process:
        yield process
        process.kill()


def said(forking: subprocess.Popen[str], program: str, folder: Path, *arguments: str) -> str:
    """The last line that a program prints in a process with SGLang; its errors go where pytest's do."""
    assert forking.stdin is not None
    assert forking.stdout is not None
    print(json.dumps([program, str(folder / "said.txt"), *arguments]), file=forking.stdin, flush=True)
    ended = next(line for line in forking.stdout if line.startswith("ended "))
    assert ended == "ended 0\n"
    return (folder / "said.txt").read_text().splitlines()[-1]


def test_pictures_of_qwen2_vl_have_the_limits_of_their_folder(
    forking: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_folder("qwen2_vl", tmp_path / "model", monkeypatch)
    assert int(said(forking, LIMITS, tmp_path, str(tmp_path / "model"))) == 4 * 14**2


@pytest.mark.exhaustive
def test_embeddings_of_gemma_have_the_multiplier_of_transformers(forking: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    assert float(said(forking, MULTIPLIER, tmp_path, str(tmp_path))) == 50.5  # of 50.596


@pytest.mark.parametrize(
    ("backup", "held"),
    [
        ("none", "attn.k_scale 1.0 attn.v_scale 1.0 padded 0.0 table 5.0"),
        ("backup", "attn.k_scale 7.0 attn.v_scale 7.0 padded 7.0 table 5.0"),
    ],
)
def test_a_woken_server_has_what_no_update_sends(
    backup: str, held: str, forking: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The scales of an FP8 model's KV cache are no parameters that an update must fill. A server that keeps a copy in main
    memory has its own content back."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert said(forking, FRESH, tmp_path, backup, str(tmp_path)) == f"['padded'] {held}"


def test_ernies_experts_are_scored_in_float32(forking: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Ernie4_5_MoeForCausalLM"]}))
    assert said(forking, ROUTER, tmp_path, str(tmp_path)) == "torch.bfloat16 torch.float32 True"


@pytest.mark.parametrize(("architecture", "epsilon"), [("Glm4vMoeForConditionalGeneration", 1e-5), ("LlamaForCausalLM", 1e-6)])
def test_a_spawned_child_has_the_epsilon_of_glms_merger(
    architecture: str, epsilon: float, forking: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert float(said(forking, SPAWNED, tmp_path, "--model-path", str(tmp_path))) == epsilon
