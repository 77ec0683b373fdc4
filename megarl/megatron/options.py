"""The options of a role, as plain values: the driver makes them, the ranks obey. Imports neither torch nor megatron-core."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.guard_rules import GuardRule
from megarl.config.layout import Layout
from megarl.config.presets import Fp8Format, Fp8RecipeName
from megarl.errors import ConfigError
from megarl.models.adapters import AdapterSpec

LOGIT_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 3 * 2**28}
"""By type of device, bytes of float32 logits that exist at once where a role does not say how many tokens' (one buffer of
this is in use). On a CPU they stay near the caches. On a GPU every chunk reads and writes the weight's whole float32 gradient,
8 bytes for 2 operations of each row: from 4 times operations over bytes a second on (H100: 1,181 rows, B200: 1,125), the
product takes longer than that. A vocabulary of 131,072 gives 1,536 rows."""


def default_chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Rows of logits over a rank's slice of the vocabulary that a head holds at once on a device of this type."""
    return max(1, LOGIT_CHUNK_BYTES[device_type] // (4 * vocabulary))


@dataclass(frozen=True)
class SamplingLimits:
    """Limits that keep unlikely tokens from being sampled: `top_p` in (0, 1] (1: off), `top_k` (0: off), `min_p` in [0,
    1] (0: off).

    Sources: top-p, arXiv 1904.09751; top-k, arXiv 1805.04833; min-p, arXiv 2407.01082.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class ExpertBalance:
    """Terms that move the routing of a model with experts besides the loss, as in a role's section `experts`; 0: off."""

    balance_coef: float = 0.0
    sequence_balance_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    @property
    def has_losses(self) -> bool:
        """Return whether losses are added to that of the update."""
        return self.balance_coef > 0 or self.sequence_balance_coef > 0 or self.z_loss_coef > 0


@dataclass(frozen=True)
class PredictionOptions:
    """Training of the layer for multi-token prediction: the weight of its loss, and its targets:
    the policy's own distribution of each token (`soft`), or the token (`hard`). `synced`: engines draft with it, and take its
    weights with every update."""

    loss_weight: float = 1.0
    targets: Literal["soft", "hard"] = "soft"
    synced: bool = False


@dataclass(frozen=True)
class ModelOptions:
    """The options of a role's model. `head`: `log_probs` (policy, reference) or `value` (critic, reward model).

    `sampling_limits`: log-probs are of the tokens that these leave to be sampled; None: of all.

    `padded_tokens`: micro-batches are padded to so many tokens, so that all of a pass have one shape; None: they are not.

    `core_attention`: `spec`, the layer spec's own, or the name of an option's, which takes streams with shared prefixes.

    `token_multiple`: every rank's share of a micro-batch is padded to a multiple of so many tokens (FP8 wants 16 or 128).
    `freeze`: parts and patterns of what training leaves as it is. `chat_template`: a file that exported folders get in place of
    the chat template in `path`, where there is one. `media_folder`: where the pictures of prompts are; None: none
    shows any. `replays_routes`: its routers take the experts that come with tokens, where they are known; `records_routes`:
    passes without gradients remember the choices of tokens that come with none.
    `collision`: passes without gradients answer the collision probability of each token's distribution, too.
    `experts`: how experts are kept in balance in training. `int4_experts`: so many columns of their weights share
    a scale of INT4, to which forward passes round them; 0: they do not.
    `lora`: the adapters that are trained in place of the weights, from the PEFT folder `adapter` or drawn from `lora_seed`.
    `begins`: the role is what this one, which has adapters, was before training; it has no weights of its own.
    `sends_adapters`: engines are sent these alone.
    `prediction`: how the layer for multi-token prediction is trained; None: the model is built without it.
    `variant`: fields of megatron-core's config that say how an attention variant is trained.
    `megatron`: fields of megatron-core's configs by their names, checked when the config was read; `section` has them there.
    """

    path: str
    layout: Layout
    head: Literal["log_probs", "value"] = "log_probs"
    layer_spec: str = "reference"
    core_attention: str = "spec"
    dtype: str = "float32"
    recompute: str = "none"
    temperature: float = 1.0
    sampling_limits: SamplingLimits | None = None
    logit_chunk_tokens: int | None = None
    trainable: bool = True
    token_multiple: int = 1
    padded_tokens: int | None = None
    fp8: Fp8Format = "none"
    fp8_recipe: Fp8RecipeName = "tensorwise"
    fp8_param: bool = False
    fp8_bf16_layers: tuple[int, int] = (0, 0)
    int4_experts: int = 0
    deterministic: bool = False
    freeze: tuple[str, ...] = ()
    chat_template: str | None = None
    media_folder: str | None = None
    collision: bool = False
    replays_routes: bool = False
    records_routes: bool = False
    experts: ExpertBalance = ExpertBalance()
    prediction: PredictionOptions | None = None
    lora: AdapterSpec | None = None
    adapter: str | None = None
    lora_seed: int = 0
    begins: str | None = None
    sends_adapters: bool = False
    variant: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    section: str = "policy.megatron"

    @property
    def syncs_prediction(self) -> bool:
        """Return whether the weights of the layer for multi-token prediction go to engines."""
        return self.prediction is not None and self.prediction.synced

    @property
    def shares_prefixes(self) -> bool:
        """Return whether attention takes streams whose sequences share prefixes."""
        return self.core_attention != "spec" or self.layer_spec == "reference"

    def __post_init__(self) -> None:
        self.layout.check_layer_spec(self.layer_spec)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters chosen by patterns, the factor of their learning rate, and their weight decay (None: as the others)."""

    match: tuple[str, ...]
    lr_factor: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, or with `name` `muon` Muon for matrices, which alone uses the last two numbers.

    `schedule` is `constant`, `linear` or `cosine` over `total_steps` updates; a step of the run has `updates_per_step`.

    An update that breaks one of `skip_rules` is not applied, nor is one whose loss or gradients are not finite.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    total_steps: int = 1
    updates_per_step: int = 1
    schedule: str = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    offload_fraction: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()
    name: str = "adamw"
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    skip_rules: tuple[GuardRule, ...] = ()


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported here (on a host without a GPU some versions raise RuntimeError)."""
    try:
        importlib.import_module("torch")  # first: it loads libraries that Transformer Engine looks for, such as NCCL's
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError):
        return False
    return True


