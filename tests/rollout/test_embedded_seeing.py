"""The embedded engine's answers to prompts that show pictures, against transformers one response at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megarl.data.media import Media
from megarl.errors import EngineError
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from tests import seeing
from tests.models.test_transformers_names import other_values, stored, update
from tests.rollout.test_sglang_seeing import difference, served_folder, with_values


@pytest.mark.parametrize("family", seeing.SEEING)
def test_answers_are_transformers_also_after_updates(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder(family, tmp_path / "model", monkeypatch)
    # no picture, one, and two of which one is the same; then conversations, with pictures in the middle
    units = [*seeing.units(family)[:3], *seeing.conversations(family)]
    if seeing.SEEING[family].frames_apart:  # a native video, and a picture behind it
        units += seeing.units(family)[3:]
    prompts, media = [unit.prompt_ids.tolist() for unit in units], [unit.media for unit in units]
    params = SamplingParams(max_new_tokens=6, cut_token_ids=(seeing.IMAGE, seeing.VIDEO))
    engine = EmbeddedEngine(folder, initial_version=0, max_batch_samples=5, media_folder=folder / "media")
    original, everything = stored(folder), other_values(folder)
    of_tower = ("visual", "vision_tower", "mm_projector")
    tower = [(name, value if any(part in name for part in of_tower) else original[name]) for name, value in everything]

    async def scenario() -> None:
        groups = await engine.generate(EngineRequest(prompts, params, n=3, media=media))
        assert difference(seeing.hugging_face(family), family, folder, units, groups) < 1e-5
        for version, weights in ((1, tower), (2, everything)):
            await update(engine, weights, version)
            groups = await engine.generate(EngineRequest(prompts, params, n=2, media=media))
            model = with_values(folder, weights, tmp_path / str(version))
            assert difference(model, family, folder, units, groups) < 1e-5
            assert max(len(answer.response_ids) for group in groups for answer in group) > 1

    asyncio.run(scenario())


def test_what_cannot_be_shown_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_path: Path) -> None:
    folder = served_folder("qwen2_5_vl", tmp_path / "model", monkeypatch)
    video, params = Media("video", ("a", "b"), (1, 2, 2), 1, 1), SamplingParams(max_new_tokens=1)
    seeing_engine = EmbeddedEngine(folder, initial_version=0, media_folder=folder / "media")
    with pytest.raises(
        EngineError, match=r"^a prompt shows a video as one; the embedded engine is shown its frames as pictures$"
    ):
        asyncio.run(seeing_engine.generate(EngineRequest([[1, 2, 3]], params, media=[[video]])))
    reading_engine = EmbeddedEngine(tiny_path, initial_version=0)
    with pytest.raises(EngineError, match=r"^a prompt shows pictures, but the model takes none$"):
        asyncio.run(reading_engine.generate(EngineRequest([[1, 2, 3]], params, media=[[video]])))
