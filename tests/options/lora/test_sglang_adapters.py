"""SGLang on a CPU that adds the policy's adapters itself: log-probs after each update, versions, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.errors import EngineError
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.hf_folder import HFFolder
from megarl.options.lora.weight_map import Lora
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.sglang_senders import TensorSender, checksums_of
from megarl.weights.staging import StagedSlices
from tests import seeing
from tests.rollout.test_sglang_experts import served as served_experts
from tests.rollout.test_sglang_families import served
from tests.rollout.test_sglang_seeing import served_folder
from tests.rollout.tiny import Weights, largest_difference
from tests.rollout.updates import PROMPTS

LORA = Lora(rank=3, alpha=6.0)
WITH_OUTPUT = Lora(rank=3, alpha=6.0, targets=("all-linear", "lm_head"))
ATTENTION = Lora(rank=4, alpha=16.0, rslora=True, targets=("q_proj", "v_proj", "o_proj"))
GREEDY = SamplingParams(max_new_tokens=12, greedy=True, ignore_eos=True)


def adapters(folder: Path, lora: Lora, seed: int) -> Weights:
    """Seeded random A and B of every layer that has them."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = ServedModel(HFFolder(folder).config, "float32", lora=lora).adapter_map.hf_shapes()
    return [(name, 0.1 * torch.randn(shape, generator=drawn)) for name, shape in shapes.items()]


def with_added(folder: Path, lora: Lora, weights: Weights) -> Any:
    """The reference: transformers in float32 with scale·B·A added to each weight by hand."""
    sees = "vision_config" in HFFolder(folder).config
    auto, found = AutoModelForImageTextToText if sees else AutoModelForCausalLM, dict(weights)
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name in filter(lambda name: name.endswith(LORA_A), found):
            layer = name.removesuffix(LORA_A)
            if layer == "lm_head" and model.config.tie_word_embeddings:
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
            is_inner = sees and layer.startswith("model.layers.")  # as folders of Qwen2.5-VL name it
            inner = layer.replace("model.", "model.language_model.", 1) if is_inner else layer
            model.get_parameter(f"{inner}.weight").add_(lora.scale * found[layer + LORA_B] @ found[name])
    return model


async def send(engine: SglangEngine, version: int, base: int | None, weights: Weights) -> None:
    """An update of adapters; the weights beside them, which the engine has, as a run shows them, by checksums."""
    layout = engine.endpoint.layout
    checksums: dict[Any, str] = {}
    if base is None:
        folder = HFFolder(engine.server.options.model_path)
        for name in layout.slices:
            checksums |= checksums_of(StagedSlices(layout.pieces(name, folder.get_slice(name)[...])))
    await engine.begin_update(version, base)
    await engine.apply_update(weights)
    await engine.end_update(version, checksums)


async def answers(engine: SglangEngine) -> list[list[Generation]]:
    return await engine.generate(EngineRequest(PROMPTS, GREEDY, n=2))


async def goes_through_updates(folder: Path, lora: Lora, log: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8, "start_timeout_s": 500}
    options = ServerOptions(str(folder), log, tp=tp, lora=lora, **sizes)
    taken: list[int] = []
    deliver = TensorSender.deliver

    def counting(self: TensorSender, staged: StagedSlices) -> None:
        taken.extend(piece.tensor.nbytes for piece in staged.pieces)
        deliver(self, staged)

    monkeypatch.setattr(TensorSender, "deliver", counting)
    engine = await SglangEngine.open(options, initial_version=0)
    try:
        groups = await answers(engine)
        assert largest_difference(with_added(folder, lora, []), PROMPTS, groups) < 1e-4
        texts = [[one.response_ids for group in groups for one in group]]
        for version, base in ((1, None), (2, 1), (3, None)):
            if version == 3:
                await engine.stop()
                engine = await SglangEngine.open(options)  # it has the weights of the model's folder, and no adapters
                with pytest.raises(EngineError, match="no weights of a known version"):
                    await answers(engine)
            sent = adapters(folder, lora, version)
            taken.clear()
            await send(engine, version, base, sent)
            # the weights beside them do not travel: a tensor that tensor ranks do not share goes to each
            assert 0 < sum(taken) <= tp * sum(values.nbytes for _, values in sent)
            groups = await answers(engine)
            texts.append([one.response_ids for group in groups for one in group])
            assert {version} == {each for group in groups for one in group for each in one.weight_versions}
            assert largest_difference(with_added(folder, lora, sent), PROMPTS, groups) < 1e-4
            last = with_added(folder, lora, adapters(folder, lora, version - 1) if version > 1 else [])
            assert largest_difference(last, PROMPTS, groups) > 0.1
        assert all(one != other for number, one in enumerate(texts) for other in texts[:number])
        for name in ("version-2", "policy", None):
            body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
            asked = "no adapters" if name is None else name
            with pytest.raises(EngineError, match=f"asks for {asked}, but this server has version-3"):
                await engine._client.control("generate", body)
        with pytest.raises(EngineError, match=r"nobody sent .*lora_B"):
            await send(engine, 4, 3, sent[:-1])
        assert engine.weight_version is None
    finally:
        await engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora", "tp"),
    [
        ("qwen3", WITH_OUTPUT, 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("qwen3", LORA, 2), ("qwen2-full", WITH_OUTPUT, 1), ("llama", LORA, 1),
                ("llama", ATTENTION, 2), ("qwen2-full", LORA, 2), ("qwen3", ATTENTION, 1),
                ("qwen3_moe", ATTENTION, 1), ("qwen3_moe", ATTENTION, 2),
                ("qwen2_5_vl", LORA, 1),
            )
        ),
    ],
)  # fmt: skip
def test_after_each_update_log_probs_are_those_of_the_model_with_these_adapters(
    family: str, lora: Lora, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in seeing.SEEING:
        folder = served_folder(family, tmp_path / "model", monkeypatch)
    else:
        folder = (served_experts if family == "qwen3_moe" else served)(family, tmp_path / "model")
    asyncio.run(goes_through_updates(folder, lora, tmp_path / "log", tp, monkeypatch))
