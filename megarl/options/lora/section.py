"""The sections `policy.lora` and `critic.lora`: low-rank adapters (LoRA) of a trained role. Importable without torch.

Source: LoRA, arXiv 2106.09685; its scale by the square root of the rank, arXiv 2312.03732.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Count, Section

ALL_LINEAR = "all-linear"
"""The word for every linear layer of the decoder but routers and the output layer."""
OUTPUT = "lm_head"
"""The hub's name of the output layer, by which alone it is chosen."""


class LoraConfig(Section):
    """Low-rank adapters: beside each chosen linear layer two small matrices, which alone are trained (docs/lora.md)."""

    rank: Count = 0
    """Rank of the adapters. 0: no adapters, all weights are trained; with `adapter`: the folder's."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What adapters add is multiplied by this over the rank (with `rslora`: over its square root)."""
    rslora: bool = False
    """Divide `alpha` by the square root of the rank instead of the rank."""
    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (ALL_LINEAR,)
    """Linear layers with adapters: `all-linear`, ends of their names (`q_proj`), patterns (`*.layers.0.*`); `lm_head`, too."""
    exclude: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Linear layers without adapters, although `targets` names them."""
    adapter: str | None = None
    """PEFT folder whose adapters training starts from; its rank, alpha and targets hold. null: new ones, which add nothing."""

    @property
    def on(self) -> bool:
        """Return whether the role has adapters."""
        return self.rank > 0 or self.adapter is not None


class PolicyLoraConfig(LoraConfig):
    """Adapters of the policy, and how engines get them."""

    sync: Literal["adapters", "merged"] = "adapters"
    """What a weight update sends: `adapters` alone, which engines add themselves, or all weights with adapters `merged` in."""


_TRAINED = "Low-rank adapters, which are trained in place of the weights"
OF_POLICY = AddedField("PolicyConfig", "lora", PolicyLoraConfig, PolicyLoraConfig(), f"{_TRAINED} (docs/lora.md).")
OF_CRITIC = AddedField("CriticConfig", "lora", LoraConfig, LoraConfig(), f"{_TRAINED}.")
FIELDS = (OF_POLICY, OF_CRITIC)
section_of = OF_CRITIC.of
"""The section `lora` of a role that is trained."""
lora_of_policy = OF_POLICY.of
"""The section `policy.lora`."""
