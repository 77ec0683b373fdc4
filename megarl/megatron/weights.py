"""Weights in and out of a role's model through the architecture's weight map, shard by shard.

Layer and expert numbers come from the module objects. Loading reads only this rank's slices; exporting brings one tensor at
a time to the rank that leads its pipeline stage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from megarl.errors import ModelError
from megarl.megatron.global_names import global_tensors
from megarl.megatron.options import ModelOptions
from megarl.megatron.shards import plain
from megarl.models.adapters import adapter_part, is_adapter
from megarl.models.hf_folder import HFFolder
from megarl.models.packings import padded_vocab
from megarl.models.registry import architecture_for
from megarl.models.weight_map import PREDICTION, BoundRule, WeightMap
from megarl.models.weight_tensors import hf_from_shards, kept_dtype, shard_from_hf

SCORE = "score.weight"
"""Hugging Face's name of the value head, `[1, H]`, of a sequence classifier with one label."""


def role_map(options: ModelOptions, folder: HFFolder) -> WeightMap:
    """The weight map of a role, with its adapters, or with the layer for multi-token prediction if the role has it.

    Raises:
        ConfigError: the role's adapters are of no layer of the model.
        ModelError: the role has the layer, and its folder or its family has not.
    """
    architecture = architecture_for(folder.config)
    weight_map = architecture.weight_map(folder.config)
    if options.lora is not None:
        section = f"{options.section.removesuffix('.megatron')}.lora"
        return options.lora.with_adapters(weight_map, architecture.rows_together(folder.config), section)
    if options.prediction is None:
        return weight_map
    if weight_map.prediction is None:
        why = "megarl trains one layer for multi-token prediction, of families that only read, and this model has none or more"
    elif not weight_map.has_prediction(folder.names):
        why = f"'{folder.path}' has no tensors of a layer for multi-token prediction"
    else:
        return weight_map.with_prediction()
    raise ModelError(f"policy.mtp.train is true, but {why}; it must be false")


