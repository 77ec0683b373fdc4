"""What each rank does in tests of routing replay: routes that nobody would choose, in their places, and what came of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.layout import Layout
from megarl.data.stream import Unit
from tests.themes.parallel.worlds import MODES, TEMPERATURE, gradients, micro_batches, objective, put_back

ROUTES = pytest.importorskip("megarl.options.routing_replay.column")
QUESTIONS = pytest.importorskip("megarl.options.routing_replay.rank_questions")


def with_routes(units: list[Unit], layers: int, num_experts: int, top_k: int, missing: float = 0.0) -> list[Unit]:
    """`units` whose tokens go to random experts; a share of the choices is `missing`.

    With these routes transformers' own gradients in float32 are within 3e-6 of those in float64; with others, whose terms
    cancel, DeepSeek's are off by 2e-5.
    """
    generator = torch.Generator().manual_seed(13)

    def routes(tokens: int) -> torch.Tensor:
        chosen = torch.rand(tokens, layers, num_experts, generator=generator).argsort(-1)[..., :top_k]
        chosen[torch.rand(tokens, layers, generator=generator) < missing] = -1
        return torch.from_numpy(ROUTES.compact(chosen.numpy(), num_experts))

    return [
        replace(
            unit,
            extra={"routes": routes(len(unit.prompt_ids))},
            responses=[replace(one, extra={"routes": routes(len(one.token_ids))}) for one in unit.responses],
        )
        for unit in units
    ]


def run_replay(
    rank: int, world_size: int, folder: Path, layout: Layout, units: list[Unit], names: tuple[str, ...] = tuple(MODES)
) -> dict[str, Any]:
    """As `worlds.run_family`, with the routes of `units`; per mode also the replayed `counts`."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    answer: dict[str, Any] = {"modes": {}}
    for recompute in dict.fromkeys(MODES[name].recompute for name in names):
        options = ModelOptions(
            str(folder), layout, temperature=TEMPERATURE, logit_chunk_tokens=5, recompute=recompute, replays_routes=True
        )
        role = RankModel(options, OptimizerOptions(lr=1e-3))
        answer.setdefault("exported", {name: tensor.clone() for name, tensor in role.export()})
        weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
        for name in names:
            if MODES[name].recompute != recompute:
                continue
            mine = micro_batches(MODES[name], layout.dp, units)[layout.coords(rank).dp]
            values = role.forward(mine) if recompute == "none" else None
            QUESTIONS.replay_counts(role)
            for chunk in role.chunks:
                chunk.train()
            forward_backward(role.chunks, options, mine, objective, parts=PassParts(role.parts))
            role.optimizer.prepare_grads()
            norm = float(role.optimizer.get_grad_norm())
            counts = QUESTIONS.replay_counts(role)
            answer["modes"][name] = {"values": values, "gradients": gradients(role), "norm": norm, "counts": counts}
            put_back(role, weights)
    return answer


def run_recorded(rank: int, world_size: int, folder: Path, layout: Layout, units: list[Unit], recompute: str) -> dict[str, Any]:
    """The routes that a pass records, and values and gradients without replay and with what was recorded replayed."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    options = ModelOptions(
        str(folder), layout, temperature=TEMPERATURE, logit_chunk_tokens=5, recompute=recompute,
        replays_routes=True, records_routes=True,
    )  # fmt: skip
    role = RankModel(options, OptimizerOptions(lr=1e-3))
    weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
    mine = micro_batches(MODES["packed"], layout.dp, units)[layout.coords(rank).dp]
    answer: dict[str, Any] = {"live": role.forward(mine)}
    recorded = QUESTIONS.recorded_routes(role)
    everywhere: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everywhere, recorded)
    whole = ROUTES.joined([part for part in everywhere if part is not None])
    answer["routes"] = {row: np.array(routes) for row, routes in whole.items()}
    given = [[_routed(unit, whole) for unit in units_of_one] for units_of_one in mine]
    answer["replayed"] = role.forward(given)
    for name, batch in (("live", mine), ("replayed", given)):
        for chunk in role.chunks:
            chunk.train()
        forward_backward(role.chunks, options, batch, objective, parts=PassParts(role.parts))
        role.optimizer.prepare_grads()
        answer[f"{name} gradients"] = gradients(role)
        put_back(role, weights)
    answer["counts"] = QUESTIONS.replay_counts(role)
    return answer


def _routed(unit: Unit, whole: dict[int, Any]) -> Unit:
    """The unit with the recorded routes of its responses; those of its prompt are the first one's."""
    length = len(unit.prompt_ids)
    of = {one.index: torch.tensor(whole[one.index]) for one in unit.responses}
    responses = [replace(one, extra={"routes": of[one.index][length:]}) for one in unit.responses]
    return replace(unit, extra={"routes": of[unit.responses[0].index][:length]}, responses=responses)
