"""Many models on one base, on a training rank: one has its place in the role, the others' state is kept beside it.

A model's state is what this rank has of it in buffers and optimizer: trained parameters, gradients since the last step, float32
masters, moments and their count. Copies of these know nothing of the layout. The role is built with adapters of the largest
rank. A model of a smaller one has zeros in the rows of A and columns of B behind it, and a model that leaves out layers has
zeros in theirs. There both gradients are 0, so they stay zero. Checkpoints have a model's own rank, and load under any largest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.checkpoint.dist_writer import Written, write_shards
from megarl.megatron.box_reader import BoxReader
from megarl.megatron.gathered_updates import Gathered, apply_gathered
from megarl.megatron.hf_export import write_role
from megarl.megatron.optimizer_state import adams, make_moments, parts_of
from megarl.megatron.rank_model import RankModel
from megarl.megatron.role_checkpoint import load_role, shards_of_role
from megarl.megatron.shards import ShardBox, host_memory
from megarl.megatron.weights import load_weights
from megarl.models.adapters import LORA_A, adapter_part, is_adapter_tensor
from megarl.models.hf_folder import HFFolder
from megarl.options.serve.adapter_kinds import Facts, is_chosen, kind_of
from megarl.options.serve.values import AdamParams, AdapterChoice


@dataclass
class _Kept:
    """The state of a model that is not in its place: tensors in main memory by name, or the `file` that has them.

    `counts` are those of updates that optimizers keep in their groups, `steps` the model's own. `gathered`: as in `RankModel`,
    None without gradients.
    """

    choice: AdapterChoice | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    steps: int = 0
    gathered: Gathered | None = None
    file: Path | None = None


class StepParameters:
    """Takes the place of a role's schedule: parameters of Adam as each request has them. `num_steps` is the model's count."""

    def __init__(self, optimizer: Any) -> None:
        """Parts of megatron-core's `optimizer`; one or several in a chain."""
        self.optimizer, self.num_steps, self.adam = optimizer, 0, AdamParams()

    def take(self, adam: AdamParams) -> None:
        """Have the next step go by `adam`."""
        self.adam = adam
        for part in (self.optimizer, *parts_of(self.optimizer)):
            part.config.clip_grad = adam.grad_clip_norm

    def step(self, increment: int) -> None:
        """Set the parameters, before the optimizer's step."""
        self.num_steps += increment
        adam = self.adam
        betas = (adam.beta1, adam.beta2)
        # An optimizer that offloads has groups of its own beside those of the optimizers inside.
        for one in (*(part.optimizer for part in parts_of(self.optimizer)), *adams(self.optimizer)):
            for group in one.param_groups if one is not None else ():
                group.update(lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)

    def get_lr(self, group: Any) -> float:
        """The learning rate."""
        return self.adam.learning_rate


