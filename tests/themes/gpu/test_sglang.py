"""SGLang on a GPU: it samples with the trainer's log-probs, takes weights over CUDA IPC bit for bit, and sleeps.

`MEGARL_TEST_ENGINE_ARGS`, a YAML mapping, gives the servers further arguments: `{attention_backend: triton}`, for example,
where SGLang's own choice is not installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megarl.data.stream import Response, Unit
from tests.themes.gpu.models import role_for, root_mean_square

PROMPTS = [[5, 17, 200, 31], [901, 3, 77, 512, 640, 8]]
ENGINE_ARGS = yaml.safe_load(os.environ.get("MEGARL_TEST_ENGINE_ARGS", "{}"))
TE = {"layer_spec": "transformer_engine", "dtype": "bfloat16", "trainable": False}
MOVED = 0.01
"""What every weight is moved by: more than BF16 rounds away, and it changes every response."""

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


async def opened(folder: Path, log_file: Path, *, memory_saver: bool = False, **extra: Any) -> Any:
    """An engine with the model in `folder`, in BF16; `extra` are further arguments of SGLang."""
    from megarl.rollout.engines.sglang.engine import SglangEngine
    from megarl.rollout.engines.sglang.server import ServerOptions

    options = ServerOptions(
        model_path=str(folder), log_file=log_file, device="cuda", dtype="bfloat16", memory_saver=memory_saver,
        max_total_tokens=8192, extra={"mem_fraction_static": 0.3} | extra | ENGINE_ARGS,
    )  # fmt: skip
    return await SglangEngine.open(options, initial_version=0)


async def sampled(engine: Any) -> list[list[Any]]:
    """Four responses of 32 tokens to each of two prompts."""
    from megarl.rollout.engines.protocol import EngineRequest, SamplingParams

    request = EngineRequest(PROMPTS, SamplingParams(max_new_tokens=32, ignore_eos=True), n=4)
    answers: list[list[Any]] = await engine.generate(request)
    return answers


def differences(role: Any, answers: Sequence[Sequence[Any]]) -> torch.Tensor:
    """The role's log-probs of sampled responses less the engine's."""
    units, engine_log_probs = [], []
    for prompt, of_prompt in zip(PROMPTS, answers, strict=True):
        for answer in of_prompt:
            tokens = torch.tensor(answer.response_ids)
            mask = torch.ones(len(tokens), dtype=torch.bool)
            units.append(Unit(torch.tensor(prompt), [Response(len(units), tokens, mask, {})]))
            engine_log_probs.append(torch.tensor(answer.log_probs))
    found = role.forward([units])
    return torch.cat([found[index][:, 0].float().cpu() for index in sorted(found)]) - torch.cat(engine_log_probs)


def push(role: Any, endpoint: Any, version: int) -> Any:
    """The checksums of the role's weights, sent to an engine over CUDA IPC as a run's only rank sends them."""
    from megarl.config.layout import Layout
    from megarl.megatron.weights import local_shards
    from megarl.models.registry import load_hf_config
    from megarl.options.few_bits.quantise import FormatQuantiser
    from megarl.weights.plan import LOAD_BYTES, bucket_of_load, plan_reshard
    from megarl.weights.pusher import Pusher
    from megarl.weights.rank_plan import RankPlan
    from megarl.weights.sglang_senders import TensorSender

    to, hf_config = endpoint.layout.target, load_hf_config(role.options.path)
    bucket_bytes = bucket_of_load(LOAD_BYTES["cuda"], to)
    format = endpoint.layout.model.format
    plan = RankPlan(plan_reshard(hf_config, Layout(), to, itemsize=2, bucket_bytes=bucket_bytes, format=format), 0)
    pusher = Pusher("test", lambda: torch.cuda.set_device(0))
    pusher.connect(0, lambda: TensorSender(endpoint))
    quantiser = FormatQuantiser(format) if format is not None else None
    shards = local_shards(role.chunks, role.options, role.weight_map, quantiser, at_once=False)
    pushed = pusher.push_loads(plan.loads(shards, {0: None}), {0: None}, version)[0]
    assert pushed.error is None
    return pushed.checksums


@needs_sglang
def test_the_engine_and_the_trainer_agree(rank: None, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    async def sample() -> list[list[Any]]:
        engine = await opened(folder_of("llama"), tmp_path / "engine.log")
        try:
            return await sampled(engine)
        finally:
            await engine.stop()

    # The engine computes in BF16, the trainer here in float32: logits of size 1 to 4 are off by 2^-8 of themselves per layer.
    assert root_mean_square(differences(role_for(folder_of("llama"), trainable=False), asyncio.run(sample()))) < 0.05


@needs_sglang
def test_keys_and_values_of_a_byte_are_scaled_both_ways(rank: None, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=1024, num_key_value_heads=2, initializer_range=0.05, **sizes)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:  # a pair of each key is beyond the format, and no query looks at it
            attention = layer.self_attn
            attention.k_proj.bias.view(2, 64)[:, [3, 35]] = 2000.0
            attention.q_proj.weight.view(4, 64, 256)[:, [3, 35]] = 0.0
            attention.q_proj.bias.view(4, 64)[:, [3, 35]] = 0.0
    model.save_pretrained(tmp_path / "model")

    async def sample() -> list[list[Any]]:
        engine = await opened(tmp_path / "model", tmp_path / "engine.log", kv_cache_dtype="fp8_e4m3", megarl_kv_scales=True)
        try:
            return await sampled(engine)
        finally:
            await engine.stop()

    off = []
    for prompt, group in zip(PROMPTS, asyncio.run(sample()), strict=True):
        for answer in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer.response_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids)[:, None])[:, 0]
            off.append(expected - torch.tensor(answer.log_probs))
    assert root_mean_square(torch.cat(off)) < 0.12  # rounding is 0.04; keys that stay divided by 16 are off by 0.5


@needs_sglang
def test_weights_arrive_bit_for_bit_and_a_sleeping_engine_gives_its_memory_back(
    transformer_engine: Any, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    role = role_for(folder_of("llama"), **TE)

    async def sync(engine: Any, version: int) -> None:
        await engine.begin_update(version)
        checksums = await asyncio.to_thread(push, role, engine.endpoint, version)
        await engine.end_update(version, checksums)  # compares them with what the server's parameters hold

    async def run() -> tuple[list[float], list[int]]:
        engine = await opened(folder_of("llama"), tmp_path / "engine.log", memory_saver=True)
        try:
            off, free = [root_mean_square(differences(role, await sampled(engine)))], [torch.cuda.mem_get_info()[0]]
            for chunk in role.chunks:
                for parameter in chunk.parameters():
                    parameter.data.add_(MOVED * torch.randn_like(parameter))
            off.append(root_mean_square(differences(role, await sampled(engine))))
            await sync(engine, 1)
            off.append(root_mean_square(differences(role, await sampled(engine))))
            await engine.sleep()
            free.append(torch.cuda.mem_get_info()[0])
            await engine.wake()
            free.append(torch.cuda.mem_get_info()[0])
            await sync(engine, 2)
            await engine.wake_cache()
            free.append(torch.cuda.mem_get_info()[0])
            return [*off, root_mean_square(differences(role, await sampled(engine)))], free
        finally:
            await engine.stop()

    (as_loaded, before, after, awake), (at_work, asleep, has_weights, woken) = asyncio.run(run())
    assert before > 4 * max(as_loaded, after, awake), "the moved weights are others"
    assert max(as_loaded, after, awake) < 0.05
    cache_bytes = 8192 * 4 * 2 * 2 * 64 * 2
    assert asleep - at_work > cache_bytes
    assert has_weights - woken > 0.9 * cache_bytes, "it has its weights alone while it is given others"
    assert asleep - woken > 0.8 * (asleep - at_work)


def in_fp8(folder: Path, target: Path) -> Path:
    """The model in `folder` with its linear layers in FP8 blocks, as an engine's folder."""
    import json

    from safetensors.torch import load_file

    from megarl.models.hf_folder import write_hf_folder
    from megarl.models.registry import architecture_for, load_hf_config
    from megarl.options.few_bits.formats import FP8
    from megarl.options.few_bits.tensors import stored_rows

    config = load_hf_config(folder)
    weight_map = architecture_for(config).weight_map(config)
    quantised = {name for rule in weight_map.bound_rules() if FP8.applies_to(rule.megatron_name) for name in rule.hf_names}
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            parts = stored_rows(tensor.bfloat16(), FP8) if name in quantised else (tensor.bfloat16(),)
            tensors |= zip((name + suffix for suffix in FP8.suffixes), parts, strict=False)
    write_hf_folder(target, tensors.items(), config | {"quantization_config": FP8.quantization_config(weight_map)})
    assert json.loads((target / "config.json").read_text())["quantization_config"]
    return target


@needs_sglang
def test_an_engine_in_fp8_takes_updates_before_and_after_it_has_slept(
    transformer_engine: Any, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    role = role_for(folder_of("llama"), **TE)

    async def sync(engine: Any, version: int) -> float:
        await engine.begin_update(version)
        checksums = await asyncio.to_thread(push, role, engine.endpoint, version)
        await engine.end_update(version, checksums)  # refuses what nothing fills, scales of the KV cache among it
        return root_mean_square(differences(role, await sampled(engine)))

    async def run() -> list[float]:
        engine = await opened(in_fp8(folder_of("llama"), tmp_path / "fp8"), tmp_path / "engine.log", memory_saver=True)
        try:
            off = [await sync(engine, 1)]
            await engine.sleep()
            await engine.wake()
            return [*off, await sync(engine, 2)]
        finally:
            await engine.stop()

    before, after = asyncio.run(run())
    assert max(before, after) < 0.3, "weights of three bits of mantissa"
    assert abs(before - after) < 0.1
