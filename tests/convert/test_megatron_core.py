"""A converted checkpoint is what megatron-core itself would have written, and loads into its models under any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megarl.config.layout import Layout
from tests.convert.conftest import assert_same_tensors, exported, imported
from tests.families import FAMILIES
from tests.world import World

ONE, TP2, PP2, TP2_PP2 = Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)
EP2, TP2_ETP2_PP2 = Layout(dp=2, ep=2), Layout(tp=2, pp=2, etp=2, sequence_parallel=True)
TP2_EP2_PP2 = Layout(tp=2, pp=2, ep=2, sequence_parallel=True)
UNEVEN = Layout(pp=2, first_stage_layers=1, last_stage_layers=3)
DENSE = [(TP2_PP2, ONE), (ONE, Layout(pp=2, vpp=2)), (UNEVEN, TP2_PP2)]
EXPERTS = [(EP2, TP2_EP2_PP2), (TP2_EP2_PP2, ONE), (TP2_ETP2_PP2, UNEVEN)]


def make_role(path: str, layout: Layout, spec: str, head: str = "log_probs") -> Any:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    return RankModel(ModelOptions(path, layout, layer_spec=spec, trainable=False, head=head))  # type: ignore[arg-type]


def state_of(role: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of this rank that a checkpoint holds."""
    from megatron.core.utils import unwrap_model

    return {
        f"{number}.{name}": value
        for number, chunk in enumerate(role.chunks)
        for name, value in unwrap_model(chunk).state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def load_over_garbage(rank: int, world_size: int, path: str, layout: Layout, checkpoint: str, spec: str) -> int:
    """Load a checkpoint into a role whose weights were spoilt, and compare with what the Hugging Face folder gave it."""
    from megarl.megatron.role_checkpoint import load_role

    role = make_role(path, layout, spec)
    expected = {name: value.clone() for name, value in state_of(role).items()}
    for value in state_of(role).values():
        value.fill_(float("nan") if value.is_floating_point() else -1)
    load_role(role, checkpoint)
    found = state_of(role)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    return len(expected)


def save_with_megatron_core(rank: int, world_size: int, path: str, layout: Layout, checkpoint: str, head: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    role = make_role(path, layout, "reference", head)
    if head == "value":
        with torch.no_grad():
            for name, value in state_of(role).items():
                if name.endswith("output_layer.weight"):
                    value.copy_(torch.arange(value.numel()).view_as(value))
    Path(checkpoint).mkdir(exist_ok=True)
    torch.distributed.barrier()
    state = {f"model{number}": unwrap_model(chunk).sharded_state_dict() for number, chunk in enumerate(role.chunks)}
    dist_checkpointing.save(state, checkpoint)


def described(checkpoint: Path) -> tuple[dict[str, Any], set[str]]:
    """What `.metadata` says: (dtype, shape, chunks) of each tensor, and the names of objects."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: (value.properties.dtype, tuple(value.size), {(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks})
        for key, value in metadata.items()
        if hasattr(value, "chunks")
    }
    return tensors, set(metadata) - set(tensors)


KINDS = ("llama", "phi3", "qwen3_5", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""One of each kind of tensors: separate, fused, of linear attention, of experts, of latent attention, with sinks and biases.
On one rank tests/models/test_families.py compares the names and shapes of all families, and test_round_trip.py all bytes."""
SOME_FAMILIES = [pytest.param(f, marks=() if f in KINDS else pytest.mark.exhaustive) for f in FAMILIES]


def of_family(layout: Layout, family: str) -> Layout:
    """The layout, without pipeline stages where the family has none."""
    whole = replace(layout, pp=1, vpp=None, first_stage_layers=None, last_stage_layers=None)
    return whole if FAMILIES[family].kind["one_stage"] else layout


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_an_import_loads_into_its_own_layout_and_into_others_as_the_folder_itself_does(
    world: World, families: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = families(family)
    pairs = [(of_family(a, family), of_family(b, family)) for a, b in (EXPERTS if FAMILIES[family].num_experts else DENSE)]
    if family == "gpt_oss":  # whose experts have biases, which are not split
        pairs = [pair for pair in EXPERTS if all(layout.etp == 1 for layout in pair)]
    for number, (written_for, other) in enumerate(pairs):
        checkpoint = tmp_path / str(number)
        imported(folder, checkpoint, written_for)
        for layout in (written_for, other):
            answers = world.call(load_over_garbage, str(folder), layout, str(checkpoint), "reference", size=layout.world_size)
            assert all(answers)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-full", "mixtral"])
def test_an_import_loads_into_megatron_cores_own_layer_spec(
    world: World, families: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    imported(families(family), tmp_path / "checkpoint", EP2 if FAMILIES.get(family) and FAMILIES[family].num_experts else TP2)
    arguments = (str(families(family)), PP2, str(tmp_path / "checkpoint"), "local")
    assert all(world.call(load_over_garbage, *arguments, size=2))


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_an_import_has_the_keys_shapes_and_chunks_that_megatron_core_writes_for_the_layout(
    world: World, families: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    layout = of_family(TP2_EP2_PP2 if FAMILIES[family].num_experts else TP2_PP2, family)
    imported(families(family), tmp_path / "ours", layout)
    world.call(
        save_with_megatron_core, str(families(family)), layout, str(tmp_path / "theirs"), "log_probs", size=layout.world_size
    )
    tensors, objects = described(tmp_path / "ours")
    expected_tensors, expected_objects = described(tmp_path / "theirs")
    assert {key: tensors[key] for key in expected_tensors} == expected_tensors
    # what is not sharded is in common.pt up to megatron-core 0.18, from 0.19 on (which reads both) in an object of its own
    assert objects >= {name for name in expected_objects if not name.startswith("common_state/")}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "deepseek_v3"])
def test_what_megatron_core_wrote_is_exported_byte_for_byte(
    world: World, families: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    layout = TP2_EP2_PP2 if FAMILIES[family].num_experts else TP2_PP2
    folder = families(family)
    world.call(save_with_megatron_core, str(folder), layout, str(tmp_path / "theirs"), "log_probs", size=layout.world_size)
    exported(tmp_path / "theirs", tmp_path / "back", hf_config_from=folder)
    assert_same_tensors(tmp_path / "back", folder)
