"""Low-rank adapters beside megatron-core's linear layers: W x + scale·B(A x), in which A and B alone are trained.

An adapter is a module of its own, next to the layer, and adds to the layer's output by a forward hook, so that it serves every
kind of linear layer: megatron-core's, Transformer Engine's, megarl's. What crosses tensor ranks is as wide as the rank of the
adapter: of a layer split by rows of W (`column parallel`) A is whole on every rank and B split as W, and A x is gathered
(sequence parallelism) or its gradient summed; of one split by columns A is split as W, and A x is summed over the ranks.

The output layer's adapter enters the head that takes that layer's place, which makes logits chunk by chunk: A x is computed for
the whole stream, and B's part of a chunk's logits is added to them there (`megatron/heads.py`).

Source: arXiv 2106.09685. Scale and initial values are PEFT's.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from megarl.megatron.global_names import global_tensors
from megarl.megatron.shards import is_tensor, plain
from megarl.models.adapters import IN_CHECKPOINTS
from megarl.models.fused_rows import FusedRows
from megarl.models.weight_map import BoundRule, WeightMap
from megarl.models.weight_tensors import shard_from_hf
from megarl.options.lora.peft_folder import AdapterFolder
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import (
    OUTPUT_LAYER,
    SUFFIX,
    Lora,
    Site,
    adapter_name,
    is_linear,
    output_rule,
    site_of,
    unties,
)

if TYPE_CHECKING:
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel


class Adapter(torch.nn.Module):
    """A and B of the layers that one Megatron weight `[out, in]` holds (n of them), as this rank has them.

    A is `[n·rank, in]`, the layers' own one below another; B `[rows, rank]`, whose row i belongs to the output `rows[i]` and to
    the A `owners[i]`.
    """

    A: torch.nn.Parameter
    B: torch.nn.Parameter
    rows: Tensor
    owners: Tensor

    def __init__(self, weight: Tensor, rule: BoundRule, site: Site, lora: Lora, *, split: Split) -> None:
        """Beside the `weight` of `rule`; the values are filled in later (`load_adapters`)."""
        super().__init__()
        self.site, self.scale, self.split, self.rank = site, lora.scale, split, lora.rank
        at = split.rank, split.size
        for name, matrix_rule in (("A", site.a), ("B", site.b)):
            values = torch.empty(matrix_rule.shape(split.size, tp_rank=split.rank), dtype=split.dtype, device=weight.device)
            self.register_parameter(name, torch.nn.Parameter(values))
        self.layers = len(site.a.hf_names)
        rows, owners = _places(rule, site, *at)
        self.out = sum(stop - start for _, start, stop in rule.packing.runs(*at, None)) if rule.tp_axis == 0 else len(weight)
        self.is_plain = self.layers == 1 and len(rows) == self.out
        self.register_buffer("rows", torch.tensor(rows, device=weight.device), persistent=False)
        self.register_buffer("owners", torch.tensor(owners, device=weight.device), persistent=False)
        for parameter, is_split in ((self.A, site.a.tp_axis is not None), (self.B, site.b.tp_axis is not None)):
            split.mark(parameter, weight, is_split=is_split)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute what is added to the output `[..., out]` of the layer whose input is `hidden` `[..., in]`."""
        split, a, b = self.split, self.A, self.B
        if split.kind == "rows":
            low = self._low(hidden)
        elif split.kind == "columns":
            low = linear(hidden, a)
            if split.of_expert:
                b = copy_to_tensor_model_parallel_region(b, group=split.group)
            elif split.scattered:
                low = reduce_scatter_to_sequence_parallel_region(low, group=split.group)
            else:
                low = reduce_from_tensor_model_parallel_region(low, group=split.group)
        else:
            low = linear(hidden, a)
        return linear(low * self.scale, self._spread(b))

    def _low(self, hidden: Tensor) -> Tensor:
        """A x `[..., n·rank]` of the whole stream, beside a layer that is split by rows of W."""
        split, a = self.split, self.A
        low = linear(hidden, copy_to_tensor_model_parallel_region(a, group=split.group) if split.of_expert else a)
        if split.scattered:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=split.group)
        return low if split.of_expert else copy_to_tensor_model_parallel_region(low, group=split.group)

    def product(self) -> Tensor:
        """scale·B·A `[out, in]` of this rank's shard of the weight, in float32."""
        return (self._spread(self.B.float()) @ self.A.float()) * self.scale

    def _spread(self, b: Tensor) -> Tensor:
        """B as `[out, n·rank]`: each row in the columns of its own A, zeros elsewhere."""
        if self.is_plain:
            return b
        spread = b.new_zeros(self.out, self.layers, self.rank)
        return spread.index_put((self.rows, self.owners), b).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Nothing: checkpoints hold adapters by the hub's names (`trained_entries`)."""
        return {}


