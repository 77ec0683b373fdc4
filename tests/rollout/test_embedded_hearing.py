"""The embedded engine's answers to prompts that play sounds, against transformers one response at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.stream import Unit
from megarl.errors import EngineError
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.weights.checksums import check_model
from tests import hearing
from tests.models.test_transformers_names import other_values, stored, update


def difference(model: Any, folder: Path, units: Sequence[Unit], groups: Sequence[Sequence[Generation]]) -> float:
    """The largest difference of answers' log-probs from transformers' in float64."""
    worst = 0.0
    model = deepcopy(model).double()
    for unit, group in zip(units, groups, strict=True):
        for answer in group:
            ids = torch.cat([unit.prompt_ids, torch.tensor(answer.response_ids[:-1], dtype=torch.long)])[None]
            given = hearing.inputs(folder / "media", unit.media)
            given = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
            with torch.no_grad():
                logits = model(ids, attention_mask=torch.ones_like(ids), **given).logits[0, len(unit.prompt_ids) - 1 :]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(answer.log_probs)).abs().max()))
    return worst


def test_answers_are_transformers_also_after_an_update_and_whatever_sounds_are_beside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hearing.build_hearing_folder(folder)
    hearing.sounds(folder / "media")
    units = hearing.units()
    prompts, media = [unit.prompt_ids.tolist() for unit in units], [unit.media for unit in units]
    params = SamplingParams(max_new_tokens=6, cut_token_ids=(hearing.AUDIO,))
    engine = EmbeddedEngine(folder, initial_version=0, max_batch_samples=8, media_folder=folder / "media")
    assert len(stored(folder)) > 27
    weights = [(name, value) for name, value in other_values(folder) if not name.startswith("visual.")]

    async def scenario() -> None:
        groups = await engine.generate(EngineRequest(prompts, params, n=2, media=media))
        model = hearing.hugging_face()
        assert difference(model, folder, units, groups) < 1e-5
        await update(engine, weights, 1)
        groups = await engine.generate(EngineRequest(prompts, params, n=2, media=media))
        sent = dict(weights)
        with torch.no_grad():
            hub = hearing.hub_tensors(model)
            assert {name for name in hub if not name.startswith("visual.")} == sent.keys()
        assert difference(loaded(folder, sent, tmp_path / "sent"), folder, units, groups) < 1e-5

    asyncio.run(scenario())


def loaded(folder: Path, sent: dict[str, torch.Tensor], path: Path) -> Any:
    """transformers' model with these weights, by way of a folder."""
    import transformers

    from megarl.models.hf_folder import HFFolder, write_hf_folder

    sight = {name: value for name, value in stored(folder).items() if name.startswith("visual.")}
    write_hf_folder(path, (sight | sent).items(), HFFolder(folder).config)
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def test_servers_of_sglang_are_refused(tmp_path: Path) -> None:
    hearing.build_hearing_folder(tmp_path / "model")
    with pytest.raises(EngineError, match="it serves the thinker only within a folder of the whole model, with its talker"):
        check_model(tmp_path / "model")