TESTED_WITH_TRANSFORMER_ENGINE = (0, 19)
"""The first megatron-core whose layers have run with the Transformer Engine of `requirements/constraints-gpu.txt`."""


def untested_pair(layer_spec: str, megatron_core: str) -> str | None:
    """A warning if Transformer Engine's layers would run under a version of megatron-core that they were not tested with."""
    major, minor = (int(part) for part in megatron_core.split(".")[:2])
    if layer_spec != "transformer_engine" or (major, minor) >= TESTED_WITH_TRANSFORMER_ENGINE:
        return None
    return (
        f"megatron-core {megatron_core} is not tested with Transformer Engine; the tested pair needs megatron-core >= 0.19, "
        "which needs Python 3.12"
    )


def choose_layer_spec(name: str, platform_name: str, fp8: str = "none", dtype: str = "bfloat16") -> str:
    """Resolve `auto`: Transformer Engine where it imports, there is a GPU and `dtype` is BF16, else `reference`.

    In float32 Transformer Engine has no fused attention, and none at all under context parallelism.

    Raises:
        ConfigError: Transformer Engine was asked for, by name or by `fp8`, and cannot be had here.
    """
    if name == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "model.layer_spec is 'transformer_engine', but transformer_engine cannot be imported here; "
            "it must be 'reference', 'local' or 'auto'"
        )
    if name != "auto":
        return name
    if platform_name == "cuda" and dtype != "float32" and has_transformer_engine():
        return "transformer_engine"
    if fp8 != "none":
        why = "transformer_engine cannot be imported here" if platform_name == "cuda" else "there is no GPU here"
        raise ConfigError(f"model.fp8 is '{fp8}', but {why}; it must be 'none'")
    return "reference"