class RankModels:
    """The models of a role on this rank. All ranks are told the same in the same order."""

    def __init__(self, role: RankModel, live: int, folder: Path) -> None:
        """`live`: how many are held in memory; those that were used longest ago are moved to files in `folder`."""
        self.role, self.live, self.folder = role, live, folder
        self.current: str | None = None
        self._choices: dict[str, AdapterChoice | None] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._files = 0
        role.scheduler = StepParameters(role.optimizer)
        self.steps: StepParameters = role.scheduler
        self._adapters: list[Any] = []
        if role.options.lora is not None:
            self._adapters = [*adapter_part("layers").adapters_of(role.chunks)]
        make_moments(role.optimizer, role.chunks)
        self._restart(None)

    @property
    def facts(self) -> Facts:
        """Facts of what models can have, as far as this rank knows: other stages have other layers."""
        lora = self.role.options.lora
        if lora is None:
            return Facts(None)
        return Facts(lora.rank, frozenset(kind_of(adapter.site.a.hf_names[0]) for adapter in self._adapters))

    # which model has its place in the role ------------------------------------------------------------------------

    def create(self, name: str, choice: AdapterChoice | None) -> None:
        """Make a model that computes what the base does, and give it the place."""
        self._set_aside()
        self._choices[name], self.current = choice, name
        self._restart(choice)
        self._scale(choice)

    def drop(self, name: str) -> None:
        """Forget a model."""
        self._choices.pop(name, None)
        if self.current == name:
            self.current, self.role.gathered = None, None
        kept = self._kept.pop(name, None)
        if kept is not None and kept.file is not None:
            kept.file.unlink(missing_ok=True)

    def switch(self, name: str) -> None:
        """Give a model the place; nothing is done if it has it."""
        if self.current == name:
            return
        kept = self._kept[name]
        self._kept.move_to_end(name)
        self._set_aside()
        if kept.file is not None:
            kept.tensors = load_file(kept.file)
            kept.file.unlink()
            kept.file = None
        self._put_back(kept)
        self.current = name
        self._scale(self._choices[name])

    def stash(self) -> None:
        """Keep a copy of the model in its place, for `put_back`."""
        assert self.current is not None, "a model has the place"
        self._copy_out(self.current)

    def put_back(self) -> None:
        """Give the model in its place the state that `stash` kept."""
        assert self.current is not None, "a model has the place"
        self._put_back(self._kept[self.current])

    def _set_aside(self) -> None:
        """Keep the state of the model in its place, and move to files what is more than memory is to hold."""
        if self.current is not None:
            self._copy_out(self.current)
            self._kept.move_to_end(self.current)
            self.current = None
        in_memory = [kept for kept in self._kept.values() if kept.file is None]
        for kept in in_memory[: max(0, len(in_memory) - self.live)]:
            self._files += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"model{self._files}-rank{torch.distributed.get_rank()}.safetensors"
            save_file(kept.tensors, file)
            kept.file, kept.tensors = file, {}

    def _copy_out(self, name: str) -> None:
        role, kept = self.role, self._kept.setdefault(name, _Kept(self._choices[name]))
        live = dict(self._live(gradients=role.gathered is not None))
        for gone in kept.tensors.keys() - live.keys():
            del kept.tensors[gone]
        for key, tensor in live.items():
            if key not in kept.tensors:
                kept.tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        _copy([(kept.tensors[key], tensor) for key, tensor in live.items()])
        kept.counts, kept.steps = [group["step"] for group in self._counting()], self.steps.num_steps
        kept.gathered = _copied(role.gathered)

    def _put_back(self, kept: _Kept) -> None:
        role = self.role
        role.gathered, self.steps.num_steps = _copied(kept.gathered), kept.steps
        _copy([(tensor, kept.tensors[key]) for key, tensor in self._live(gradients=role.gathered is not None)])
        for group, count in zip(self._counting(), kept.counts, strict=True):
            group["step"] = count

    # what a model's state is --------------------------------------------------------------------------------------

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.role.chunks:
            ddp: Any = chunk
            yield from (*ddp.buffers, *ddp.expert_parallel_buffers)

    def _live(self, *, gradients: bool) -> Iterator[tuple[str, Tensor]]:
        """By name the tensors of the role that differ from model to model."""
        held = set()
        for number, buffer in enumerate(self._buffers()):
            if gradients:
                yield f"gradients.{number}", buffer.grad_data
            held.add(buffer.param_data.untyped_storage().data_ptr())
            yield f"parameters.{number}", buffer.param_data
        for number, (main, state) in enumerate(self._optimized()):
            if main.untyped_storage().data_ptr() not in held:  # of float32 weights it is a view
                yield f"main.{number}", main.detach()
            for key, values in state.items():
                if isinstance(values, Tensor):
                    yield f"{key}.{number}", values

    def _optimized(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for adam in adams(self.role.optimizer):
            for group in adam.param_groups if adam is not None else ():
                yield from ((main, adam.state[main]) for main in group["params"])

    def _counting(self) -> list[dict[str, Any]]:
        """Groups that count updates themselves, as those of Transformer Engine's and apex's Adam."""
        groups = (group for adam in adams(self.role.optimizer) if adam is not None for group in adam.param_groups)
        return [group for group in groups if "step" in group]

    @torch.no_grad()
    def _restart(self, choice: AdapterChoice | None) -> None:
        """Weights as a new model has them, moments 0, no gradients."""
        role = self.role
        if role.options.lora is not None:
            adapter_part("layers").load_adapters(role.chunks, 0 if choice is None else choice.seed, None)
            for adapter in self._adapters:
                _leave_out(adapter, choice)
        else:
            load_weights(role.chunks, role.options, HFFolder(role.options.path), role.weight_map)
        role.optimizer.reload_model_params()
        self.restart_optimizer()

    @torch.no_grad()
    def restart_optimizer(self) -> None:
        """Moments 0, no updates counted, no gradients."""
        self.role.gathered, self.steps.num_steps = None, 0
        for _, state in self._optimized():
            for values in state.values():
                if isinstance(values, Tensor):
                    values.zero_()
        for group in self._counting():
            group["step"] = 0

    def _scale(self, choice: AdapterChoice | None) -> None:
        for adapter in self._adapters:
            adapter.scale = self.lora_of(choice).scale

    def lora_of(self, choice: AdapterChoice | None) -> Any:
        """The adapters of a model as the option lora describes them."""
        lora: Any = self.role.options.lora
        return lora if choice is None else replace(lora, rank=choice.rank)

    # what is asked of the model in its place ----------------------------------------------------------------------

    def optimizer_step(self, adam: AdamParams) -> dict[str, Any]:
        """Apply the gradients, zeros if there are none; figures on rank 0 as of `RankModel.step`."""
        role = self.role
        if role.gathered is None:
            chunks: Sequence[Any] = role.chunks
            for chunk in chunks:
                chunk.zero_grad_buffer()
            role.gathered = Gathered()
        self.steps.take(adam)
        return apply_gathered(role)

    def forget_gradients(self) -> None:
        """Drop the gradients since the last step, and what experts were counted for them."""
        self.role.gathered = None
        if self.role.watch is not None:
            self.role.watch.aside.zero_()

    def save(self, folder: str) -> Written:
        """Write this rank's part of a checkpoint, which has adapters of the model's own rank."""
        assert self.current is not None, "a model has the place"
        shards, choice = shards_of_role(self.role), self._choices[self.current]
        if choice is not None:
            shards = replace(shards, boxes=[kept for box in shards.boxes for kept in _of_rank(box, choice.rank)])
        return write_shards(shards.copied_into(host_memory(shards.nbytes)), folder)

    def load(self, folder: str, optimizer: Literal["taken", "restarted"]) -> None:
        """Take over a checkpoint, with or without the optimizer's state; the state before is kept for `put_back`.

        Collective over the world.
        """
        self.stash()
        self.role.gathered = None
        load_role(self.role, folder, PaddedReader)
        if optimizer == "restarted":
            self.restart_optimizer()

    def export(self, folder: str) -> None:
        """Write a PEFT folder, or a model folder; collective over the world."""
        assert self.current is not None, "a model has the place"
        choice, role = self._choices[self.current], self.role
        if choice is None:
            write_role(role, folder)
            return
        shown: Any = SimpleNamespace(
            options=replace(role.options, lora=self.lora_of(choice)), export_adapters=lambda: self.adapters(choice)
        )
        write_role(shown, folder, adapters=True)

    def adapters(self, choice: AdapterChoice) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a model's adapters of this stage on its leading rank, without what is always zero."""
        for name, tensor in self.role.export_adapters():
            if not is_adapter_tensor(name):
                yield name, tensor
            elif is_chosen(kind_of(name), choice):
                yield name, tensor[: choice.rank] if name.endswith(LORA_A) else tensor[:, : choice.rank]


def _leave_out(adapter: Any, choice: AdapterChoice | None) -> None:
    """Set to zero what is behind a model's rank, or all of a layer that it does not train."""
    kept = choice.rank if choice is not None and is_chosen(kind_of(adapter.site.a.hf_names[0]), choice) else 0
    adapter.A.view(adapter.layers, adapter.rank, -1)[:, kept:] = 0.0
    adapter.B[:, kept:] = 0.0


class PaddedReader(BoxReader):
    """A checkpoint whose adapters may have another rank than those of the role: behind it they get zeros.

    States that were written with the zeros in them, of a server of any largest rank, are read alike.
    """

    def read(self, boxes: Iterable[ShardBox]) -> None:
        """Read values into boxes, with more or less padding behind an adapter's rank."""
        super().read(replace(box, padded_axis=_rank_axis(box.key)) if is_adapter_tensor(box.key) else box for box in boxes)


def _rank_axis(key: str) -> int | None:
    """The axis of an adapter's tensor, or of its moments, that is as long as its rank; None of any other tensor."""
    return (0 if key.endswith(LORA_A) else 1) if is_adapter_tensor(key) else None


def _of_rank(box: ShardBox, rank: int) -> Iterator[ShardBox]:
    """The part of a box of an adapter's tensor that a model of `rank` has; nothing if it is all behind that."""
    axis = _rank_axis(box.key)
    if axis is None:
        yield box
        return
    kept = min(box.sizes[axis], rank - box.offsets[axis])
    if kept <= 0:
        return
    shape, sizes = ((*of[:axis], length, *of[axis + 1 :]) for of, length in ((box.global_shape, rank), (box.sizes, kept)))
    data = box.data.view(box.sizes).narrow(axis, 0, kept).reshape(-1)
    yield replace(box, global_shape=shape, sizes=sizes, data=data)


def _copied(gathered: Gathered | None) -> Gathered | None:
    """The same for a copy of the gradients: passes add to its metrics."""
    return None if gathered is None else replace(gathered, metrics=dict(gathered.metrics))


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, all of them at once; on return they are there."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    if any(tensor.is_cuda for pair in pairs for tensor in pair):
        torch.cuda.current_stream().synchronize()


_MODELS: WeakKeyDictionary[RankModel, RankModels] = WeakKeyDictionary()


def hold_models(role: RankModel, live: int, folder: str) -> Facts:
    """Have a role hold models, at most `live` of them in memory and the others in files in `folder`."""
    _MODELS[role] = models = RankModels(role, live, Path(folder))
    return models.facts


def models_of(role: RankModel) -> RankModels:
    """The models that a role holds."""
    return _MODELS[role]
