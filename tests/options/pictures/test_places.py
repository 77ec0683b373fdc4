"""A tower is described without the option; what is done with pictures asks for it, or takes part where every option may."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import option_list
from megarl.data.stream import Response, Unit
from megarl.errors import ConfigError
from megarl.models.flops import FlopsModel
from megarl.models.registry import sees
from megarl.models.shape import shape_of
from megarl.models.vision import TOWER, part_of, vision_part
from megarl.options.pictures import sglang
from megarl.options.pictures.media import Media
from megarl.planning.prompt_pictures import NO_PICTURES, pictures_of
from tests.families import build_folder
from tests.seeing import SEEING, hf_config, vision_of

WITHOUT = r"^a model that sees needs the option pictures, which this installation does not have$"


def config_at(folder: Path, hf_config: dict[str, Any]) -> Any:
    """The part of a run's config that says which model it has."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    return SimpleNamespace(model=SimpleNamespace(path=str(folder)))


@pytest.mark.parametrize("family", SEEING)
def test_without_the_option_a_tower_is_described_and_not_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hf_config(family).to_dict()
    described, counted = vision_of(family), FlopsModel.of(shape_of(config)).tower([(1, 4, 6)])
    monkeypatch.setattr(option_list, "OPTIONS", tuple(name for name in option_list.OPTIONS if name != "pictures"))
    shape = shape_of(config)
    assert shape.vision == described
    assert FlopsModel.of(shape).tower([(1, 4, 6)]) == counted > 0
    assert {part_of(TOWER + name) for name in described.shapes} == {"vision", "projector"}
    run = config_at(tmp_path / "model", config)
    assert sees(run.model.path)
    for ask in (lambda: vision_part("tower"), lambda: pictures_of(run)):
        with pytest.raises(ConfigError, match=WITHOUT):
            ask()


def test_a_model_that_reads_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_folder("llama", tmp_path / "model")
    monkeypatch.setattr(option_list, "OPTIONS", ())
    run: Any = SimpleNamespace(model=SimpleNamespace(path=str(tmp_path / "model")))
    assert pictures_of(run) is NO_PICTURES
    assert not sees(tmp_path / "model")
    assert not sees(tmp_path / "no such folder")


def test_sglang_is_asked_of_the_limits_by_its_place() -> None:
    assert sglang.check_servers in option_list.functions("sglang", "check_servers")


def test_the_part_in_passes_gives_positions_and_the_pictures_of_each_micro_batch() -> None:
    from megarl.config.layout import Layout
    from megarl.data.stream import context_parallel_shard, pack
    from megarl.options.pictures.model_part import PicturesPart

    part = PicturesPart(vision_of("qwen2_vl"))
    response = Response(0, torch.tensor([5, 6]), torch.ones(2, dtype=torch.bool))
    shown = Unit(torch.arange(9), [response], (Media("image", ("wide",), (1, 4, 6), 1, 6),))
    [placed] = part.placed([shown])
    assert placed.positions is not None
    assert placed.positions.shape == (3, 9)
    assert shown.positions is None
    reads = Unit(torch.arange(9), [response])
    found = []
    for unit in (placed, reads):
        stream = pack([unit])
        share = context_parallel_shard(stream, Layout().cp, 0)
        found.append(part.lay([unit], stream, share, torch.device("cpu")))
    of_shown, of_reads = found
    assert of_shown is not None
    assert of_shown.places.tolist() == [1, 2, 3, 4, 5, 6]
    assert of_reads is None
    model = SimpleNamespace(seen="of the micro-batch before")
    with part.forward(model, of_reads):
        assert model.seen is None
    assert part.joins(training=True)
    assert part.joins(training=False)
    assert not part.reads_ahead
