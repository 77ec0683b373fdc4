"""The names of METHODS.md as types, and what each algorithm name stands for.

A preset only fills leaves that the user left out; the resolved config shows the result.
"""

from __future__ import annotations

from typing import Any, Literal

PresetName = Literal["grpo", "ppo", "reinforce_plus_plus"]
AdvantageName = Literal[
    "gae",
    "reinforce",
    "reinforce_moving_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "grpo",
    "grpo_process",
    "dr_grpo",
    "rloo",
    "remax",
    "opo",
    "gpg",
]
PolicyLossName = Literal["clip", "dual_clip", "gspo", "cispo", "reinforce", "kl_penalty"]
AggregationName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]

GROUP_ADVANTAGES = frozenset({"reinforce_plus_plus_baseline", "grpo", "grpo_process", "dr_grpo", "rloo", "opo", "gpg"})
"""Estimators that compare the responses of one prompt, and so need at least two of them."""

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: outcome supervision, beta 0.04, k3 in the loss
    "grpo": {
        "advantage": "grpo",
        "policy_loss": "clip",
        "aggregation": "seq_mean_token_mean",
        "lam": 1.0,
        "shaping": {"clip": None},
        "kl": {"coef": 0.04, "estimator": "k3", "where": "loss"},
    },
    # InstructGPT, arXiv 2203.02155: GAE with lambda 0.95, per-token KL 0.02 in the reward
    "ppo": {
        "advantage": "gae",
        "policy_loss": "clip",
        "aggregation": "seq_mean_token_mean",
        "lam": 0.95,
        "shaping": {"clip": None},
        "kl": {"coef": 0.02, "estimator": "k1", "where": "reward"},
    },
    # REINFORCE++, arXiv 2501.03262: token-level KL in the reward, clipped rewards, globally whitened advantages
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "policy_loss": "clip",
        "aggregation": "token_mean",
        "lam": 1.0,
        "shaping": {"clip": 10.0},
        "kl": {"coef": 0.01, "estimator": "k1", "where": "reward"},
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
    return filled
