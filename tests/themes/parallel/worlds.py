"""What each rank of a parity world does: one family's model in one layout, its log-probs, gradients and exported weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.prefix_tree import LEAST_SHARED
from megarl.data.stream import MicroBatch, Response, Unit, split_shared_prompts
from megarl.megatron.options import SamplingLimits
from tests.families.family import VOCAB_SIZE

LAYOUTS: dict[str, Layout] = {
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "tp4": Layout(tp=4),
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "vpp2": Layout(pp=2, vpp=2),
    "pp2 uneven": Layout(pp=2, first_stage_layers=1),
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "dp2": Layout(dp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "ep2·tp2+sp": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    "ep2·etp2": Layout(tp=2, dp=2, ep=2, etp=2),
    "tp2·pp2": Layout(tp=2, pp=2),
    "tp2·cp2+sp": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2·cp2": Layout(pp=2, cp=2),
    "tp2·pp2·cp2": Layout(tp=2, pp=2, cp=2),
}
ODD_LAYOUTS: dict[str, Layout] = {
    "tp3": Layout(tp=3),
    "tp3+sp": Layout(tp=3, sequence_parallel=True),
    "pp3 uneven": Layout(pp=3, first_stage_layers=1, last_stage_layers=1),
    "cp3": Layout(cp=3),
    "ep3": Layout(dp=3, ep=3),
    "tp3·dp2·ep3+sp": Layout(tp=3, dp=2, ep=3, sequence_parallel=True),
}
"""For the models in `ODD` of tests/families."""
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Mode:
    """How the same responses are computed: all units in two packed micro-batches or one response in each; recomputation."""

    packed: bool
    recompute: str


MODES = {
    "packed": Mode(True, "none"),
    "unpacked": Mode(False, "none"),
    "packed, full recomputation": Mode(True, "full"),
    "unpacked, full recomputation": Mode(False, "full"),
    "packed, selective recomputation": Mode(True, "selective"),
}


def layout_for(
    name: str,
    *,
    experts: bool,
    biases: bool = False,
    follows: bool = False,
    one_context_rank: bool = False,
    one_stage: bool = False,
) -> Layout | None:
    """The layout called `name`, None where families with `experts`, or those without, have no cell of their own in that row.

    Stages of one layer are refused where it `follows` another, context parallelism with `one_context_rank`, and several stages
    with `one_stage`.

    Experts that are not spread over ranks are split like everything else, and under tensor parallelism megatron-core
    trains them with sequence parallelism only (see Layout). Experts with `biases` are not split.
    """
    layout = (LAYOUTS | ODD_LAYOUTS)[name]
    if (
        (follows and name in ("pp4", "vpp2", "pp2 uneven"))
        or (one_context_rank and layout.cp > 1)
        or (one_stage and layout.pp > 1)
    ):
        return None
    if not experts:
        return layout if layout.ep == 1 else None
    if name in ("tp2", "tp3"):  # would be tp2+sp
        return None
    if biases:  # megatron-core does not split experts that have them
        fits = layout.etp == 1 and (layout.tp == 1 or layout.ep > 1)
        return replace(layout, sequence_parallel=layout.tp > 1) if fits else None
    return replace(layout, etp=layout.tp if layout.ep == 1 else layout.etp, sequence_parallel=layout.tp > 1)


def units() -> list[Unit]:
    """Four prompts with two responses each; single-token responses, and masks with holes, are among them.

    A fifth has three, of which two begin with the same tokens, as turns of an episode do.
    """
    generator = torch.Generator().manual_seed(7)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator)

    def response(index: int, tokens: Tensor) -> Response:
        mask = torch.rand(len(tokens), generator=generator) < 0.8
        return Response(index, tokens, mask, {"weights": torch.randn(len(tokens), generator=generator) / 20})

    found = []
    for index in range(0, 8, 2):
        responses = [response(index + number, ids(1, 14)) for number in range(2)]
        found.append(Unit(ids(2, 20), responses))
    begun = ids(LEAST_SHARED, LEAST_SHARED + 1)
    branches = [response(8 + number, torch.cat([*more, ids(3, 8)])) for number, more in enumerate(([begun], [begun], []))]
    return [*found, Unit(ids(4, 5), branches)]


def micro_batches(mode: Mode, dp: int, given: list[Unit] | None = None) -> list[list[MicroBatch]]:
    """Per data-parallel rank its micro-batches of `given`, or of the first four `units()`; all hold the same responses.

    All ranks have as many: where they share out experts, a rank with one more would wait for the others.
    """
    given = units()[:4] if given is None else given
    shares = [given[rank::dp] for rank in range(dp)]
    if mode.packed:
        parts = 2 if min(map(len, shares)) > 1 else 1
        return [[share[: len(share) // 2], share[len(share) // 2 :]] if parts == 2 else [share] for share in shares]
    alone = split_shared_prompts(given)
    whole = len(alone) // dp * dp
    batches = [[[unit] for unit in alone[rank:whole:dp]] for rank in range(dp)]
    for rank, unit in enumerate(alone[whole:]):
        batches[rank][-1].append(unit)
    return batches


def objective(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """Log-probs and entropy both matter, each token with a weight of its own."""
    return -(stream.columns["weights"] * (output[:, 0] + 0.3 * output[:, 1])).sum(), {}


def run_family(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    media_folder: Path | None = None,
    names: Sequence[str] = tuple(MODES),
    layer_spec: str = "reference",
    limits: SamplingLimits | None = None,
    int4_experts: int = 0,
    core_attention: str = "spec",
    variant: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`exported`: the untouched weights; per mode of `names` `values` (log-prob, entropy by response), `gradients` by hub
    name, and `norm`, that of all gradients as the optimizer clips by it.
    """
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    answer: dict[str, Any] = {"modes": {}}
    modes = {name: MODES[name] for name in names}
    for recompute in dict.fromkeys(mode.recompute for mode in modes.values()):
        options = ModelOptions(
            str(folder),
            layout,
            temperature=TEMPERATURE,
            sampling_limits=limits,
            logit_chunk_tokens=5,
            recompute=recompute,
            layer_spec=layer_spec,
            core_attention=core_attention,
            int4_experts=int4_experts,
            media_folder=str(media_folder) if media_folder else None,
            variant=variant or {},
        )
        role = RankModel(options, OptimizerOptions(lr=1e-3))
        if "exported" not in answer:
            answer["exported"] = {name: tensor.clone() for name, tensor in role.export()}
        weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
        for name, mode in modes.items():
            if mode.recompute != recompute:
                continue
            mine = micro_batches(mode, layout.dp, units)[layout.coords(rank).dp]
            values = role.forward(mine) if recompute == "none" else None  # without gradients nothing is recomputed
            for chunk in role.chunks:
                chunk.train()
            forward_backward(role.chunks, options, mine, objective, parts=PassParts(role.parts))
            role.optimizer.prepare_grads()
            norm = float(role.optimizer.get_grad_norm())
            answer["modes"][name] = {"values": values, "gradients": gradients(role), "norm": norm}
            put_back(role, weights)
    return answer


def gradients(role: Any) -> dict[str, Tensor]:
    """Every gradient by hub name on each stage's leading rank: they are exported like weights."""
    gathered_gradients(role)
    return {name: tensor.clone() for name, tensor in role.export()}


def gathered_gradients(role: Any) -> None:
    """Put every gradient, summed over its ranks, in the place of its weight."""
    for chunk in role.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))


def put_back(role: Any, weights: list[Tensor]) -> None:
    parameters = [parameter for chunk in role.chunks for parameter in chunk.parameters()]
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
