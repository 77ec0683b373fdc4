"""Questions that the driver asks of the models on training ranks (`TrainingSide.ask`): values, importable without megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megarl.options.serve.adapter_kinds import Facts


@dataclass(frozen=True)
class Begin:
    """Have a role hold models, at most `live` of them in memory and the others in files in `folder`; answers `Facts`."""

    live: int
    folder: str

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return "preparation"

    def __call__(self, role: Any) -> Facts:
        """Answer on each rank, for its `RankModel`."""
        from megarl.options.serve.rank_models import hold_models

        return hold_models(role, self.live, self.folder)


@dataclass(frozen=True)
class ModelCall:
    """Call a method of `RankModels`, once the model called `model`, if there is one, has its place in the role."""

    method: Literal["create", "drop", "switch", "optimizer_step", "forget_gradients", "save", "load", "put_back", "export"]
    arguments: tuple[Any, ...] = ()
    model: str | None = None

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return self.method

    def __call__(self, role: Any) -> Any:
        """Answer on each rank, for its `RankModel`."""
        from megarl.options.serve.rank_models import models_of

        models = models_of(role)
        if self.model is not None:
            models.switch(self.model)
        return getattr(models, self.method)(*self.arguments)