def load_weights(chunks: Sequence[torch.nn.Module], options: ModelOptions, folder: HFFolder, weight_map: WeightMap) -> None:
    """Fill every parameter from the Hugging Face folder; a value head keeps its zeros unless the folder is a reward model's.

    Also marks the parameters that tensor parallelism splits, which megatron-core does only as part of its own random
    initialisation: the gradient norm counts an unmarked parameter on the first tensor rank alone. There it would leave out
    biases of experts that are whole, too, because other tensor ranks hold those of other experts.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    left_out = [name for name in folder.names if weight_map.leaves_out(name)]
    if options.prediction is None and left_out and torch.distributed.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "%s: %d tensors beside the model that is trained (%s, ...) stay as they are, also in an export",
            folder.path,
            len(left_out),
            left_out[0],
        )
    copies = [(copy, original) for copy, original in weight_map.copies if copy in folder.names]
    with torch.no_grad():
        for name, tensor in global_tensors(chunks):
            if is_value_head(name, options):
                if SCORE in folder.names:
                    tensor.copy_(folder.get_slice(SCORE)[:])
                continue
            rule = weight_map.rule_for(name)
            if is_adapter(rule.megatron_name):
                continue
            shard = shard_from_hf(rule, folder.get_slice, *_place(rule, options), _padded_vocab(folder, options))
            for copy in (copy for copy, original in copies if original in rule.hf_names):
                again = replace(rule, hf_names=(copy,))
                if not torch.equal(
                    shard, shard_from_hf(again, folder.get_slice, *_place(rule, options), _padded_vocab(folder, options))
                ):
                    raise ModelError(f"tensor '{copy}' in '{folder.path}' differs from that which it must copy")
            tensor.copy_(shard)
            _keep_full_precision(tensor, shard, trainable=options.trainable)
            whole_expert = rule.expert is not None and options.layout.etp == 1
            if (rule.tp_axis is not None or whole_expert) and not hasattr(tensor, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(tensor, True, rule.tp_axis or 0, 1)
    if options.lora is not None:
        stored = adapter_part("peft_folder").AdapterFolder(options.adapter, folder.config) if options.adapter else None
        adapter_part("layers").load_adapters(chunks, options.lora_seed, stored.get_slice if stored is not None else None)
        if stored is not None:
            adapter_part("layers").check_output(chunks, weight_map, stored, folder.get_slice)


def _keep_full_precision(tensor: Any, values: Tensor, *, trainable: bool) -> None:
    """Keep a copy where `tensor` holds FP8: Transformer Engine has a copy in full precision for the optimizer to start from."""
    if not hasattr(tensor, "get_high_precision_init_val"):
        return
    if trainable:
        tensor.get_high_precision_init_val().copy_(values)
    else:
        tensor.clear_high_precision_init_val()


def local_shards(
    chunks: Sequence[torch.nn.Module],
    options: ModelOptions,
    weight_map: WeightMap,
    quantiser: Quantiser | None = None,
    *,
    at_once: bool = True,
    merged: bool = True,
) -> Mapping[str, Tensor]:
    """The shards that this rank holds, by the weight map's names: views, without value head and tied copies.

    Weights with adapters beside them are copies with these `merged` in, or views of what training began with.

    Of weights that Transformer Engine holds in FP8 these are copies in the model's dtype, which no view of FP8 values could be.
    With a `quantiser` what it applies to is quantised; that may be collective over the ranks that share a parameter.
    Copies are made all `at_once`, or each when it is asked for, if the caller needs few of them at a time.

    Raises:
        EngineError: merging would give a tied output layer a weight of its own, which engines do not have.
    """
    if options.lora is not None and merged:
        adapter_part("updates").check_merged(weight_map)
    shards = _InTurn()
    values = _values(chunks, options, merged=merged)
    for name, tensor in global_tensors(chunks):
        if is_value_head(name, options):
            continue
        rule = weight_map.rule_for(name)
        if rule.tied_copy or is_adapter(rule.megatron_name):
            continue
        read = partial(values, rule.megatron_name, tensor)
        if quantiser is None or not quantiser.applies_to(rule):
            shards.add([rule.megatron_name], partial(_alone, rule.megatron_name, read))
            continue
        at = _place(rule, options)
        exchange: Any = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX, group=_tensor_group(rule))
        if not at_once:  # what ranks ask for comes in orders of their own, so they agree on the scales of all before
            agreed: Any = quantiser.agreed(rule, read(), *at, exchange)
            exchange = partial(Tensor.copy_, other=agreed)
        shards.add(
            [part.megatron_name for part in quantiser.rules(rule)], partial(_stored, quantiser, rule, read, at, exchange)
        )
    return dict(shards) if at_once else shards


def _alone(name: str, read: Callable[[], Tensor]) -> dict[str, Tensor]:
    return {name: read()}


def _stored(
    quantiser: Quantiser, rule: BoundRule, read: Callable[[], Tensor], at: tuple[int, int], exchange: Callable[[Tensor], None]
) -> dict[str, Tensor]:
    return quantiser(rule, read(), *at, exchange)


Values = Callable[[str, Tensor], Tensor]
"""The values of a parameter that the weight map calls so: a view, or a copy with adapters merged in."""


def _values(chunks: Sequence[torch.nn.Module], options: ModelOptions, *, merged: bool) -> Values:
    if options.lora is None or not merged:
        return lambda name, tensor: plain(tensor)
    values: Values = adapter_part("layers").MergedWeights(chunks)
    return values


def adapter_shards(chunks: Sequence[torch.nn.Module], weight_map: WeightMap) -> dict[str, Tensor]:
    """The shards of adapters on this rank, by the weight map's names."""
    rules = ((weight_map.rule_for(name), tensor) for name, tensor in global_tensors(chunks) if is_adapter(name))
    return {rule.megatron_name: plain(tensor) for rule, tensor in rules}


