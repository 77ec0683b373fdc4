"""The names of algorithms (docs/methods.md) as types, and what each preset stands for.

A preset only fills leaves that the user left out; the resolved config shows the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megarl.algorithms.catalogue import ESTIMATORS, LOSS_NEEDS, LossNeeds

PresetName = Literal[
    "grpo", "ppo", "reinforce_plus_plus", "dapo", "dr_grpo", "gspo", "gmpo", "sapo", "cispo", "rloo", "remax", "opo", "gpg",
    "opd", "vapo", "online_dpo",
]  # fmt: skip
AggregationName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
NormalisationName = Literal["none", "batch", "group", "batch_rms", "group_rms"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
Fp8Format = Literal["none", "hybrid", "e4m3"]
Fp8RecipeName = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
ModelPart = Literal["vision", "projector", "language"]
"""A part of a vision-language model."""

if TYPE_CHECKING:
    AdvantageName = str
    PolicyLossName = str
else:
    AdvantageName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(LOSS_NEEDS)]

_LOSS_KL = {"apply_to": "loss", "estimator": "k3"}
_REWARD_KL = {"apply_to": "reward", "estimator": "k1"}


def _preset(
    advantage: str,
    policy_loss: str,
    aggregation: str,
    kl: dict[str, Any],
    *,
    gae_lambda: float = 1.0,
    reward_clip: float | None = None,
    clip: tuple[float, float] | None = None,
    distillation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    low, high = clip or LOSS_NEEDS[policy_loss].clip
    return {
        "advantage": advantage,
        "policy_loss": policy_loss,
        "aggregation": aggregation,
        "clip_low": low,
        "clip_high": high,
        "gae_lambda": gae_lambda,
        "shaping": {"clip": reward_clip},
        "kl": kl,
        **({"distillation": distillation} if distillation else {}),
    }


PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: outcome supervision, beta 0.04, k3 in the loss
    "grpo": _preset("grpo", "clip", "seq_mean_token_mean", _LOSS_KL | {"coef": 0.04}),
    # InstructGPT, arXiv 2203.02155: GAE with lambda 0.95, per-token KL 0.02 in the reward
    "ppo": _preset("gae", "clip", "seq_mean_token_mean", _REWARD_KL | {"coef": 0.02}, gae_lambda=0.95),
    # REINFORCE++, arXiv 2501.03262: token-level KL in the reward, clipped rewards, globally whitened advantages
    "reinforce_plus_plus": _preset("reinforce_plus_plus", "clip", "token_mean", _REWARD_KL | {"coef": 0.01}, reward_clip=10.0),
    # DAPO, arXiv 2503.14476: clip-higher, token mean, no KL; its dynamic sampling and over-long penalty depend on the run
    "dapo": _preset("grpo", "clip", "token_mean", _LOSS_KL | {"coef": 0.0}, clip=(0.2, 0.28)),
    # Dr. GRPO, arXiv 2503.20783: no standard deviation, no length bias, no KL
    "dr_grpo": _preset("dr_grpo", "clip", "seq_mean_token_sum_norm", _LOSS_KL | {"coef": 0.0}),
    # GSPO, arXiv 2507.18071: sequence ratio with its small bounds, no KL
    "gspo": _preset("grpo", "gspo", "seq_mean_token_mean", _LOSS_KL | {"coef": 0.0}),
    # GMPO, arXiv 2507.20673: geometric mean of ratios that are clipped at e^±0.4, no KL
    "gmpo": _preset("grpo", "gmpo", "seq_mean_token_mean", _LOSS_KL | {"coef": 0.0}),
    # SAPO, arXiv 2511.20347: soft gate in place of clipping, no KL
    "sapo": _preset("grpo", "sapo", "seq_mean_token_mean", _LOSS_KL | {"coef": 0.0}),
    # MiniMax-M1, arXiv 2506.13585: weights without a lower bound and at most 5, token mean, no KL
    "cispo": _preset("grpo", "cispo", "token_mean", _LOSS_KL | {"coef": 0.0}),
    # RLOO, arXiv 2402.14740: the response is one action, its KL (0.03) in the reward that is compared
    "rloo": _preset("rloo", "reinforce", "seq_mean_token_sum", _REWARD_KL | {"coef": 0.03}),
    # ReMax, arXiv 2310.10505: REINFORCE on whole responses against the greedy one; without a KL
    "remax": _preset("remax", "reinforce", "seq_mean_token_sum", _LOSS_KL | {"coef": 0.0}),
    # OPO, arXiv 2505.23585: exactly on-policy, no KL, no entropy bonus; the baseline is of least variance for the token sum
    "opo": _preset("opo", "reinforce", "seq_mean_token_sum", _LOSS_KL | {"coef": 0.0}),
    # GPG, arXiv 2504.02546: the plain policy gradient with a token mean, no KL
    "gpg": _preset("gpg", "reinforce", "token_mean", _LOSS_KL | {"coef": 0.0}),
    # On-policy distillation, https://thinkingmachines.ai/blog/on-policy-distillation: the teacher alone, each token for itself
    "opd": _preset("reinforce", "clip", "token_mean", _LOSS_KL | {"coef": 0.0}, distillation={"coef": 1.0, "reward_coef": 0.0}),
    # VAPO, arXiv 2504.05118: a critic trained with lambda 1, lambda by length, clip-higher, token mean, cross-entropy of right
    # responses, no KL; its pre-training of the critic depends on the run
    "vapo": _preset("gae", "clip", "token_mean", _LOSS_KL | {"coef": 0.0}, clip=(0.2, 0.28))
    | {"advantage_args": {"critic_lambda": 1.0, "length_alpha": 0.05}, "positive_nll": {"coef": 0.1}},
    # OAIF, arXiv 2402.04792: DPO on the best and worst response of a prompt; the KL is DPO's own
    "online_dpo": _preset("dr_grpo", "dpo", "seq_mean_token_sum", _LOSS_KL | {"coef": 0.0}),
}


def fill_preset(tree: Any) -> Any:
    """Put the preset named by `tree["name"]` under the leaves of `tree`; anything unusable is left for the schema."""
    if not isinstance(tree, dict):
        return tree
    preset = PRESETS.get(tree.get("name", "grpo")) if isinstance(tree.get("name", "grpo"), str) else None
    if preset is None:
        return tree
    filled = {**preset, **tree}
    for section, value in preset.items():
        if isinstance(value, dict) and isinstance(tree.get(section), dict) and not section.endswith("_args"):
            filled[section] = {**value, **tree[section]}
    if isinstance(tree.get("kl"), dict) and "estimator" not in tree["kl"]:
        filled["kl"]["estimator"] = "k1" if filled["kl"]["apply_to"] == "reward" else "k3"
    advantage, loss = filled["advantage"], filled["policy_loss"]
    if advantage != preset["advantage"] and "advantage_args" not in tree:
        filled.pop("advantage_args", None)
    known = ESTIMATORS.get(advantage) if isinstance(advantage, str) else None
    if known is not None:
        fallback: dict[str, Any] = {"advantage_normalisation": known.normalisation}
        if "lam" not in known.settings:
            fallback["gae_lambda"] = 1.0
        filled |= {name: value for name, value in fallback.items() if name not in tree}
    of_loss = LOSS_NEEDS.get(loss, LossNeeds()) if isinstance(loss, str) else LossNeeds()
    if of_loss.clip != LOSS_NEEDS[preset["policy_loss"]].clip or "clip_high" not in of_loss.settings:
        filled |= {name: value for name, value in zip(("clip_low", "clip_high"), of_loss.clip, strict=True) if name not in tree}
    return filled
