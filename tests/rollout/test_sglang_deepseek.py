"""SGLang with DeepSeek-V3 on a CPU: latent attention, shared experts, and what it derives from weights after an update."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megarl.errors import EngineError
from megarl.models.deepseek_v3 import READ_BY_SGLANG
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.weights.checksums import EngineLayout, check_model
from megarl.weights.group_sender import GroupSender
from megarl.weights.sglang_senders import ServerEndpoint, TensorSender
from megarl.weights.staging import StagedSlices
from tests.families.settings import DEEPSEEK
from tests.models.test_transformers_names import other_values, take_an_update_in_bfloat16, update
from tests.rollout.tiny import Weights, largest_difference

PROMPTS = [[5, 6, 7, 8], [100, 9, 10, 11, 12, 13], [40, 41]]
SIZES = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
MISSING = "model.layers.1.self_attn.kv_b_proj.weight"


def build(folder: Path, tp: int = 1, **settings: Any) -> Path:
    """A random model whose widths SGLang shares among `tp` ranks on a CPU without padding; its first layer is dense."""
    widths = {"intermediate_size": 64 * tp, "moe_intermediate_size": 32 * tp, "tie_word_embeddings": False}
    config = transformers.DeepseekV3Config(**SIZES | DEEPSEEK | widths | READ_BY_SGLANG | settings, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def with_weights(folder: Path, weights: Weights, to: Path) -> Any:
    """The model of `folder` in transformers, in float32, with other weights."""
    write_hf_folder(to, weights, HFFolder(folder).config)
    return AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)


async def update_by_group(engine: SglangEngine, weights: Weights, version: int) -> None:
    """An update over process groups with the engine's ranks."""
    await engine.begin_update(version)
    with GroupSender(engine.endpoint, timeout_s=60) as sender:
        await asyncio.to_thread(sender.send, weights)
        await engine.end_update(version, sender.checksums())


PLAIN = {"n_group": 1, "n_shared_experts": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WITHOUT_QUERY_LATENTS = {"q_lora_rank": None}
ALL = {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ranks", "arguments"),
    [
        pytest.param({}, 2, {}, id="tp2"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.exhaustive)
            for name, case in {
                "tp1, plain": (PLAIN, 1, {}),
                "tp1, no query latents": (WITHOUT_QUERY_LATENTS, 1, {}),
                "tp2, no query latents": (WITHOUT_QUERY_LATENTS, 2, {}),
                "tp2, ep2": ({}, 2, {"ep_size": 2}),
                "tp1, dp2": ({}, 2, {"dp_size": 2, "enable_dp_attention": True}),
                "tp1, dp2, ep2, plain": (PLAIN, 2, ALL),
                "tp2, dp2, ep2, no query latents": (WITHOUT_QUERY_LATENTS, 4, ALL),
            }.items()
        ),
    ],
)
def test_after_an_update_log_probs_are_those_of_transformers_with_these_weights(
    settings: dict[str, Any], ranks: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Attention computes with copies of kv_b_proj that SGLang derives, so log-probs tell whether these are the new weights."""
    folder = build(tmp_path / "model", ranks, **settings)
    first = other_values(folder)
    second = [(name, weight.flip(0).contiguous()) for name, weight in first]
    references = [with_weights(folder, weights, tmp_path / name) for name, weights in (("1", first), ("2", second))]
    sizes = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8}
    options = ServerOptions(str(folder), tmp_path / "log", tp=ranks, extra=arguments, **sizes, start_timeout_s=400)  # type: ignore[arg-type]

    async def scenario() -> None:
        engine = await SglangEngine.open(options)
        try:
            sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
            for version, (weights, send) in enumerate(((first, update), (second, update_by_group)), 1):
                await send(engine, weights, version)
                groups = await engine.generate(EngineRequest(PROMPTS, sampling, n=2))
                differences = [largest_difference(reference, PROMPTS, groups) for reference in references]
                assert differences[version - 1] < 1e-5
                assert differences[2 - version] > 1e-2
            with pytest.raises(EngineError, match=rf"0 differ, {ranks} missing.*nobody sent {MISSING}@0"):
                await update(engine, [pair for pair in first if pair[0] != MISSING], 3)
            assert engine.weight_version is None
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_beside_weights_in_bfloat16_the_expert_bias_is_sent_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang holds it so; a bias that was rounded on the way would pick other experts."""
    sent: dict[str, torch.dtype] = {}

    def deliver(sender: TensorSender, staged: StagedSlices) -> None:
        sent.update((held.tensor, tensor.dtype) for held, tensor in staged.pieces)

    monkeypatch.setattr(TensorSender, "deliver", deliver)
    folder = build(tmp_path / "model")
    layout = EngineLayout.of_model(folder, "bfloat16")
    TensorSender(ServerEndpoint("http://engine", layout, "token")).send(other_values(folder))
    kept = {name for name, dtype in sent.items() if dtype == torch.float32}
    assert kept == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert set(sent.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.slow
@pytest.mark.exhaustive  # the dtypes that are sent are in the test before
def test_in_bfloat16_every_rank_holds_what_was_sent(tmp_path: Path) -> None:
    take_an_update_in_bfloat16(build(tmp_path / "model"), tmp_path / "log")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write_config(folder: Path, **settings: Any) -> Path:
    """A folder with nothing but the config of a model; fields that are None are left out."""
    folder.mkdir()
    fields = SIZES | DEEPSEEK | READ_BY_SGLANG | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({key: v for key, v in (fields | settings).items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"moe_layer_freq": None, "scoring_func": None}, "must say moe_layer_freq = 1, scoring_func = 'sigmoid'"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"quantization_config": FP8, "q_lora_rank": 20}, "q_lora_rank = 20 must be a multiple of 128"),
    ],
)
def test_a_config_that_sglang_does_not_serve_is_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"cannot serve the model.*{why}"):
        check_model(write_config(tmp_path / "model", **settings), device="cuda")


@pytest.mark.parametrize("settings", [{}, {"q_lora_rank": None}, {"quantization_config": FP8, "q_lora_rank": 256}])
def test_on_a_gpu_models_with_and_without_fp8_are_served(settings: dict[str, Any], tmp_path: Path) -> None:
    check_model(write_config(tmp_path / "model", **settings), device="cuda")


def test_the_published_model_is_served_on_gpus() -> None:
    """The folder of the plans in examples/plans."""
    check_model(Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3", device="cuda")


def test_the_server_is_told_to_keep_shared_experts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA SGLang would put them among the routed ones; what a run says in rollout.engine_args wins."""
    started: list[ServerOptions] = []
    monkeypatch.setattr(SglangServer, "start", lambda server: started.append(server.options))
    for extra in ({}, {"disable_shared_experts_fusion": False}):
        folder = write_config(tmp_path / f"model-{len(extra)}")
        asyncio.run(SglangEngine.open(ServerOptions(str(folder), tmp_path / "log", device="cuda", extra=extra)))
    assert [options.extra for options in started] == [
        {"disable_shared_experts_fusion": True},
        {"disable_shared_experts_fusion": False},
    ]
