"""A role (policy, reference, critic, reward model) on this rank: its model, optimizer and weights.

Plain Python: a Ray actor or a test world drives it. `megarl.platform.install()` and torch.distributed come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.stream import MicroBatch, ScorePosition, TopK
from megarl.megatron.build import build_model
from megarl.megatron.global_names import global_tensors
from megarl.megatron.moving_average import MovingAverage
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.options import ModelOptions, OptimizerOptions
from megarl.megatron.pass_parts import PassParts, open_pass_parts
from megarl.megatron.router_watch import RouterWatch
from megarl.megatron.step import LossFunction, PassProgress, forward, forward_backward
from megarl.megatron.update_guard import WatchedLoss, refusal
from megarl.megatron.weights import Quantiser, export_weights, load_weights, role_map
from megarl.models.adapters import adapter_part
from megarl.models.hf_folder import HFFolder
from megarl.models.weight_map import PREDICTION
from megarl.observe.expert_load import EXPERTS
from megarl.option_list import functions
from megarl.platform.deterministic import make_deterministic


class RankModel:
    """One model under one layout. Without `optimizer` it only answers `forward`."""

    def __init__(self, options: ModelOptions, optimizer: OptimizerOptions | None = None) -> None:
        self.options, self.progress = options, PassProgress()
        if options.deterministic:
            make_deterministic()
        folder = HFFolder(options.path)
        self.weight_map = role_map(options, folder)
        self.adapters: Any = adapter_part("layers").AdapterSwitch() if options.lora is not None else None
        self.chunks = build_model(options, folder, self.adapters)
        load_weights(self.chunks, options, folder, self.weight_map)
        if self.adapters is not None and options.adapter is not None:
            self.adapters.remember(self.chunks)
        self.average = MovingAverage()
        self.parts = open_pass_parts(self.chunks, options)
        self.optimizer: Any = None
        self.gathered: Any = None
        """Gradients that no optimizer step has applied (`gathered_updates.py`); None: there are none."""
        self.watch: RouterWatch | None = None
        if optimizer is not None:
            if self.weight_map.num_experts:
                self.watch = RouterWatch(self.chunks, options.layout, options.experts)
            self.skip_rules, self.method, self.updates_per_step = (
                optimizer.skip_rules,
                optimizer.name,
                optimizer.updates_per_step,
            )
            self.optimizer, self.scheduler = build_optimizer(self.chunks, optimizer, options, self.weight_map)

    @property
    def reports(self) -> bool:
        """Return whether this rank's results speak for its data-parallel replica: last stage, first tensor and context rank."""
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def forward(
        self, micro_batches: Sequence[MicroBatch], *, position: ScorePosition = ScorePosition.NEXT, top_k: TopK | None = None
    ) -> Answers:
        """`{response index: float32 [L, C]}` on reporting ranks (see `step.forward`), else empty."""
        for chunk in self.chunks:
            chunk.eval()
        laid = self._placed(micro_batches)
        results = forward(
            self.chunks,
            self.options,
            laid,
            position=position,
            progress=self.progress,
            top_k=top_k,
            parts=PassParts(self.parts),
        )
        return results if self.reports else Answers.joined([])

    def update(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, position: ScorePosition = ScorePosition.NEXT
    ) -> dict[str, Any]:
        """One optimizer step on the summed loss of `micro_batches` over all data-parallel ranks.

        It is not applied, and weights, moments and schedule stay as they are, where `update_guard.refusal` says so. Gradients
        gathered before it are dropped.

        Returns metric sums of this rank on reporting ranks; what layers with experts routed under `EXPERTS`, on the leading
        rank of their stage; and `grad_norm`, `lr`, `skipped` and `non_finite` on rank 0.
        """
        self.gathered = None
        watched = WatchedLoss(loss_function)
        run = self.training_pass(micro_batches, watched, position)
        metrics, is_finite = self.outcome(run(), watched)
        return self.apply(metrics, is_finite=is_finite)

    def training_pass(
        self, micro_batches: Sequence[MicroBatch], watched: WatchedLoss, position: ScorePosition
    ) -> Callable[..., dict[str, Any]]:
        """Return `step.forward_backward` over `micro_batches`, to be called once."""
        for chunk in self.chunks:
            chunk.train()
        laid, parts = self._placed(micro_batches), PassParts(self.parts, self.watch)
        pass_of = partial(forward_backward, self.chunks, self.options, laid, watched)
        return partial(pass_of, position=position, progress=self.progress, parts=parts)

    def outcome(self, totals: dict[str, Any], watched: WatchedLoss) -> tuple[dict[str, Any], bool]:
        """Metric sums of a training pass, on reporting ranks, and whether its losses were finite."""
        metrics = totals if self.reports else {}
        of_parts = (metrics.get(name, 0.0) for part in self.parts for name in part.losses)
        return metrics, watched.is_finite and all(map(math.isfinite, of_parts))

    def apply(self, metrics: dict[str, Any], *, is_finite: bool) -> dict[str, Any]:
        """The optimizer step by the reduced gradients, unless `update_guard.refusal` refuses it; see `update`."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        refused = refusal(metrics, grad_norm, loss_is_finite=is_finite, rules=self.skip_rules)
        routed = self.watch.take() if self.watch is not None else {}
        if not refused["skipped"]:
            self.scheduler.step(1)
            self.optimizer.step()
            if self.watch is not None:
                self.watch.move_biases()
        self.optimizer.zero_grad()  # of bfloat16 gradients it has copies in float32, which nobody moves off the GPU
        metrics |= {EXPERTS: routed} if routed else {}
        if torch.distributed.get_rank() == 0:
            metrics |= {"grad_norm": grad_norm, "lr": self.scheduler.get_lr({}), **refused}
        return metrics

    def take_tower_seconds(self) -> float:
        """Seconds of the vision tower's forward passes in updates since the last call; 0 where this rank has none."""
        return sum((take(self.chunks) for take in functions("model_part", "take_tower_seconds")), 0.0)

    def _placed(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The same micro-batches with what parts of options want them to have before they are laid."""
        for part in self.parts:
            micro_batches = [part.placed(units) for units in micro_batches]
        return micro_batches

    def copy_weights_from(self, other: RankModel, share: float = 1.0) -> None:
        """Weights ← share·(those of a role with the same layout and head) + (1 − share)·(own); with 1 they are taken over.

        The optimizer, if any, is not touched, and the other's layer for multi-token prediction is left out if this has none.
        """
        targets, sources = global_tensors(self.chunks), global_tensors(other.chunks)
        if self.options.prediction is None:
            sources = ((name, tensor) for name, tensor in sources if not name.startswith(PREDICTION))
        if share != 1:
            self.average.follow(targets, sources, share)
            return
        with torch.no_grad():
            for (_, target), (_, source) in zip(targets, sources, strict=True):
                target.copy_(source)

    def export(
        self, quantiser: Quantiser | None = None, replicas: Collection[int] = (0,), *, prediction: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors of this stage on its leading rank (see `weights.export_weights`)."""
        return export_weights(self.chunks, self.options, self.weight_map, quantiser, replicas, prediction=prediction)

    def export_adapters(self, replicas: Collection[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
        """Export adapters as `export` does weights: tensors such as `model.layers.0.self_attn.q_proj.lora_A.weight`, and
        a value head."""
        return export_weights(self.chunks, self.options, self.weight_map, None, replicas, which="adapters")
