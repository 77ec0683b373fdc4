"""A rank's whole work on a tiny model, under options that a run may have, and where its tensors are and of which types.

`worked` is called in processes on CPUs, and in one that is told it has a GPU (`tests/pretended_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.megatron.options import ExpertBalance, ModelOptions, OptimizerOptions, PredictionOptions, SamplingLimits
from megarl.option_list import part
from megarl.weights.pusher import Pusher
from megarl.weights.staging import StagedSlices
from tests.megatron.test_rank_model import micro_batches
from tests.weights.staged_tensors import StagedTensors

LR, EPS = 1e-3, 1e-3


@dataclass(frozen=True)
class Choice:
    """Options of a role: `model` those of `ModelOptions`, `optimizer` those of `OptimizerOptions`.

    `kind`: they are for families of this kind alone; `option`: they need this option. `adapters`: the role trains these alone.
    """

    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    option: str | None = None
    adapters: bool = False


BFLOAT16 = {"dtype": "bfloat16"}
LIMITS = {"sampling_limits": SamplingLimits(0.9, 20, 0.01), "collision": True, "padded_tokens": 160}
OVERLAP = {"megatron": {"overlap_grad_reduce": True, "grad_reduce_in_fp32": False}}
BALANCED = {"experts": ExpertBalance(balance_coef=0.01, sequence_balance_coef=0.01, z_loss_coef=0.01)}
CHOICES = {
    "float32": Choice(),
    "bfloat16": Choice(BFLOAT16),
    "recomputed": Choice(BFLOAT16 | {"recompute": "full"}),
    "adapters": Choice(BFLOAT16, option="lora", adapters=True),
    "value head": Choice(BFLOAT16 | {"head": "value"}),
    "limits": Choice(LIMITS),
    "Muon": Choice(BFLOAT16, {"name": "muon", "weight_decay": 0.1}),
    "overlap": Choice(BFLOAT16 | OVERLAP),
    "recorded": Choice(BALANCED | {"records_routes": True, "replays_routes": True}, kind="experts", option="routing_replay"),
    "prediction": Choice({"prediction": PredictionOptions(synced=True)}, kind="predicting", option="prediction"),
}
KINDS_OF_FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "qwen3": (),
    "gemma3": (),
    "mixtral": ("experts",),
    "qwen3_moe": ("experts",),
    "gpt_oss": ("experts",),
    "deepseek_v3": ("experts", "predicting"),
    "glm4_moe": ("experts", "predicting"),
    "qwen3_5": ("predicting",),
    "granite_hybrid": (),
}


class Taking(StagedTensors):
    """A sender that copies what it is told to send, staged in buffers as for a server, to main memory."""

    is_checked = True

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.staged_on: set[str] = set()

    def deliver(self, staged: StagedSlices) -> None:
        """Copy them."""
        for name, tensor in staged.tensors():
            self.values[name] = tensor.cpu().clone()
            self.staged_on.add(tensor.device.type)

    def close(self) -> None:
        """Nothing is held."""


def worked(rank: int, world_size: int, folder: Path, name: str, routers: Sequence[Tensor] | None = None) -> dict[str, Any]:
    """Scores, sent weights and metrics of a role under `CHOICES[name]` that scores, is updated, gives up its memory and takes
    it back, scores, and is sent to an engine; and the logits of its routers, call by call.

    With `routers` these go on with those logits in place of their own, whose gradients stay: in bfloat16 a token may be so near
    two experts that it goes to another one on another device.

    Raises:
        AssertionError: a tensor is not on the device of this process' platform, or not of its type.
    """
    from megarl import platform

    with routed(routers) as logits:
        if platform.current().name == "cpu":
            return _worked(folder, CHOICES[name], "cpu", lambda: None) | {"routers": logits}
        from tests.pretended_gpu import begin, the_gpu

        with the_gpu():
            return _worked(folder, CHOICES[name], "cuda", begin) | {"routers": logits}


@contextmanager
def routed(given: Sequence[Tensor] | None) -> Iterator[list[Tensor]]:
    """Collect the logits of all routers; they go on with those that are `given` for each call."""
    from megatron.core.transformer.moe.router import TopKRouter

    collected: list[Tensor] = []
    routing = TopKRouter.routing

    def collecting(router: Any, logits: Tensor, *arguments: Any, **named: Any) -> Any:
        collected.append(logits.detach().cpu().clone())
        if given is not None:
            logits = logits + (given[len(collected) - 1].to(logits.device) - logits).detach()
        return routing(router, logits, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopKRouter, "routing", collecting)
        yield collected


def _worked(folder: Path, choice: Choice, device: str, begin: Callable[[], None]) -> dict[str, Any]:
    """`begin` is called in each thread that sends."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.offload import Offload
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    given = dict(choice.model)
    if choice.adapters:
        given["lora"] = part("lora", "weight_map", "policy.lora").Lora(rank=3, alpha=5.0)
    options = ModelOptions(str(folder), Layout(), logit_chunk_tokens=5, **given)
    role = RankModel(options, OptimizerOptions(lr=LR, eps=EPS, **choice.optimizer))
    check(role, options, device)
    mine = micro_batches(1)[0]
    before = role.forward(mine)
    metrics = role.update(mine, objective)
    check(role, options, device)
    away = Offload(role, device)
    away.keep(weights=False, rest=False)
    away.keep(weights=True, rest=True)
    after = role.forward(mine)
    pusher, taking = Pusher(choose_device=begin), Taking()
    pusher.connect(0, lambda: taking)
    pushed = pusher.push(role.export_adapters() if choice.adapters else role.export())[0]
    assert pushed.error is None, pushed.error
    assert taking.staged_on == {device}
    answers = (("before", before), ("after", after))
    return {
        "scores": {f"{when} {row}": values for when, of_rows in answers for row, values in of_rows.items()},
        "weights": taking.values,
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, float)},
    }


