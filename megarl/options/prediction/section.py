"""The sections `policy.mtp` and `rollout.speculative`. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Section


class MtpConfig(Section):
    """The layer for multi-token prediction that a model may have, which engines draft tokens with (docs/speculative.md)."""

    train: bool = False
    """Train the layer beside the policy, which it does not change. Off: an export has it as it is in `model.path`."""
    targets: Literal["soft", "hard"] = "soft"
    """What the layer learns to predict: the policy's own distribution of a token (`soft`), or the token (`hard`)."""
    loss_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the layer's loss, its mean cross-entropy per token. It scales the layer's own gradients only."""


class SpeculativeConfig(Section):
    """Speculative decoding: a draft proposes tokens and the policy verifies several in one pass (docs/speculative.md)."""

    algorithm: Literal["none", "mtp", "ngram", "standalone", "eagle", "eagle3"] = "none"
    """Who drafts: the model's layer for multi-token prediction (`mtp`), a lookup in earlier tokens (`ngram`), a small model
    (`standalone`), or an EAGLE draft of SGLang's (`eagle`, `eagle3`). `none`: off."""
    num_steps: Positive = 3
    """Tokens drafted one after the other before the policy verifies them."""
    topk: Positive = 1
    """Candidates kept after each step; above 1 drafts are trees, which SGLang's engines alone verify."""
    num_draft_tokens: Annotated[int, Field(ge=2, strict=True)] | None = None
    """With `topk` above 1: tokens of the tree that is verified, the last sampled one included."""
    draft_model: str | None = None
    """Folder of the draft of `standalone`, `eagle` and `eagle3`. It is read once and never trained."""


MTP = AddedField("PolicyConfig", "mtp", MtpConfig, MtpConfig(), "The layer for multi-token prediction.")
SPECULATIVE = AddedField("RolloutConfig", "speculative", SpeculativeConfig, SpeculativeConfig(), "Speculative decoding.")
FIELDS = (MTP, SPECULATIVE)
mtp_of = MTP.of
"""The section `policy.mtp`."""
drafts_of = SPECULATIVE.of
"""The section `rollout.speculative`."""
