"""Names of the layer's tensors in a server's draft."""

from __future__ import annotations

import pytest

from megarl.options.prediction.draft_weights import draft_name


@pytest.mark.parametrize(
    ("name", "of_draft"),
    [
        ("model.layers.46.enorm.weight", "model.enorm.weight"),
        ("model.layers.46.mlp.gate.e_score_correction_bias", "model.decoder.mlp.gate.e_score_correction_bias"),
        ("mtp.fc.weight", "fc.weight"),
        ("mtp.pre_fc_norm_hidden.weight", "pre_fc_norm_hidden.weight"),
        ("mtp.norm.weight", "model.norm.weight"),
        ("mtp.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_a_draft_has_its_own_names(name: str, of_draft: str) -> None:
    assert draft_name(name) == of_draft