def objective(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, Any]]:
    """A weighted sum of what the head gives of each token, and its sum as a tensor."""
    weights = stream.columns["weights"]
    return -(weights * (output[:, 0] + 0.3 * output[:, -1])).sum(), {"tokens": float(len(output)), "sum": output[:, 0].sum()}


def check(role: Any, options: ModelOptions, device: str) -> None:
    """Every parameter, buffer, gradient and state of the optimizer is on `device` and of the type that it must have.

    Weights are of the role's type, but for a value head's; gradients are summed in float32, or in the weights' type where the
    options say so; the optimizer's weights and moments are float32.
    """
    own = getattr(torch, options.dtype)
    summed = torch.float32 if options.megatron.get("grad_reduce_in_fp32", True) else own
    wrong = []
    for number, chunk in enumerate(role.chunks):
        for name, tensor in chunk.named_parameters():
            wrong += _wrong(f"weight {number} {name}", tensor, device, _of(name, own, options))
            gradient = getattr(tensor, "main_grad", None)
            assert gradient is not None or not tensor.requires_grad, name
            if gradient is not None:
                wrong += _wrong(f"gradient {number} {name}", gradient, device, _of(name, summed, options))
        for name, tensor in chunk.named_buffers():
            wrong += _wrong(f"buffer {number} {name}", tensor, device, {tensor.dtype})
    for name, tensor in _states(role.optimizer):
        wrong += _wrong(f"state {name}", tensor, device, {torch.float32})
    assert not wrong, "\n".join(wrong)


def _of(name: str, dtype: torch.dtype, options: ModelOptions) -> set[torch.dtype]:
    """Types that a weight or its gradient may have."""
    return {torch.float32} if options.head == "value" and "output_layer" in name else {dtype}


def _wrong(name: str, tensor: Tensor, device: str, dtypes: set[torch.dtype]) -> list[str]:
    right = tensor.device.type == device and tensor.dtype in dtypes
    return [] if right else [f"{name} is {tensor.dtype} on {tensor.device}, which must be one of {dtypes} on {device}"]


def _states(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights and moments of every part of the optimizer, without its counters."""
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = one.optimizer
        for group in inner.param_groups:
            yield from ((f"{number} weight", tensor) for tensor in group["params"])
        for state in inner.state.values():
            yield from ((f"{number} {key}", value) for key, value in state.items() if isinstance(value, Tensor) and value.dim())
