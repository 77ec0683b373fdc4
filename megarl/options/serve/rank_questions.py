"""What the driver asks of the models on training ranks (`TrainingSide.ask`): plain values, importable without megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megarl.models.adapters import LORA_A, LORA_B
from megarl.options.serve.values import AdapterChoice


@dataclass(frozen=True)
class Facts:
    """What a role can have: adapters of at most `largest_rank` (None: all weights are trained) beside `kinds` of layers."""

    largest_rank: int | None
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Begin:
    """Have a role hold models, at most `live` of them in memory and the others in files in `folder`; answers `Facts`."""

    live: int
    folder: str

    @property
    def __name__(self) -> str:
        """What is said of it where it fails."""
        return "preparation"

    def __call__(self, role: Any) -> Facts:
        """Answer on each rank, for its `RankModel`."""
        from megarl.options.serve.rank_models import hold_models

        return hold_models(role, self.live, self.folder)


@dataclass(frozen=True)
class ModelCall:
    """Call a method of `RankModels`, once the model called `model`, if there is one, has its place in the role."""

    method: Literal["create", "drop", "switch", "optimizer_step", "save", "load", "put_back", "export"]
    arguments: tuple[Any, ...] = ()
    model: str | None = None

    @property
    def __name__(self) -> str:
        """What is said of it where it fails."""
        return self.method

    def __call__(self, role: Any) -> Any:
        """Answer on each rank, for its `RankModel`."""
        from megarl.options.serve.rank_models import models_of

        models = models_of(role)
        if self.model is not None:
            models.switch(self.model)
        return getattr(models, self.method)(*self.arguments)


def kind_of(tensor: str) -> str:
    """The kind of layer that a tensor of an adapter, by the hub's name, is beside: `attn`, `mlp`, or `unembed`, the output."""
    layer = tensor.removesuffix(LORA_A).removesuffix(LORA_B)
    if layer.rpartition(".")[2] in ("lm_head", "embed_out", "output_layer"):
        return "unembed"
    return "attn" if "attn" in layer or "attention" in layer else "mlp"


def is_chosen(kind: str, choice: AdapterChoice) -> bool:
    """Return whether a model has adapters beside layers of this kind."""
    return {"attn": choice.train_attn, "mlp": choice.train_mlp, "unembed": choice.train_unembed}[kind]
