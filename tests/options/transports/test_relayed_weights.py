"""Real training ranks push weights to engines on other machines: each box once, by a rank beside the engine's."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.weights.checksums import digest
from megarl.weights.machines import Machines
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from tests.families import build_folder
from tests.weights.test_execution import Collecting, engine_layout, rank_of, together
from tests.world import World


def sent_over_machines(rank: int, world_size: int, folder: str, layout: Layout, machines: Any, tp: int) -> Any:
    """What this rank gives to engines on several machines, and the checksums that it reports, of all and of the last."""
    from megarl.weights.sglang_senders import ServerEndpoint
    from megarl.workers import senders

    mine = rank_of(rank, folder, layout)
    mine.load_bytes = 2**12  # so that there are many messages
    engines = {number: Collecting(engine_layout(folder, tp)) for number in range(len(machines.engines))}
    for engine in engines.values():
        engine.is_checked = True
    targets = {number: ServerEndpoint(str(number), engine.layout, "token") for number, engine in engines.items()}
    found = []
    with mock.patch.multiple(senders, model_of=lambda _: None, open_sender=lambda target, *_: engines[int(target.url)]):
        mine.open_senders(targets, "shared_memory", machines=machines)
        for some in (list(engines), [len(engines) - 1]):
            pushed = mine.push_weights("policy", dict.fromkeys(some))
            found.append(
                {
                    number: (engine.held_by, engine.written, pushed[number].checksums if number in pushed else {})
                    for number, engine in engines.items()
                }
            )
            for engine in engines.values():
                engine.held_by, engine.written = ({rank: {} for rank in engine.held_by} for _ in range(2))
    return found


@pytest.mark.parametrize(
    ("family", "layout", "tp", "engines"),
    [
        ("llama", Layout(tp=2, pp=2), 2, [(0, 0), (1, 1)]),
        ("llama", Layout(tp=2, pp=2), 4, [(0, 0, 1, 1)]),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=4), 2, [(1, 1), (0, 0)]),
    ],
)
def test_over_machines_every_rank_is_handed_its_boxes_once_by_ranks_beside_it_and_the_senders_report_the_checksums(
    world: World, tmp_path: Path, family: str, layout: Layout, tp: int, engines: list[tuple[int, ...]]
) -> None:
    """Ranks 0 and 1 are on the first machine, 2 and 3 on the second."""
    build_folder(family, tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    of_ranks = (0, 0, 1, 1)
    taken = [0, 2]  # the next rank of each machine that hands on
    relays = []
    for of_engine in engines:
        relays.append(tuple(taken[machine] + place % 2 for place, machine in enumerate(of_engine)))
    machines = Machines(of_ranks, tuple(engines), tuple(relays))
    answers = world.call(sent_over_machines, str(tmp_path / "model"), layout, machines, tp, size=4)
    plan = plan_reshard(load_hf_config(tmp_path / "model"), layout, EngineTarget(tp=tp, engines=len(engines)))
    for update, wanted in enumerate((range(len(engines)), [len(engines) - 1])):
        for engine, engine_rank in product(range(len(engines)), range(tp)):
            given = [{number: one[:2] for number, one in answer[update].items()} for answer in answers]
            values, counts = together(given, engine, engine_rank)
            boxes = plan.slices(engine_rank) if engine in wanted else {}
            assert values.keys() == boxes.keys()
            for name, (row, rows, col, cols) in boxes.items():
                tensor = whole[name].reshape(len(whole[name]), -1)[row : row + rows, col : col + cols]
                assert torch.equal(values[name], tensor), (engine, engine_rank, name)
                assert bool((counts[name] == 1).all()), (engine, engine_rank, name)
            for rank, answer in enumerate(answers):
                assert not answer[update][engine][0][engine_rank] or of_ranks[rank] == engines[engine][engine_rank]
        for engine in wanted:
            reported = [one for answer in answers for one in answer[update][engine][2].items()]
            assert len(reported) == len(dict(reported))  # each box by one rank
            elements = Counter[int]()
            for box, _ in reported:
                elements[box.engine_rank] += box.rows * box.cols
            for engine_rank in range(tp):  # what goes by relays, too
                held = plan.slices(engine_rank).values()
                assert elements[engine_rank] == sum(rows * cols for _, rows, _, cols in held)
            for box, checksum in reported:
                row, rows, col, cols = plan.slices(box.engine_rank)[box.tensor]
                part = whole[box.tensor].reshape(len(whole[box.tensor]), -1)[row : row + rows, col : col + cols]
                sent = part[box.row : box.row + box.rows, box.col : box.col + box.cols]
                assert checksum == digest(sent.contiguous())