class OutputAdapter(Adapter):
    """The adapter beside the output layer. B has the rows of this rank's ids, without those of padding."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """`hidden` `[S(/tp), 1, H]` → scale·(A x) of the whole stream, `[S, 1, rank]`, and B `[rows, rank]`."""
        return self._low(hidden) * self.scale, self.B


class ExpertAdapters(torch.nn.Module):
    """The adapters of the experts in one grouped module, in its order."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        super().__init__()
        self.local_experts = torch.nn.ModuleList(adapters)

    def forward(self, hidden: Tensor, tokens_per_expert: Any) -> Tensor:
        """Compute what is added to the output; `hidden` holds the tokens of one expert after those of another."""
        counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
        return torch.cat([adapter(part) for adapter, part in zip(self.local_experts, hidden.split(counts), strict=True)])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Give the state as `Adapter` does."""
        return {}


class Split:
    """The division of a weight among tensor ranks: by its `rows`, by its `columns`, or not at all (`whole`)."""

    def __init__(self, rule: BoundRule, config: Any) -> None:
        of_expert = rule.expert is not None
        self.group: Any = (
            parallel_state.get_expert_tensor_parallel_group() if of_expert else parallel_state.get_tensor_model_parallel_group()
        )
        self.rank, self.size = torch.distributed.get_rank(self.group), torch.distributed.get_world_size(self.group)
        self.of_expert, self.dtype = of_expert, config.params_dtype
        self.kind = {0: "rows", 1: "columns", None: "whole"}[rule.tp_axis]
        self.scattered = bool(config.sequence_parallel) and self.size > 1 and not of_expert

    def mark(self, parameter: Tensor, weight: Tensor, *, is_split: bool) -> None:
        """Say what megatron-core must know of the parameter's gradient: which ranks it is summed over, and counted on.

        Of sequences that tensor ranks share, each has its part of the gradient of what they all hold. The dispatcher of
        experts has the gradients of what ranks of one expert hold alike summed already; one of them counts it.
        """
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        if is_split or (self.of_expert and self.rank == 0):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
        elif self.of_expert:
            parameter.shared = True  # type: ignore[attr-defined]
        elif self.kind == "whole":
            parameter.sequence_parallel = getattr(weight, "sequence_parallel", False)  # type: ignore[attr-defined]
        else:
            parameter.sequence_parallel = self.scattered  # type: ignore[attr-defined]


class AdapterSwitch:
    """A switch for what the adapters of a role's chunks add to their layers: what they have learnt, or what they began with."""

    def __init__(self) -> None:
        self.on = True
        self._begun: list[tuple[torch.nn.Parameter, Tensor]] | None = None

    def remember(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Keep a copy of the adapters' values as they are now, which is where training begins."""
        parameters = [parameter for adapter in adapters_of(chunks) for parameter in (adapter.A, adapter.B)]
        self._begun = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """While it lasts, the model is what it was before training: without adapters, or with those that it began with."""
        begun = self._begun or ()
        learnt = [parameter.detach().clone() for parameter, _ in begun]
        self.on = self._begun is not None
        with torch.no_grad():
            for parameter, values in begun:
                parameter.copy_(values)
        try:
            yield
        finally:
            self.on = True
            with torch.no_grad():
                for (parameter, _), values in zip(begun, learnt, strict=True):
                    parameter.copy_(values)


@contextmanager
def role_as_begun(role: RankModel, head: ModelOptions) -> Iterator[None]:
    """While it lasts, `forward` of a role with adapters answers as the model that training began with, with limits and
    columns as `head` has them."""
    heads = [chunk.output_layer for chunk in map(unwrap_model, role.chunks) if chunk.post_process]
    _set_heads(heads, head)
    try:
        with role.adapters.as_begun():
            yield
    finally:
        _set_heads(heads, role.options)


def _set_heads(heads: Sequence[Any], options: ModelOptions) -> None:
    for layer in heads:
        layer.limits, layer.collision = options.sampling_limits, options.collision


def insert_adapters(
    chunk: torch.nn.Module,
    lora: Lora,
    fused: FusedRows | None,
    weight_map: WeightMap,
    switch: AdapterSwitch | None,
    *,
    value_head: bool,
) -> None:
    """Put adapters beside the layers of `chunk` that `lora` chooses, and leave everything else but a `value_head` untrained.

    `weight_map` is that of `Lora.with_adapters`.
    """
    config = get_model_config(chunk)
    if unties(weight_map) and torch.distributed.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "the adapter of '%s' is of the output layer alone, not of the embedding whose weight the layer shares; a model "
            "with the adapter merged in has tie_word_embeddings=false",
            OUTPUT,
        )
    sites: dict[str, list[tuple[str, Tensor, BoundRule, Site]]] = {}
    places = {id(parameter): name for name, parameter in chunk.named_parameters()}
    for name, tensor in global_tensors([chunk]):
        if not name.startswith("decoder.") or not is_linear(rule := weight_map.rule_for(name)):
            continue
        module, _, leaf = places[id(tensor)].rpartition(".")
        site = site_of(rule, lora, fused)
        if site is not None:
            sites.setdefault(module, []).append((leaf, tensor, rule, site))
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(value_head and name.startswith("output_layer."))
    for path, entries in sites.items():
        layer = chunk.get_submodule(path)
        adapters = [Adapter(tensor, rule, site, lora, split=Split(rule, config)) for _, tensor, rule, site in entries]
        grouped = entries[0][0] != "weight"
        adapter_module: torch.nn.Module = ExpertAdapters(adapters) if grouped else adapters[0]
        parent, _, leaf = path.rpartition(".")
        chunk.get_submodule(parent).add_module(f"{leaf}_lora", adapter_module)
        put_beside(layer, adapter_module, switch or AdapterSwitch())
    if not value_head:
        _put_beside_output(chunk, lora, weight_map, switch or AdapterSwitch())


