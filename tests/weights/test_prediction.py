"""A layer for multi-token prediction goes to engines that draft with it, under the hub's names, and to no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import load_hf_config
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.verify import verify
from tests.predicting import build_predicting
from tests.weights.layouts import TARGETS
from tests.weights.test_execution import Collecting, engine_layout, given, rank_of, together
from tests.world import World

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
LAYOUTS = [Layout(pp=2, dp=2, ep=2), Layout(tp=2, pp=2, etp=2, sequence_parallel=True), Layout(tp=4, dp=2, ep=2, etp=2)]


def sent(rank: int, world_size: int, folder: str, layout: Layout, tp: int, synced: bool) -> list[Any]:
    """What this rank gives to two engines by plan, and to one that takes whole tensors."""
    from megarl.megatron.options import PredictionOptions

    mine, found = rank_of(rank, folder, layout, prediction=PredictionOptions(synced=synced)), []
    for planned, size in ((True, tp), (False, 1)):
        engines = {number: Collecting(engine_layout(folder, size, predicts=synced)) for number in range(1 + planned)}
        mine.parts, mine.pusher, mine.engines = [], None, set()
        found += given(mine, engines, [dict.fromkeys(engines)], planned=planned)
    return found


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize(("family", "layout", "tp"), [("glm4_moe", LAYOUTS[0], 2), ("qwen3_5", Layout(tp=2, pp=2), 1)])
def test_ranks_send_the_layer_byte_for_byte_if_engines_take_it(
    world: World, tmp_path: Path, family: str, layout: Layout, tp: int, synced: bool
) -> None:
    build_predicting(family, tmp_path / "model")
    source = HFFolder(tmp_path / "model")
    own = {name for name in source.names if name.startswith(("mtp.", "model.layers.4.")) and not name.endswith(COPIES)}
    others = {name for name in source.names if not name.startswith(("mtp.", "model.layers.4."))}
    wanted = others | own if synced else others
    answers = world.call(sent, str(tmp_path / "model"), layout, tp, synced, size=layout.world_size)
    for number, engine_ranks in enumerate((tp, 1)):
        for engine_rank in range(engine_ranks):
            values, counts = together([answer[number] for answer in answers], 0, engine_rank)
            to = EngineTarget(tp=engine_ranks)
            boxes = plan_reshard(load_hf_config(tmp_path / "model"), layout, to, predicts=synced).slices(engine_rank)
            assert values.keys() == boxes.keys() == wanted
            for name, (row, rows, col, cols) in boxes.items():
                whole = source.get_slice(name)[...]
                tensor = whole.reshape(len(whole), -1)[row : row + rows, col : col + cols]
                assert torch.equal(values[name], tensor), name
                assert bool((counts[name] == 1).all()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_with_the_layer_are_proven_for_every_engine(tmp_path: Path, layout: Layout) -> None:
    build_predicting("deepseek_v3", tmp_path / "model")
    config = load_hf_config(tmp_path / "model")
    for target in TARGETS.values():
        with_layer, without = (verify(plan_reshard(config, layout, target, predicts=p)).nbytes for p in (True, False))
        assert with_layer > without
