"""A session's training side inside a world of ranks: every rank is the driver too, and what Ray would bring is gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from megarl.config.layout import Layout
from megarl.data.batch import Batch
from megarl.data.micro_batches import plan_micro_batches
from megarl.models.flops import FlopsModel
from megarl.runs.update_metrics import combine
from tests.families.family import VOCAB_SIZE

FLOPS = FlopsModel(per_token=30_720, per_logit_row=64 * VOCAB_SIZE, per_pair=256)


class WorldRoles:
    """The calls of `TrainingSide` that a trainer makes, of one role."""

    def __init__(self, role: Any, max_tokens: int = 40) -> None:
        self.role, self.layout, self.max_tokens = role, role.options.layout, max_tokens
        self.asked: list[str] = []

    def ask(self, role: str, question: Callable[[Any], Any]) -> list[Any]:
        self.asked.append(question.__name__)
        answers: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, question(self.role))
        return answers

    def forward(
        self,
        role: str,
        batch: Batch,
        names: Sequence[str],
        *,
        columns: Sequence[str] = (),
        wide: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        answered: list[Any] = [None] * torch.distributed.get_world_size()
        mine = self.role.forward(self._mine(batch, columns))
        torch.distributed.all_gather_object(answered, mine if self.role.reports else None)
        batch.gather(names, answered, wide)

    def start_update(
        self, role: str, batch: Batch, rows: Sequence[int], columns: Sequence[str], loss: Any, *, applies: bool
    ) -> Any:
        assert not applies
        assert [*rows] == [*range(len(batch))]
        from megarl.megatron.gathered_updates import gather

        return gather(self.role, self._mine(batch, columns), loss)

    def finish_updates(self, updates: Sequence[Any]) -> list[dict[str, Any]]:
        found = []
        for metrics in updates:
            answers: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(answers, metrics)
            found.append(combine(answers))
        return found

    def _mine(self, batch: Batch, columns: Sequence[str]) -> list[Any]:
        units = batch.unit_rows(range(len(batch)), share_prefix=True)
        plan = plan_micro_batches(units.sizes, ranks=self.layout.dp, max_tokens=self.max_tokens, flops=FLOPS)
        shares = batch.shares(units, plan, columns)
        return [*chain(shares[self.layout.coords(torch.distributed.get_rank()).dp])]


def trainer_in(
    layout: Layout, folder: Path, lora: Any, *, live: int = 64, dtype: str = "float32", media: Path | None = None
) -> Any:
    """A `SessionTrainer` on this rank's part of a role with adapters `lora` (None: all weights are trained).

    `media`: a folder for pictures; None: data have none.

    Raises:
        LayoutError: a config with this layout would be refused, so that what it computes proves nothing.
    """
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.models.shape import ModelShape
    from megarl.options.serve.trainer import SessionTrainer

    layout.check_model(**ModelShape.read(folder).layout_sizes)
    initialize_layout(layout, seed=1)
    shown = str(media) if media is not None else None
    options = ModelOptions(str(folder), layout, dtype=dtype, lora=lora, logit_chunk_tokens=5, media_folder=shown)
    role = RankModel(options, OptimizerOptions(lr=3.0, weight_decay=0.5, clip_grad=1e-9))
    config = SimpleNamespace(policy=SimpleNamespace(layout=layout), model=SimpleNamespace(path=str(folder)))
    session: Any = SimpleNamespace(roles=WorldRoles(role), config=config)
    pictures = served_pictures(folder, media) if media is not None else None
    return SessionTrainer(session, folder.parent / "moved", live=live, pictures=pictures)


def served_pictures(folder: Path, media: Path, **limits: int) -> Any:
    """The pictures of requests to a family of `tests/seeing.py` in `folder`, kept in `media`."""
    from megarl.options.pictures.picture_rules import PictureTokens, load_picture_rules
    from megarl.options.pictures.picture_settings import PictureSettings
    from megarl.options.serve.served_pictures import ServedPictures
    from tests.seeing import IMAGE, VIDEO

    tokens = PictureTokens(IMAGE, VIDEO, "<image>", "<video>", "<", ">", ())
    return ServedPictures(PictureSettings(load_picture_rules(folder), tokens, media), IMAGE, **limits)