def _put_beside_output(chunk: Any, lora: Lora, weight_map: WeightMap, switch: AdapterSwitch) -> None:
    """Have the head of a last stage add the output layer's adapter, if `lora` chooses one."""
    rule = output_rule(weight_map)
    site = site_of(rule, lora, None) if rule is not None else None
    if rule is None or site is None or not chunk.post_process:
        return
    weight, config = chunk.output_layer.weight, get_model_config(chunk)
    if weight is None:  # that of the embedding on the same rank
        weight = chunk.shared_embedding_or_output_weight()
    adapter = OutputAdapter(weight, rule, site, lora, split=Split(rule, config))
    chunk.add_module(f"{OUTPUT_LAYER}{SUFFIX}", adapter)
    chunk.output_layer.beside = lambda hidden: adapter(hidden) if switch.on else None


def load_adapters(chunks: Sequence[torch.nn.Module], seed: int, read: Callable[[str], Any] | None) -> None:
    """Fill all adapters: from a PEFT folder by `read(hub name)`, or so that they add nothing yet, as PEFT does.

    Then A is uniform within 1/sqrt(in), drawn for each of the hub's layers from `seed` and its name, whatever the layout;
    B is zero.
    """
    for adapter in adapters_of(chunks):
        for parameter, rule in ((adapter.A, adapter.site.a), (adapter.B, adapter.site.b)):
            get = partial(_drawn, rule, seed) if read is None else read
            with torch.no_grad():
                if read is None and parameter is adapter.B:
                    parameter.zero_()
                else:
                    parameter.copy_(shard_from_hf(rule, get, adapter.split.rank, adapter.split.size))


def check_output(
    chunks: Sequence[torch.nn.Module], weight_map: WeightMap, stored: AdapterFolder, read: Callable[[str], Any]
) -> None:
    """Check that the output layer's weight in a PEFT folder, if it is there, is the model's; each rank checks its own rows.

    `read` gives the model's tensors by name. Raises ModelError: see `AdapterFolder.check_output`.
    """
    for adapter in adapters_of(chunks):
        if isinstance(adapter, OutputAdapter):
            [name] = weight_map.rule_for(f"{OUTPUT_LAYER}.weight").hf_names
            for piece in adapter.site.b.pieces(adapter.split.rank, adapter.split.size):
                stored.check_output(read(name), slice(piece.start, piece.stop))


