"""What each rank of a parity world finds out about a layer for multi-token prediction, with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Unit
from tests.predicting import layer_gradients, predicted, with_prediction
from tests.themes.parallel.worlds import MODES, TEMPERATURE, gradients, micro_batches, objective, put_back

LOSS_WEIGHT = 0.7


def run_predicting(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    targets: Sequence[str] = ("soft", "hard"),
    names: Sequence[str] = tuple(MODES),
    layer_spec: str = "reference",
) -> dict[str, Any]:
    """`exported`: the untouched weights; per mode of `names` what `targets` and their absence (`none`) give: `gradients` by hub
    name, `norm`, that which the optimizer clips by, and the `metrics` of a reporting rank.
    """
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions, PredictionOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    answer: dict[str, Any] = {"modes": {name: {} for name in names}}
    for recompute in dict.fromkeys(MODES[name].recompute for name in names):
        plain = ModelOptions(
            str(folder), layout, temperature=TEMPERATURE, logit_chunk_tokens=5, recompute=recompute, layer_spec=layer_spec
        )
        for target in ("none", *targets):
            prediction = None if target == "none" else PredictionOptions(LOSS_WEIGHT, target)  # type: ignore[arg-type]
            options = replace(plain, prediction=prediction)
            role = RankModel(options, OptimizerOptions(lr=1e-3))
            if target != "none":
                answer["exported"] = {name: tensor.clone() for name, tensor in role.export()}
            weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
            for name in names:
                if MODES[name].recompute != recompute:
                    continue
                mine = micro_batches(MODES[name], layout.dp, units)[layout.coords(rank).dp]
                for chunk in role.chunks:
                    chunk.train()
                metrics = forward_backward(role.chunks, options, mine, objective, parts=PassParts(role.parts))
                role.optimizer.prepare_grads()
                norm = float(role.optimizer.get_grad_norm())
                found = {"gradients": gradients(role), "norm": norm, "metrics": metrics if role.reports else {}}
                answer["modes"][name][target] = found
                put_back(role, weights)
    return answer


def by_transformers(family: str, units: list[Unit], targets: str) -> dict[str, Any]:
    """Loss, accuracy and every gradient element of the layer, each response alone behind its prompt; log-softmax in float64."""
    model, layer = with_prediction(family)
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for policy, own, tokens in predicted(model, layer, units, TEMPERATURE).values():
        if targets == "soft":
            losses.append(-(policy.exp() * own).sum(-1))
        else:
            losses.append(-own.gather(1, tokens[:, None])[:, 0])
        hits.append(own.argmax(-1) == tokens)
    every = torch.cat(losses)
    (LOSS_WEIGHT * every.mean()).backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "the decoder is left alone"
    return {
        "gradients": layer_gradients(model, layer),
        "loss": float(every.detach().mean()),
        "accuracy": float(torch.cat(hits).double().mean()),
    }
