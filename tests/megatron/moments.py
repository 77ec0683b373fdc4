"""A role whose Adam moments are looked at from outside: every one of them by the Hugging Face name of its parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from tests.themes.parallel.worlds import MODES, micro_batches, objective

NO_FIELDS: Mapping[str, Any] = {}
MOMENTS = ("param", "exp_avg", "exp_avg_sq")


def role_in(
    layout: Layout,
    folder: Path,
    dtype: str = "float32",
    offload_fraction: float = 0.0,
    megatron: Mapping[str, Any] = NO_FIELDS,
    **more: Any,
) -> Any:
    """A role on this rank, its optimizer with a schedule and weight decay; `more` are further options of the model."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=11)
    options = ModelOptions(str(folder), layout, dtype=dtype, logit_chunk_tokens=5, megatron=megatron, **more)
    adam = OptimizerOptions(
        lr=1e-2,
        eps=1e-3,
        weight_decay=0.1,
        schedule="linear",
        warmup_steps=1,
        total_steps=10,
        offload_fraction=offload_fraction,
    )
    return RankModel(options, adam)


def update(role: Any, rank: int) -> None:
    """One update on this rank's share of samples that are the same in every layout."""
    layout = role.options.layout
    role.update(micro_batches(MODES["packed"], layout.dp)[layout.coords(rank).dp], objective)


def adams(role: Any) -> list[Any]:
    """The distributed optimizers of dense and of expert parameters."""
    return getattr(role.optimizer, "chained_optimizers", [role.optimizer])


def trained(role: Any) -> dict[str, Tensor]:
    """What is trained, by the hub's names, on each stage's leading rank: all weights, or the adapters."""
    export = role.export if role.options.lora is None else role.export_adapters
    return {name: tensor.clone() for name, tensor in export()}


def everything(role: Any) -> dict[str, Any]:
    """Weights and, per moment, every tensor by its Hugging Face name (megatron-core itself says which rank owns what)."""
    found = {f"weight {name}": tensor for name, tensor in trained(role).items()}
    for moment in MOMENTS:
        before: list[tuple[Any, Tensor]] = []
        for adam in adams(role):
            for parameter in (parameter for buffer in adam.buffers for parameter in buffer.params):
                whole = torch.zeros(parameter.numel())
                if parameter in adam.model_param_group_index_map:
                    owned = adam._get_model_param_range_map(parameter)["param"]
                    state = adam._get_main_param_and_optimizer_states(parameter)
                    whole[owned.start : owned.end] = state[moment].detach()
                torch.distributed.all_reduce(whole, group=adam.data_parallel_group)
                before.append((parameter, parameter.data))
                parameter.data = whole.view(parameter.shape)
        found |= {f"{moment} {name}": tensor for name, tensor in trained(role).items()}
        for parameter, data in before:
            parameter.data = data
    return found


def merged(answers: list[dict[str, Any]], what: str) -> dict[str, Tensor]:
    """The tensors called `what` of all ranks' answers."""
    return {name: tensor for answer in answers for name, tensor in answer[what].items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names and, bit for bit, the same values."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: off by {(found[name] - tensor).abs().max()}"
