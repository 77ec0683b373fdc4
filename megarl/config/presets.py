"""The names of algorithms (docs/methods.md) as types, and what each preset stands for.

A preset only fills leaves that the user left out; the resolved config shows the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megarl.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES

PresetName = Literal["grpo", "ppo", "reinforce_plus_plus"]
AggregationName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
NormalisationName = Literal["none", "batch", "group", "batch_rms", "group_rms"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
Fp8Format = Literal["none", "hybrid", "e4m3"]
Fp8RecipeName = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
ModelPart = Literal["vision", "projector", "language"]
"""Of a vision-language model."""

if TYPE_CHECKING:
    AdvantageName = str
    PolicyLossName = str
else:
    AdvantageName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: outcome supervision, beta 0.04, k3 in the loss
    "grpo": {
        "advantage": "grpo",
        "policy_loss": "clip",
        "aggregation": "seq_mean_token_mean",
        "gae_lambda": 1.0,
        "shaping": {"clip": None},
        "kl": {"coef": 0.04, "estimator": "k3", "apply_to": "loss"},
    },
    # InstructGPT, arXiv 2203.02155: GAE with lambda 0.95, per-token KL 0.02 in the reward
    "ppo": {
        "advantage": "gae",
        "policy_loss": "clip",
        "aggregation": "seq_mean_token_mean",
        "gae_lambda": 0.95,
        "shaping": {"clip": None},
        "kl": {"coef": 0.02, "estimator": "k1", "apply_to": "reward"},
    },
    # REINFORCE++, arXiv 2501.03262: token-level KL in the reward, clipped rewards, globally whitened advantages
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "policy_loss": "clip",
        "aggregation": "token_mean",
        "gae_lambda": 1.0,
        "shaping": {"clip": 10.0},
        "kl": {"coef": 0.01, "estimator": "k1", "apply_to": "reward"},
    },
}


def fill_preset(tree: Any) -> Any:
    """Put the preset named by `tree["name"]` under the leaves of `tree`; anything unusable is left for the schema."""
    if not isinstance(tree, dict):
        return tree
    preset = PRESETS.get(tree.get("name", "grpo")) if isinstance(tree.get("name", "grpo"), str) else None
    if preset is None:
        return tree
    filled = {**preset, **tree}
    for section in ("kl", "shaping"):
        if isinstance(tree.get(section), dict):
            filled[section] = {**preset[section], **tree[section]}
    if isinstance(tree.get("kl"), dict) and "estimator" not in tree["kl"]:
        filled["kl"]["estimator"] = "k1" if filled["kl"]["apply_to"] == "reward" else "k3"
    advantage = filled["advantage"]
    known = ESTIMATORS.get(advantage) if isinstance(advantage, str) else None
    if "gae_lambda" not in tree and known is not None and "lam" not in known.settings:
        filled["gae_lambda"] = 1.0
    if "advantage_normalisation" not in tree and known is not None:
        filled["advantage_normalisation"] = known.normalisation
    return filled
