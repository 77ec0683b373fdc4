"""A role's checkpoint on this rank: what of it the rank writes, and how it is read, also under another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import CheckpointError
from megarl.megatron import scaling_state
from megarl.megatron.box_reader import BoxReader, read_weights
from megarl.megatron.global_names import global_tensors
from megarl.megatron.optimizer import continue_schedule, place_in_schedule
from megarl.megatron.optimizer_state import absent_elements, finish_moments, make_moments, moment_boxes, owned_boxes, step_of
from megarl.megatron.rank_model import RankModel
from megarl.megatron.rng_state import initial_seed, reseed, restore_rng_state, sharded_rng_state
from megarl.megatron.shards import Shards, objects_of, shards_of
from megarl.models.adapters import adapter_part


def shards_of_role(role: RankModel) -> Shards:
    """This rank's part of a checkpoint of a role's model, optimizer, schedule and random numbers; no collective takes place."""
    state: dict[str, Any] = _models(role)
    if role.optimizer is None:
        return shards_of(state | {"average": role.average.sharded_state(global_tensors(role.chunks), state)}, [])
    absent = absent_elements(state)
    owned = owned_boxes(role.optimizer, state)
    step = step_of(role.optimizer) or role.scheduler.num_steps  # of a rank that trains nothing Adam counts nothing
    schedule = place_in_schedule(role.scheduler, role.updates_per_step)
    state |= {"moments": {"step": step, "method": role.method}, "scheduler": schedule}
    state |= {"layout": asdict(role.options.layout), "seed": initial_seed(), "rng": sharded_rng_state()}
    return shards_of(state, owned, absent)


def load_role(role: RankModel, folder: str, read_by: Callable[[str], BoxReader] = BoxReader) -> None:
    """Read a checkpoint made of all ranks' `shards_of_role`, under this or another layout (see `rng_state` for random numbers).

    It may also have been written under another layer spec. `read_by` reads its tensors.

    Raises:
        CheckpointError: the checkpoint lacks something, has it in another shape, or cannot be read.
    """
    saved = dist_checkpointing.load_common_state_dict(folder)
    is_same_layout = saved.get("layout") == asdict(role.options.layout)
    reader, models = read_by(folder), _models(role)
    has_masters = reader.has("optimizer.param.")
    if role.optimizer is not None:
        if (method := saved["moments"].get("method", "adamw")) != role.method:
            raise CheckpointError(
                f"'{folder}' has the moments of '{method}', and optimizer.name is '{role.method}'; it must be '{method}'"
            )
        make_moments(role.optimizer, role.chunks)
        reader.read(moment_boxes(role.optimizer, models, has_masters=has_masters))
    read_weights(reader, models)
    role.average.load(reader, global_tensors(role.chunks), models)
    state: dict[str, Any] = {name: reader.kept(objects_of(model)) for name, model in models.items()}
    if role.optimizer is not None and is_same_layout:
        state["rng"] = sharded_rng_state()
    if any(state.values()):
        try:
            state = dist_checkpointing.load(state, folder)
        except CheckpointException as error:  # a BaseException, whose text is the stacks of all ranks
            cause, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"'{folder}' cannot be read: {' '.join(str(cause).split())}") from error
    for number, chunk in enumerate(role.chunks):
        name = f"model{number}"
        weights = {key: entry.data for key, entry in models[name].items() if key not in state[name]}
        # They have been read in place; Transformer Engine's FP8 weights do not survive being copied onto themselves.
        read = {key for key, weight in weights.items() if is_float8tensor(weight)}
        rest = {key: weight for key, weight in weights.items() if key not in read}
        with scaling_state.permitted(state[name], folder):
            incompatible_keys = unwrap_model(chunk).load_state_dict(rest | state[name], strict=False)
        # what is not trained is in no checkpoint
        absent = read if role.options.lora is None else {*incompatible_keys.missing_keys}
        if incompatible_keys.unexpected_keys or set(incompatible_keys.missing_keys) != absent:
            raise CheckpointError(f"'{folder}' does not have the model's weights: {', '.join(map(str, incompatible_keys))}")
    if role.optimizer is not None:
        finish_moments(role.optimizer, saved["moments"]["step"], has_masters=has_masters)
        continue_schedule(role.scheduler, saved["scheduler"], role.updates_per_step)
        if is_same_layout:
            restore_rng_state(state["rng"])
        else:
            reseed(saved.get("seed", 0), role.scheduler.num_steps)


def _models(role: RankModel) -> dict[str, Any]:
    """The sharded state of each of this rank's pipeline chunks."""
    chunks = [unwrap_model(chunk) for chunk in role.chunks]
    states = [chunk.sharded_state_dict() for chunk in chunks]
    if role.options.lora is not None:
        states = [adapter_part("layers").trained_entries(chunk, state) for chunk, state in zip(chunks, states, strict=True)]
    return {f"model{number}": state for number, state in enumerate(states)}
