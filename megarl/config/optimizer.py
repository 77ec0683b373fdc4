"""The section of a trained role's optimizer; importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import Count, Decay, Fraction, NonNegative, Positive, Section


class OptimizerGroupConfig(Section):
    """Parameters that are updated otherwise than the rest; one that several groups choose is in the first of them."""

    match: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Patterns of Hugging Face names of tensors, such as `*.embed_tokens.*`, or the word `router`."""
    lr_factor: NonNegative = 1.0
    """Their learning rate, as a multiple of the others'."""
    weight_decay: NonNegative | None = None
    """Their weight decay; norms and biases have none. null: the others'."""


class OptimizerConfig(Section):
    """AdamW or Muon, with a learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the decoder's layers, AdamW for the rest (docs/optimizers.md#muon)."""
    lr: NonNegative = 1e-6
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the cosine or linear schedule, one optimizer step behind the last."""
    warmup_steps: Count = 0
    """Number of optimizer steps of linear warm-up from 0 to `lr`, which the last of them has."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon, added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegative = 1.0
    """Maximum of the global gradient norm; larger gradients are clipped. 0: no clipping."""
    offload_fraction: Fraction = 0.0
    """Fraction of the optimizer state that lives in CPU memory; the CPU computes that part of the step."""
    momentum: Decay = 0.95
    """Muon's decay rate of the momentum (Nesterov's)."""
    newton_schulz_steps: Positive = 5
    """Muon's number of Newton-Schulz steps."""
    groups: Annotated[tuple[OptimizerGroupConfig, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or weight decay of their own."""