class _InTurn(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for, with those that are made together with it; these are remembered."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
        self._last: tuple[Any, Mapping[str, Tensor]] = None, {}

    def add(self, names: Sequence[str], make: Callable[[], Mapping[str, Tensor]]) -> None:
        """Have `make` give the tensors that are called so."""
        self._makers |= dict.fromkeys(names, make)

    def __getitem__(self, name: str) -> Tensor:
        make = self._makers[name]
        if self._last[0] is not make:
            self._last = None, {}  # its memory is given back before more is taken
            self._last = make, make()
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _tensor_group(rule: BoundRule) -> Any:
    if rule.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


class Quantiser(Protocol):
    """Makes of a rank's shard what an engine's format stores in its place: `options/few_bits/quantise.py`."""

    def applies_to(self, rule: BoundRule) -> bool:
        """Return whether the parameter is one that is quantised."""

    def rules(self, rule: BoundRule) -> list[BoundRule]:
        """Rules of what is stored in the parameter's place, each with its own dtype."""

    def __call__(
        self, rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int, exchange: Callable[[Tensor], None]
    ) -> dict[str, Tensor]:
        """This rank's shard of each of `rules(rule)`, by Megatron name.

        `exchange` makes a tensor the element-wise largest of all the ranks'.

        Raises:
            LayoutError: the ranks would share a group of numbers that has one scale.
        """

    def agreed(
        self, rule: BoundRule, shard: Tensor, tp_rank: int, tp_size: int, exchange: Callable[[Tensor], None]
    ) -> Tensor | None:
        """Return what `exchange` makes of the tensor that a call would give it, for calls later; None: it would give none."""


def export_weights(
    chunks: Sequence[torch.nn.Module],
    options: ModelOptions,
    weight_map: WeightMap,
    quantiser: Quantiser | None = None,
    replicas: Collection[int] = (0,),
    *,
    prediction: bool = True,
    which: Literal["merged", "weights", "adapters"] = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of this pipeline stage, on its leading rank (tp 0, cp 0, dp 0); other ranks iterate to nothing.

    Collective over the pipeline stage: every rank must exhaust the iterator. The tensor ranks of the leading replica and one
    replica of the experts send what they hold, one shard at a time. A tied output layer is not exported again, unless it has
    an adapter that is merged in. With a `quantiser` the shards are quantised where they lie. Of a model without experts each
    data-parallel replica in `replicas` exports everything, on a leading rank of its own and independently of the others.
    Without `prediction` the layer for multi-token prediction is left out. `which`: weights with their adapters merged in, as
    training began with them, or adapters alone.
    """
    assert weight_map.num_experts == 0 or tuple(replicas) == (0,), "the replicas of a stage share its experts"
    tensor_ranks = torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    expert_ranks = torch.distributed.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group())
    at = options.layout.coords(torch.distributed.get_rank())
    of_replica = at.cp == 0 and at.dp in replicas
    of_experts = parallel_state.get_expert_data_parallel_rank() == 0
    lead = options.layout.rank(pp=at.pp, dp=0 if weight_map.num_experts else at.dp)
    leads = of_replica and torch.distributed.get_rank() == lead
    values = _values(chunks, options, merged=which == "merged")
    for name, tensor in global_tensors(chunks):
        if name.startswith(PREDICTION) and not prediction:
            continue
        if is_value_head(name, options):
            if leads:
                yield SCORE, plain(tensor).contiguous()
            continue
        rule = weight_map.rule_for(name)
        if rule.tied_copy or is_adapter(rule.megatron_name) != (which == "adapters"):
            continue
        local = values(rule.megatron_name, tensor).contiguous()
        if rule.expert is None:
            if of_replica:
                ranks = tensor_ranks if rule.tp_axis is not None else tensor_ranks[:1]
                group = parallel_state.get_tensor_model_parallel_group()
                yield from _whole(rule, local, ranks, lead, quantiser, group)
        elif of_experts:
            group = parallel_state.get_expert_tensor_parallel_group()
            for expert_rule, ranks in _experts_in_turn(rule, weight_map, expert_ranks, options):
                yield from _whole(expert_rule, local, ranks, lead, quantiser, group)
    untied = None
    if options.lora is not None and which == "merged" and of_replica:
        untied = adapter_part("layers").untied_output(chunks, weight_map)
    if untied is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        yield from _whole(untied[0], untied[1], tensor_ranks, lead, quantiser, group)


def _whole(
    rule: BoundRule, local: Tensor, ranks: Sequence[int], lead: int, quantiser: Quantiser | None, group: Any
) -> Iterator[tuple[str, Tensor]]:
    """On `lead` the Hugging Face tensors of the shards that `ranks`, those of `group` or its first one, hold."""
    rank = torch.distributed.get_rank()
    if quantiser is None or not quantiser.applies_to(rule):
        shapes = [tuple(local.shape)] * len(ranks)
        if is_adapter(rule.megatron_name):  # of the vocabulary the last rank has fewer rows, of fused layers some may have none
            shapes = [rule.shape(len(ranks), tp_rank=number) for number in range(len(ranks))]
        shards = _gathered(local, ranks, lead, shapes)
        yield from hf_from_shards(rule, shards) if rank == lead else ()
        return
    quantised: Mapping[str, Tensor] = {}
    if rank in ranks:
        exchange = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX, group=group)
        quantised = quantiser(rule, local, ranks.index(rank), len(ranks), exchange)
    for part in quantiser.rules(rule):
        dtype = kept_dtype(part)
        assert dtype is not None, "a quantised tensor has a dtype of its own"
        holders = ranks if part.tp_axis is not None else ranks[:1]
        shapes = [part.shape(len(ranks), tp_rank=number) for number in range(len(holders))]
        flat = quantised[part.megatron_name].reshape(-1) if rank in ranks else local.new_empty(0, dtype=dtype)
        sizes = [(math.prod(shape) * dtype.itemsize,) for shape in shapes]
        shards = _gathered(flat.view(torch.uint8), holders, lead, sizes)
        if rank == lead:
            pairs = zip(shards, shapes, strict=True)
            yield from hf_from_shards(part, [shard.view(dtype).view(shape) for shard, shape in pairs])


def _experts_in_turn(
    rule: BoundRule, weight_map: WeightMap, ranks: list[int], options: ModelOptions
) -> Iterator[tuple[BoundRule, list[int]]]:
    """For each expert-parallel rank: the rule of the expert that it has in this one's place, and who holds its shards."""
    assert rule.expert is not None
    etp, per_rank = options.layout.etp, weight_map.num_experts // options.layout.ep
    for ep_rank in range(options.layout.ep):
        expert = ep_rank * per_rank + rule.expert % per_rank
        name = rule.megatron_name.replace(f".local_experts.{rule.expert}.", f".local_experts.{expert}.")
        yield weight_map.rule_for(name), ranks[ep_rank * etp : (ep_rank + 1) * etp]


def _gathered(local: Tensor, ranks: Sequence[int], lead: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """On `lead` the shards of `ranks`, of these shapes, in order; elsewhere nothing, and what `ranks` hold is sent."""
    rank = torch.distributed.get_rank()
    if rank != lead:
        if rank in ranks and local.numel():
            torch.distributed.send(local, dst=lead)
        return []
    shards = []
    for source, shape in zip(ranks, shapes, strict=True):
        shards.append(local if source == lead else local.new_empty(shape))
        if source != lead and shards[-1].numel():
            torch.distributed.recv(shards[-1], src=source)
    return shards


def _place(rule: BoundRule, options: ModelOptions) -> tuple[int, int]:
    """(rank, size) of the tensor parallelism that splits a parameter."""
    if rule.expert is None:
        return parallel_state.get_tensor_model_parallel_rank(), options.layout.tp
    return parallel_state.get_expert_tensor_parallel_rank(), options.layout.etp


def is_value_head(name: str, options: ModelOptions) -> bool:
    """Return whether a parameter is of the role's own scalar head, which is in no weight map."""
    return options.head == "value" and name.startswith("output_layer.")


def _padded_vocab(folder: HFFolder, options: ModelOptions) -> int:
    vocab_size = architecture_for(folder.config).gpt_kwargs(folder.config)["vocab_size"]
    return padded_vocab(vocab_size, options.layout.tp)
