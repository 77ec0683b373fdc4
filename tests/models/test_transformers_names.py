"""Weight updates of every architecture family into the embedded engine: hub names, per-expert tensors, float32 buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import EngineError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.transformers_names import auto_class, config_in_transformers, hub_tensors
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import Engine, EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.families import FAMILIES, VARIANTS, build_folder
from tests.rollout.tiny import Weights, largest_difference

PROMPTS = [[5, 6, 7, 8], [100, 9, 10, 11, 12, 13], [40, 41]]
MIXTURES = [name for name, family in FAMILIES.items() if family.num_experts is not None]
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model folder of every family and variant."""
    root = tmp_path_factory.mktemp("families")
    for family in VARIANTS:
        build_folder(family, root / family)
    return {family: root / family for family in VARIANTS}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of a model folder."""
    source = HFFolder(folder)
    return {name: source.get_slice(name)[:] for name in source.names}


def loaded(folder: Path) -> Any:
    """The model of a folder, in float32."""
    config = config_in_transformers(folder)
    kind = auto_class(load_hf_config(folder))
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")


def other_values(folder: Path) -> Weights:
    """Each tensor of `folder` with its own values in another order, so that every family keeps its scales."""
    generator = torch.Generator().manual_seed(11)
    weights = stored(folder).items()
    return [(name, w.flatten()[torch.randperm(w.numel(), generator=generator)].view_as(w)) for name, w in weights]


def take_an_update_in_bfloat16(folder: Path, log: Path) -> None:
    """Serve the model of `folder` and send it other values; the update itself compares the checksums of all boxes."""
    sizes = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8}
    options = ServerOptions(str(folder), log, dtype="bfloat16", **sizes, start_timeout_s=400)  # type: ignore[arg-type]

    async def scenario() -> None:
        engine = await SglangEngine.open(options)
        try:
            await update(engine, other_values(folder))
            assert engine.weight_version == 1
        finally:
            await engine.stop()

    asyncio.run(scenario())


async def update(engine: Engine, weights: Weights, version: int = 1) -> None:
    """A whole update in two buckets."""
    await engine.begin_update(version)
    for bucket in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
        await engine.apply_update(bucket)
    await engine.end_update(version)


@pytest.mark.parametrize("family", VARIANTS)
def test_names_and_values_are_those_of_the_folder_and_of_the_weight_map(family: str, folders: dict[str, Path]) -> None:
    """transformers loads the folder by its own mapping of names; the views must be the tensors in the file again."""
    expected = stored(folders[family])
    model: Any = loaded(folders[family])
    found = hub_tensors(model)
    config = HFFolder(folders[family]).config
    assert found.keys() == expected.keys() == set(architecture_for(config).weight_map(config).hf_names())
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_log_probs_are_those_of_transformers_with_these_weights(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The reference loads a folder that holds the weights which were sent."""
    weights = other_values(folders[family])
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folders[family]).config)
    before, after = (loaded(folder) for folder in (folders[family], tmp_path / "sent"))
    engine = EmbeddedEngine(folders[family])
    asyncio.run(update(engine, weights))
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=10, ignore_eos=True), n=3)))
    assert largest_difference(after, PROMPTS, groups) < 1e-5
    assert largest_difference(before, PROMPTS, groups) > 1e-2


@pytest.mark.parametrize("family", MIXTURES)
def test_an_expert_that_was_not_sent_or_was_altered_is_named(family: str, folders: dict[str, Path]) -> None:
    weights = other_values(folders[family])
    of_experts = [number for number, (name, _) in enumerate(weights) if ".experts.3." in name]
    name, weight = weights[of_experts[-1]]
    engine = EmbeddedEngine(folders[family])
    with pytest.raises(EngineError, match=f"1 missing.*nobody sent {name}"):
        asyncio.run(update(engine, [pair for pair in weights if pair[0] != name]))
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="the model has no parameter"):
        asyncio.run(update(engine, [("model.layers.2.mlp.experts.gate_up_proj", weight)], 2))
    engine = EmbeddedEngine(folders[family])

    async def alter() -> None:
        await engine.begin_update(1)
        await engine.apply_update(weights)
        altered = hub_tensors(engine._model)[name]
        altered[(0,) * altered.dim()] += 1e-6
        await engine.end_update(1)

    with pytest.raises(EngineError, match=f"1 differ.*values differ from those sent for {name}"):
        asyncio.run(alter())


def test_the_expert_bias_stays_in_float32_beside_other_weights_in_bfloat16(folders: dict[str, Path]) -> None:
    weights = dict(other_values(folders["deepseek_v3"]))
    engine = EmbeddedEngine(folders["deepseek_v3"], dtype="bfloat16")
    asyncio.run(update(engine, list(weights.items())))
    held = dict(engine._model.named_buffers())[BIAS]
    assert held.dtype == torch.float32
    assert torch.equal(held, weights[BIAS])
    assert engine._model.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(EngineError, match=f"nobody sent {BIAS}"):
        asyncio.run(update(engine, [pair for pair in weights.items() if pair[0] != BIAS], 2))
