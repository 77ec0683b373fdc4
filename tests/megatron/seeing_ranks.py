"""What ranks do with a model that sees: updates with parts frozen, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.config.presets import ModelPart
from megarl.data.stream import Unit
from tests.themes.parallel.worlds import objective

Parts = tuple[ModelPart, ...]


def make_role(folder: Path, layout: Layout, *, freeze: Parts = (), **more: Any) -> Any:
    """A trained role of the model in `folder`, with the pictures in its media folder; the first one of the call."""
    from megarl.megatron.build import initialize_layout

    initialize_layout(layout, seed=1)
    return another_role(folder, layout, folder / "media", freeze=freeze, **more)


def another_role(folder: Path, layout: Layout, media: Path, **more: Any) -> Any:
    """As `make_role`, in a world whose layout is there."""
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    options = ModelOptions(str(folder), layout, media_folder=str(media), logit_chunk_tokens=5, **more)
    return RankModel(options, OptimizerOptions(lr=1e-2))


def update(role: Any, units: list[Unit], layout: Layout) -> dict[str, float]:
    """One update, each of this replica's units in a micro-batch of its own."""
    mine = units[layout.coords(torch.distributed.get_rank()).dp :: layout.dp]
    return role.update([[unit] for unit in mine], objective)


def update_frozen(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    freeze: tuple[ModelPart, ...],
    more: dict[str, Any],
) -> dict[str, Any]:
    """`before` and `after` two updates: exported tensors on leading ranks; `numel` of Adam's state on this rank."""
    role = make_role(folder, layout, freeze=freeze, **more)
    before = {name: tensor.clone() for name, tensor in role.export()}
    metrics = [update(role, units, layout) for _ in range(2)]
    assert not any(metric.get("skipped") for metric in metrics)
    after = {name: tensor.clone() for name, tensor in role.export()}
    return {
        "before": before,
        "after": after,
        "trained": sum(p.numel() for c in role.chunks for p in c.parameters() if p.requires_grad),
    }


def save(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    target: Path,
    freeze: Parts = (),
) -> dict[str, Any]:
    """One update, a checkpoint in `target`, and the tensors then and after one more update."""
    from tests.megatron.saving import save_role

    role = make_role(folder, layout, freeze=freeze)
    update(role, units, layout)
    save_role(role, target)
    return {"saved": exported(role), "next": _after_one_more(role, units, layout)}


def resume(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    units: list[Unit],
    source: Path,
    freeze: Parts = (),
) -> dict[str, Any]:
    """What `save` says, of a role that reads the checkpoint in `source`."""
    from megarl.megatron.role_checkpoint import load_role

    role = make_role(folder, layout, freeze=freeze)
    load_role(role, str(source))
    return {"saved": exported(role), "next": _after_one_more(role, units, layout)}


def exported(role: Any) -> dict[str, Tensor]:
    """Copies of what this rank exports."""
    return {name: tensor.clone() for name, tensor in role.export()}


def _after_one_more(role: Any, units: list[Unit], layout: Layout) -> dict[str, Tensor]:
    update(role, units, layout)
    return exported(role)


def write_critic(rank: int, world_size: int, folder: Path, layout: Layout, units: list[Unit], target: Path) -> Any:
    """Update a role with a value head and write it to `target`: its values, and those of a role that reads `target`."""
    from megarl.megatron.hf_export import write_role

    role = make_role(folder, layout, head="value")
    role.update([[unit] for unit in units], lambda output, stream: (output.square().sum() - output.sum(), {}))
    write_role(role, str(target))
    again = another_role(target, layout, folder / "media", head="value")
    return [answer.columns for answer in (role.forward([[unit] for unit in units]), again.forward([[unit] for unit in units]))]
