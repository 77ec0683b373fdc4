"""What each rank of a parity world does with a model that has adapters: gradients, and log-probs with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Unit
from megarl.options.lora.weight_map import Lora
from tests.themes.parallel.worlds import MODES, TEMPERATURE, gathered_gradients, micro_batches, objective, put_back


def run_adapted(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    lora: Lora,
    adapters: dict[str, Tensor],
    names: Sequence[str] = tuple(MODES),
    layer_spec: str = "reference",
) -> dict[str, Any]:
    """As `run_family`, of the `adapters` by the hub's names: `exported` are theirs, `gradients`, too. `off` are values without
    them, `merged` the weights with them, `trained` the names of all that is trained."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward
    from megarl.options.lora.layers import load_adapters

    initialize_layout(layout, seed=1)
    answer: dict[str, Any] = {"modes": {}}
    modes = {name: MODES[name] for name in names}
    for recompute in dict.fromkeys(mode.recompute for mode in modes.values()):
        options = ModelOptions(
            str(folder),
            layout,
            temperature=TEMPERATURE,
            logit_chunk_tokens=5,
            recompute=recompute,
            layer_spec=layer_spec,
            lora=lora,
        )
        role = RankModel(options, OptimizerOptions(lr=1e-3))
        load_adapters(role.chunks, 0, adapters.__getitem__)
        weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
        for name, mode in modes.items():
            if mode.recompute != recompute:
                continue
            mine = micro_batches(mode, layout.dp, units)[layout.coords(rank).dp]
            values = role.forward(mine) if recompute == "none" else None
            if "exported" not in answer:
                answer["exported"] = {name: tensor.clone() for name, tensor in role.export_adapters()}
                answer["merged"] = {name: tensor.clone() for name, tensor in role.export()}
                with role.adapters.as_begun():
                    answer["off"] = role.forward(mine)
            for chunk in role.chunks:
                chunk.train()
            forward_backward(role.chunks, options, mine, objective)
            role.optimizer.prepare_grads()
            norm = float(role.optimizer.get_grad_norm())
            gathered_gradients(role)
            gradients = {name: tensor.clone() for name, tensor in role.export_adapters()}
            answer["modes"][name] = {"values": values, "gradients": gradients, "norm": norm}
            put_back(role, weights)
    return answer