def adapters_of(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    """All adapters of this rank."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


class MergedWeights:
    """The values of this rank's weights, with the adapters of `chunks` merged in."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._beside = {adapter.site.a.megatron_name: adapter for adapter in adapters_of(chunks)}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The parameter that the weight map calls `name`: a view, or where there is an adapter a copy, rounded once."""
        weight = plain(tensor)
        adapter = self._beside.get(f"{adapter_name(name)}A") if name.endswith(".weight") else None
        return weight if adapter is None else (weight.float() + adapter.product()).to(weight.dtype)


def untied_output(chunks: Sequence[torch.nn.Module], weight_map: WeightMap) -> tuple[BoundRule, Tensor] | None:
    """The weight that a tied output layer has of its own with its adapter merged in: its rule and this rank's shard.

    None: this rank has no output layer, or one that is not tied or has no adapter.
    """
    rule = output_rule(weight_map) if unties(weight_map) else None
    for chunk in map(unwrap_model, chunks) if rule is not None else ():
        core: Any = chunk
        if core.post_process:
            assert rule is not None, "the loop has been entered"
            weight, adapter = plain(core.shared_embedding_or_output_weight()), getattr(core, f"{OUTPUT_LAYER}{SUFFIX}")
            return rule, (weight.float() + adapter.product()).to(weight.dtype)
    return None


def trained_entries(chunk: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a chunk's sharded state that training changes, and its adapters, which a checkpoint holds by the hub's
    tensors.

    So any other layout can read them. Entries that are no tensors stay.
    """
    trained = {id(parameter) for parameter in chunk.parameters() if parameter.requires_grad}
    entries = {name: entry for name, entry in state.items() if not is_tensor(entry) or id(entry.data) in trained}
    for name, module in chunk.named_modules():
        if isinstance(module, Adapter):
            for matrix, rule in (("A", module.site.a), ("B", module.site.b)):
                entries[f"{name}.{matrix}"] = _entry(getattr(module, matrix), rule, module.split)
    return entries


def _entry(parameter: Tensor, rule: BoundRule, split: Split) -> ShardedTensorFactory:
    """An adapter's matrix as boxes of the hub's tensors."""

    axis, is_output = rule.tp_axis or 0, rule.layer is None

    def build(key: str, values: Tensor, replica_id: Any, *unused: Any) -> list[ShardedTensor]:
        parts, at = [], 0
        for piece in rule.pieces(split.rank, split.size):
            assert piece.hf_name is not None, "an adapter has no padding"
            shape = rule.hf_shapes[piece.hf_name]
            length = math.gcd(piece.start, piece.stop - piece.start)  # megatron-core counts in boxes of one size
            if is_output:  # or not at all: of a padded vocabulary the last rank has fewer ids
                length = piece.stop - piece.start
            for start in range(piece.start, piece.stop, length):
                part, offsets = values.narrow(axis, at, length), [0, 0]
                offsets[axis] = start
                part_shape = tuple(part.shape)
                counts = tuple(-(-whole // size) for whole, size in zip(shape, part_shape, strict=True))
                fragments = None if is_output else counts
                name = f"{key}.{piece.hf_name}"
                parts.append(
                    ShardedTensor(name, part, part.dtype, part_shape, shape, tuple(offsets), fragments, replica_id=replica_id)
                )
                at += length
        return parts

    if split.of_expert:
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    alike = 0 if rule.tp_axis is not None else split.rank
    return ShardedTensorFactory(IN_CHECKPOINTS.rstrip("."), parameter, build, torch.cat, (0, alike, replica))


def put_beside(layer: torch.nn.Module, adapter: torch.nn.Module, switch: AdapterSwitch) -> None:
    """Add what `adapter` gives to what `layer` answers, which may be a tensor, or a tensor and a bias to be added later."""

    def add(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not switch.on:
            return output
        hidden, *more = inputs
        added = adapter(_normed(hidden, layer), *more)
        return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

    layer.register_forward_hook(add, prepend=True)  # what others make of the output comes after


def _normed(hidden: Tensor, layer: Any) -> Tensor:
    """The input of a layer's product: Transformer Engine has norms in the layers behind them."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return hidden
    if getattr(layer, "zero_centered_gamma", False):  # to which Transformer Engine adds 1 in float32
        return rms_norm(hidden.float(), (hidden.shape[-1],), weight.float() + 1, layer.eps).to(hidden.dtype)
    return rms_norm(hidden, (hidden.shape[-1],), weight, layer.eps)


def _places(rule: BoundRule, site: Site, tp_rank: int, tp_size: int) -> tuple[list[int], list[int]]:
    """For every row of this rank's B: its row among those of the weight's shard, and the place of its A."""
    runs = rule.packing.runs(tp_rank, tp_size, None)
    if rule.tp_axis == 1:  # every rank has all rows
        runs = [(0, 0, rule.packing.hf_shapes[0][0])]
    rows: list[int] = []
    owners: list[int] = []
    at = 0
    for part, start, stop in runs:
        if part in site.parts:
            rows += range(at, at + stop - start)
            owners += [site.owners[site.parts.index(part)]] * (stop - start)
        at += stop - start
    return rows, owners


def _drawn(rule: BoundRule, seed: int, name: str) -> Tensor:
    shape = rule.hf_shapes[name]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # of 32 bits: it reads no others
    return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
