"""SGLang with mixtures of experts: what it holds after an update, and the models that are refused before a server starts."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megarl.config.layout import Layout
from megarl.errors import EngineError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.checksums import UNCHECKED, EngineLayout, check_model
from megarl.weights.plan import LOAD_BYTES
from megarl.weights.rank_plan import WeightSlice
from megarl.weights.sglang_senders import ServerEndpoint, checksums_of
from megarl.weights.staging import StagedSlices
from megarl.workers.senders import plans_for
from tests.families import FAMILIES, build_folder
from tests.models.test_transformers_names import other_values, take_an_update_in_bfloat16
from tests.rollout.updates import holds_what_was_sent

WIDTHS = {
    "mixtral": {"intermediate_size": 64},
    "qwen3_moe": {"intermediate_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": []},
    "glm4_moe": {"intermediate_size": 64, "moe_intermediate_size": 64},
}
"""What SGLang serves on a CPU: widths that it need not pad; it knows no layers without experts but GLM's first ones."""


def served(family: str, folder: Path) -> Path:
    """A random model of `family` that SGLang serves."""
    sizes = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = sizes | FAMILIES[family].settings | WIDTHS[family]
    config = getattr(transformers, f"{FAMILIES[family].class_prefix}Config")(**settings, initializer_range=0.2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "_norm.weight")):
            torch.nn.init.normal_(tensor, mean=float(name.endswith("weight")), std=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "arguments"),
    [
        ("glm4_moe", 2, {}),
        # tests/options/routing_replay/test_sglang_routes.py sends qwen3_moe to one rank
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("qwen3_moe", 1, {}),
                ("mixtral", 2, {}),
                ("mixtral", 2, {"ep_size": 2}),
                ("qwen3_moe", 2, {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True}),
                ("glm4_moe", 2, {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True}),
            )
        ),
    ],
)
def test_after_an_update_every_expert_is_the_one_that_was_sent(
    family: str, tp: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """The reference is transformers, which loads a folder that holds the weights which were sent."""
    folder = served(family, tmp_path / "model")
    weights = other_values(folder)
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folder).config)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "sent", dtype=torch.float32)
    name = next(name for name, _ in weights if ".layers.1." in name and ".experts.3." in name)
    missing = tp // arguments.get("ep_size", 1)
    options = {"tp": tp, "extra": arguments, "start_timeout_s": 400}
    asyncio.run(holds_what_was_sent(folder, tmp_path / "log", weights, after, name, missing, **options))


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/weights/test_sglang_loader.py has the digest
def test_a_router_that_sglang_holds_in_float32_beside_bfloat16_is_the_one_that_was_sent(tmp_path: Path) -> None:
    take_an_update_in_bfloat16(served("glm4_moe", tmp_path / "model"), tmp_path / "log")


def test_on_a_gpu_every_rank_is_sent_its_own_part_of_experts_and_all_checksums_are_compared(tmp_path: Path) -> None:
    folder = served("mixtral", tmp_path / "model")
    layout = EngineLayout.of_model(folder, "float32", 2, "cuda")
    for held in layout.slices.values():
        assert [box.engine_rank for box in held] == [0, 1]
        checksums = checksums_of(StagedSlices([WeightSlice(box, torch.zeros(box.rows, box.cols)) for box in held]))
        assert UNCHECKED not in checksums.values()
    endpoint = ServerEndpoint("http://engine", layout, "token")
    (plan,) = plans_for(endpoint, layout.model, Layout(), engines=1, load_bytes=LOAD_BYTES["cpu"])
    assert plan is not None
    assert plan.taken_whole == []


def test_every_module_of_sglangs_that_holds_experts_says_in_which_order_they_lie() -> None:
    """What `ModelParameters.of` reads of a layer's experts, in the installed source."""
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    layers = Path(package.submodule_search_locations[0], "srt", "layers")
    experts = (layers / "moe" / "fused_moe_triton" / "layer.py").read_text()
    for line in (
        "self.num_fused_shared_experts = num_fused_shared_experts",
        "self.use_triton_kernels = get_moe_runner_backend().is_triton_kernels()",
        "self.use_flashinfer_trtllm_moe = (",
        'return getattr(layer, "weight_load_method", None) or layer.quant_method',
        '"load_up_proj_weight_first",',
        'shard_id = {"w1": "w3", "w3": "w1", "w2": "w2"}[shard_id]',
    ):
        assert line in experts
    assert "self.w13_swiglu_interleaved = False" in (layers / "quantization" / "unquant.py").read_text()


@pytest.mark.parametrize(("head_dim", "is_served"), [(None, True), (8, True), (16, False)])
def test_a_qwen2_whose_heads_are_no_share_of_the_residual_stream_is_refused(
    head_dim: int | None, is_served: bool, tmp_path: Path
) -> None:
    build_folder("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"intermediate_size": 64, "head_dim": head_dim}  # hidden size 32, 4 heads
    config |= {"use_sliding_window": False, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_served:
        check_model(tmp_path)
        return
    with pytest.raises(EngineError, match=r"heads of hidden_size .* = 8 dimensions, whatever head_dim = 16 says"):
        check_model(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_next", "glm4_moe"])
def test_experts_behind_tied_embeddings_are_refused(family: str, tmp_path: Path) -> None:
    """SGLang 0.5.23 makes an output layer that no tensor of such a checkpoint fills."""
    build_folder(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="tie_word_embeddings is true, but SGLang gives the model an output layer of its own"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mixtral", "pads intermediate_size = 24, which must be a multiple of 32"),
        ("deepseek_v3", "must say moe_layer_freq = 1, topk_method = 'noaux_tc', scoring_func = 'sigmoid'"),
        ("qwen3_moe", "mlp_only_layers and decoder_sparse_step"),
        ("glm4_moe-grouped", "tie_word_embeddings is true, but SGLang gives the model an output layer of its own"),
    ],
)
def test_a_model_that_sglang_would_serve_wrongly_is_refused_before_a_server_starts(
    family: str, why: str, tmp_path: Path
) -> None:
    build_folder(family, tmp_path / "model")
    options = ServerOptions(str(tmp_path / "model"), tmp_path / "server.log")
    with pytest.raises(EngineError, match=f"rollout.engine is 'sglang'.*{why}.*must be 'embedded'"):
        asyncio.run(SglangEngine.open(options))
    assert not (tmp_path / "server.log").exists()
