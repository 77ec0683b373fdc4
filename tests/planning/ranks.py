"""What a real rank's tensors sum to: parameters, gradients, optimizer state and activations saved for the backward pass.

Runs in the tests' world of processes, on models that are built from a config alone, with random weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.media import Media
from megarl.data.micro_batches import Grid
from megarl.data.stream import MicroBatch, Response, Unit

VOCABULARY = 1000
Case = tuple[Layout, dict[str, Any], str]
"""A layout, a model's config, and its head."""


@dataclass
class Held:
    """Bytes of one rank; `activations` is the most that was saved at once in one update.

    `copied` are gradients that the optimizer's step has in another type than the buffers of gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    copied: int


def meta_counts(rank: int, world_size: int, cases: list[Case]) -> list[list[int]]:
    """For each case the parameters of the first and the last rank of every stage, as megatron-core builds them without memory.

    Needs a world of one process: it plays every rank of worlds of any size, whose groups are not connected to anything.
    """
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state

    current_device = torch.cuda.current_device
    torch.distributed.destroy_process_group()
    found = []
    try:
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment]
        for layout, config, head in cases:
            of_stage, counts = layout.world_size // layout.pp, []
            for stage in range(layout.pp):
                for played in {stage * of_stage, (stage + 1) * of_stage - 1}:
                    store = torch.testing._internal.distributed.fake_pg.FakeStore()
                    torch.distributed.init_process_group("fake", rank=played, world_size=layout.world_size, store=store)
                    with torch.device("meta"):
                        chunks, _ = _model(layout, config, head=head, trainable=False)
                    counts.append(sum(p.numel() for chunk in chunks for p in chunk.parameters()))
                    parallel_state.destroy_model_parallel()
                    torch.distributed.destroy_process_group()
            found.append(counts)
    finally:
        torch.cuda.current_device = current_device
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return found


def held(
    rank: int,
    world_size: int,
    layout: Layout,
    config: dict[str, Any],
    options: dict[str, Any],
    tokens: int,
    scored: int,
    micro_batches: int,
    grid: Grid | None = None,
) -> dict[str, int]:
    """Bytes of one update of `micro_batches`, each two sequences of `tokens` in all, of which `scored` have log-probs.

    With a `grid` each of their prompts shows a picture of its own.
    """
    from megatron.core.utils import unwrap_model

    from megarl.megatron.optimizer import build_optimizer
    from megarl.megatron.options import OptimizerOptions
    from megarl.megatron.pass_parts import PassParts, open_pass_parts
    from megarl.megatron.step import forward_backward
    from megarl.megatron.weights import role_map

    chunks, model_options = _model(layout, config, **options)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 50)
    optimizer, _ = build_optimizer(chunks, OptimizerOptions(lr=1e-3), model_options, role_map(model_options, _folder(config)))
    layer = next(filter(None, (getattr(unwrap_model(chunk), "mtp", None) for chunk in chunks)), None)
    copied_embedding = [layer.embedding] if layer is not None and layer.embedding is not None else []
    watch = _Saved(parameters)
    batches = [_micro_batch(generator, tokens, scored) for _ in range(micro_batches)]
    if grid is not None:
        batches = _with_pictures(chunks, config, batches, grid)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack), watch.recomputed():
        forward_backward(chunks, model_options, batches, _loss, parts=PassParts(open_pass_parts(chunks, model_options)))
    optimizer.prepare_grads()
    buffers = {gradient.untyped_storage().data_ptr() for gradient in _gradients(chunks)}
    copied = [gradient for gradient in _main_gradients(optimizer) if gradient.untyped_storage().data_ptr() not in buffers]
    optimizer.step()
    return asdict(
        Held(
            parameters=sum(t.numel() * t.element_size() for t in [*parameters, *_expert_biases(chunks), *copied_embedding]),
            gradients=_bytes(_gradients(chunks)),
            optimizer=_bytes(_state(optimizer, parameters)),
            activations=watch.peak,
            copied=_bytes(copied),
        )
    )


def _model(layout: Layout, config: dict[str, Any], **options: Any) -> tuple[list[Any], Any]:
    from megarl.megatron.build import build_model, initialize_layout
    from megarl.megatron.options import ModelOptions

    initialize_layout(layout, seed=1)
    model_options = ModelOptions("model", layout, **options)
    return build_model(model_options, _folder(config)), model_options


def _folder(config: dict[str, Any]) -> Any:
    """A model folder of which only the config and the names of tensors are read."""
    from megarl.models.registry import architecture_for

    return SimpleNamespace(config=config, names=architecture_for(config).weight_map(config).with_prediction().hf_names())


def _micro_batch(generator: torch.Generator, tokens: int, scored: int) -> MicroBatch:
    """Two sequences; a response's last token is not fed, so each has a token more than it brings to the stream."""
    sizes = [(tokens - scored) // 2, scored // 2 + 1]
    parts = [[torch.randint(0, VOCABULARY, (size,), generator=generator) for size in sizes] for _ in range(2)]
    masks = torch.ones(sizes[1], dtype=torch.bool)
    return [Unit(prompt, [Response(row, answer, masks, {})]) for row, (prompt, answer) in enumerate(parts)]


def _with_pictures(chunks: list[Any], config: dict[str, Any], batches: list[MicroBatch], grid: Grid) -> list[MicroBatch]:
    """Pictures at the beginning of all prompts, no two alike; their pixels are noise."""
    from megatron.core.utils import unwrap_model

    from megarl.models.registry import architecture_for
    from megarl.options.pictures.positions import prompt_positions

    vision = architecture_for(config).vision(config)
    assert vision is not None
    noise = SimpleNamespace(patches=lambda media: torch.randn(prod(media.grid), *vision.patch_shape))
    unwrap_model(chunks[0]).pictures = noise
    numbers = count()

    def shown(unit: Unit) -> Unit:
        media = (Media("image", (str(next(numbers)),), grid, 1, prod(grid) // vision.merge**2),)
        return replace(unit, media=media, positions=prompt_positions(len(unit.prompt_ids), media, vision))

    return [[shown(unit) for unit in units] for units in batches]


def tower_saved(
    rank: int, world_size: int, config: dict[str, Any], cases: list[tuple[str, str, tuple[str, ...]]], grids: list[Grid]
) -> list[tuple[int, int]]:
    """By (dtype, what is recomputed, what is frozen): bytes that autograd has saved of a tower after the forward pass, and
    the most in the backward pass."""
    return [_tower_saved(config, dtype, recompute == "full", freeze, grids) for dtype, recompute, freeze in cases]


def _tower_saved(
    config: dict[str, Any], dtype: str, recompute: bool, freeze: tuple[str, ...], grids: list[Grid]
) -> tuple[int, int]:
    from megarl.megatron.model_config import DTYPES
    from megarl.models.registry import architecture_for
    from megarl.models.vision import part_of
    from megarl.options.pictures.tower import build_tower, look

    vision = architecture_for(config).vision(config)
    assert vision is not None
    tower = build_tower(config, vision, DTYPES[dtype], recompute=recompute).train()
    for name, parameter in tower.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(part_of(f"visual.{name}") not in freeze)
    pixels = torch.randn(sum(map(prod, grids)), *vision.patch_shape).to(DTYPES[dtype])
    watch = _Saved(list(tower.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack), watch.recomputed():
        found = look(tower, vision, pixels, torch.tensor(grids))
        loss = sum(part.sum() for part in found)
        del found, pixels
        kept = watch.now
        if loss.requires_grad:
            loss.backward()
    return kept, watch.peak


def _loss(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    return output[:, 0].sum() * 1e-3, {}


def _gradients(chunks: list[Any]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _state(optimizer: Any, parameters: list[Tensor]) -> list[Tensor]:
    """Moments and master weights; shards of float32 weights are the weights themselves."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        moments = (value for state in adam.state.values() for value in state.values() if torch.is_tensor(value))
        found += [value for value in moments if value.numel() > 1]
        found += [p for group in adam.param_groups for p in group["params"] if p.untyped_storage().data_ptr() not in own]
    return found


def _main_gradients(optimizer: Any) -> list[Tensor]:
    """What Adam reads, by whichever name megatron-core gives it."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    parameters = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    return [gradient for p in parameters for gradient in (p.grad, getattr(p, "decoupled_grad", None)) if gradient is not None]


def precision_aware(rank: int, world_size: int, *arguments: Any) -> dict[str, int]:
    """`held` with a stand-in for Transformer Engine's Adam, which needs CUDA: megatron-core says what it is built with.

    Needs a world of its own: what it puts in place stays there.
    """
    import sys
    from types import ModuleType

    import megatron.core.optimizer as of_core
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    of_core.Adam = distrib_optimizer.Adam = FusedAdam  # type: ignore[misc]
    of_core.USING_PYTORCH_OPTIMIZER = False
    for module in (of_core, optimizer_config):
        module.is_te_min_version = lambda *_, **__: True  # type: ignore[assignment]
    return held(rank, world_size, *arguments)


class FusedAdam(torch.optim.Optimizer):
    """Allocates what Transformer Engine's Adam (2.20: `initialize_state`) does under the same arguments; computes nothing."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master = master_weight_dtype if master_weights else None
        self.remainders = store_param_remainders and self.master == torch.float32

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            dtypes = dict(self.dtypes)
            if self.master is not None:
                dtypes["master_param"] = torch.int16 if self.remainders and parameter.dtype == torch.bfloat16 else self.master
            self.state[parameter] = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in dtypes.items()}


def _expert_biases(chunks: list[Any]) -> list[Tensor]:
    return [value for chunk in chunks for name, value in chunk.named_buffers() if name.endswith("router.expert_bias")]


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class _Saved:
    """Counts the storages that autograd keeps for the backward pass, while it keeps them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._users: dict[int, int] = {}
        self.now = self.peak = 0

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """Also count what torch's checkpoints without reentrance save when they compute anew, which is packed by themselves."""
        hooks = torch.utils.checkpoint._recomputation_hook
        made = hooks.__init__

        def make(hook: Any, frame_of: Any, gid: Any) -> None:
            made(hook, frame_of, gid)
            inner = hook.pack_hook

            def pack(tensor: Tensor) -> Any:
                known = set(map(id, frame_of().recomputed[gid].values()))
                try:
                    return inner(tensor)
                finally:  # it raises once it has all
                    for kept in frame_of().recomputed[gid].values():
                        if id(kept) not in known:
                            self._add(kept, kept)

            hook.pack_hook = pack

        hooks.__init__ = make
        try:
            yield
        finally:
            hooks.__init__ = made

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self._own:
            return tensor
        box = _Box(tensor)
        self._add(tensor, box)
        return box

    def _add(self, tensor: Tensor, owner: Any) -> None:
        """Count the storage of `tensor` while `owner` lives."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._own:
            return
        self._users[place] = self._users.get(place, 0) + 1
        if self._users[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(owner, self._release, place, size)

    def unpack(self, packed: Any) -> Tensor:
        return packed.tensor if isinstance(packed, _Box) else packed

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.now -= size


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
