"""Mistakes of SGLang 0.5.23 that end a run, waste a core or change what a model computes, mended in all of its processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.models.deepseek_v3 import LATENT_NORM_EPS


def install(model_path: str) -> None:
    """Replace SGLang's functions for the folder `model_path`; call it before the model is made and requests come."""
    _mend_paused_loops()
    _mend_fresh_memory()
    names = architectures_of(model_path)
    for prefix, mend in _OF_FAMILIES.items():
        if any(name.startswith(prefix) for name in names):
            mend()


def architectures_of(model_path: str) -> list[str]:
    """Architectures that the folder's config names; none where it cannot be read, so that SGLang says what is wrong with it."""
    try:
        return json.loads((Path(model_path) / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError):
        return []


def _mend_paused_loops() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_wait(self: Any) -> None:
        """While it is paused its loop looks for requests without end: a core for each engine during every weight update."""
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_wait


def _mend_fresh_memory() -> None:
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.runtime_context import get_exec

    restore = weight_updater._import_static_state

    def clear_and_restore(model: torch.nn.Module, buffers: Any) -> None:
        """Memory that a server takes again has any content. What no update sends is zero, or the scale of a KV cache."""
        if not get_exec().features.enable_weights_cpu_backup:
            clear_unsent(model)
        restore(model, buffers)

    weight_updater._import_static_state = clear_and_restore


def clear_unsent(model: torch.nn.Module) -> None:
    """Give a model's parameters, whose content is lost, the values of what weight updates leave out: zeros where SGLang pads a
    parameter, or adds up one that the first rank alone has, and the scales that its KV cache was started with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            for name in ("k_scale", "v_scale"):
                if (scale := getattr(module, f"{name}_float", None)) is not None:
                    getattr(module, name).fill_(scale)


def _mend_glm4v() -> None:
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.models import glm4v

    positions = MRotaryEmbedding.get_rope_index_glm4v

    def of_the_sent_ids(**given: Any) -> Any:
        """Without the mask, which is of the ids that SGLang makes anew of the prompt's text: they may be more or fewer than
        those that were sent. A prompt is computed alone, so that there is no padding to mask."""
        return positions(**given | {"attention_mask": None})

    MRotaryEmbedding.get_rope_index_glm4v = staticmethod(of_the_sent_ids)
    # its only LayerNorm is of the merger; SGLang's own default is 1e-6, and the model was trained with torch's
    glm4v.LayerNorm = partial(glm4v.LayerNorm, eps=1e-5)


def _mend_limits_of_pictures() -> None:
    from sglang.srt.utils.hf_transformers import processor

    class WithTheFoldersLimits(processor.AutoProcessor):  # type: ignore[misc]
        """SGLang gives each Qwen2-VL the limits 3136 and 1003520 pixels and would resize pictures that keep to the folder's."""

        @classmethod
        def from_pretrained(cls, *args: Any, **given: Any) -> Any:
            given.pop("size", None)
            return super().from_pretrained(*args, **given)

    processor.AutoProcessor = WithTheFoldersLimits


def _after_made(kind: Any, repair: Callable[[Any], None]) -> None:
    """Have every new object of a class repaired."""
    make = kind.__init__

    def make_and_repair(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        repair(self)

    kind.__init__ = make_and_repair


def _mend_latent_norms() -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    def with_an_epsilon_of_its_own(attention: Any) -> None:
        """SGLang gives the norms of the latents `rms_norm_eps`; transformers, and the code that Moonlight came with, 1e-6."""
        for norm in (getattr(attention, "q_a_layernorm", None), attention.kv_a_layernorm):
            if norm is not None:
                norm.variance_epsilon = LATENT_NORM_EPS

    _after_made(DeepseekV2AttentionMLA, with_an_epsilon_of_its_own)


def _mend_exaone4_heads() -> None:
    from sglang.srt.models.exaone4 import Exaone4Attention

    make = Exaone4Attention.__init__

    def make_as_the_config_says(self: Any, *, config: Any, **given: Any) -> None:
        """SGLang's layers norm heads with an epsilon of 1e-6, and have heads that share the hidden size, whatever it says."""
        said = {"rms_norm_eps": config.rms_norm_eps, "head_dim": getattr(config, "head_dim", None)}
        make(self, config=config, **given | said)

    Exaone4Attention.__init__ = make_as_the_config_says


def _mend_sinks() -> None:
    from sglang.srt.models.gpt_oss import GptOssAttention

    def with_sinks_of_the_models_dtype(attention: Any) -> None:
        """SGLang has bfloat16 ones, whatever the model computes in, and float32 ones for kernels that need these."""
        if attention.sinks.dtype != torch.float32:
            attention.sinks.data = attention.sinks.data.to(torch.get_default_dtype())

    _after_made(GptOssAttention, with_sinks_of_the_models_dtype)


def _mend_gemma3_embedding() -> None:
    from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding

    def with_a_rounded_multiplier(embedding: Any) -> None:
        """transformers, and training, have the multiplier in the model's dtype; in bfloat16 it is 0.2 percent off for 4B."""
        scale = torch.tensor(embedding.embed_scale, dtype=embedding.weight.dtype, device="cpu")
        embedding.embed_scale = scale.item()

    _after_made(Gemma3TextScaledWordEmbedding, with_a_rounded_multiplier)


def _mend_ernie_router() -> None:
    from sglang.srt.models.ernie4 import MoEGate

    def with_a_float32_bias(gate: Any) -> None:
        gate.e_score_correction_bias.data = gate.e_score_correction_bias.data.float()

    def in_float32(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """SGLang scores experts, and corrects the scores, in the model's dtype; transformers and training in float32."""
        return torch.nn.functional.linear(hidden_states.float(), self.weight.float())

    _after_made(MoEGate, with_a_float32_bias)
    MoEGate.forward = in_float32


def _mend_minimax_norms() -> None:
    if torch.cuda.is_available():
        return
    from sglang.srt.models import minimax_m2

    def norm(module: Any, heads: torch.Tensor) -> torch.Tensor:
        exact = heads.float()
        squares = exact.square().mean(-1, keepdim=True)
        if module.attn_tp_size > 1:
            squares = minimax_m2.attn_tp_all_reduce(squares) / module.attn_tp_size
        return (exact * torch.rsqrt(squares + module.variance_epsilon) * module.weight).to(heads.dtype)

    def norms(self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang norms queries and keys by kernels of CUDA's, or of some CPUs', alone."""
        return norm(self._q_norm, q), norm(self._k_norm, k)

    minimax_m2.MiniMaxM2QKRMSNorm.forward = norms


def _mend_hunyuan_queries() -> None:
    from sglang.srt.models.hunyuan import HunYuanAttention

    def with_a_row_for_each_token(attention: Any) -> None:
        """SGLang norms queries as rows of one head each, and its attention takes the first of these rows for tokens."""
        attention.attn.register_forward_pre_hook(lambda module, inputs: (inputs[0].view(-1, attention.q_size), *inputs[1:]))

    _after_made(HunYuanAttention, with_a_row_for_each_token)


_OF_FAMILIES = {
    "Glm4v": _mend_glm4v,
    "Qwen2VL": _mend_limits_of_pictures,
    "DeepseekV3": _mend_latent_norms,
    "Glm4MoeLite": _mend_latent_norms,
    "Exaone4": _mend_exaone4_heads,
    "GptOss": _mend_sinks,
    "Gemma3For": _mend_gemma3_embedding,
    "Ernie4_5_Moe": _mend_ernie_router,
    "MiniMaxM2": _mend_minimax_norms,
    "HunYuan": _mend_hunyuan_queries,
}
"""By the beginning of an architecture's name, what is mended of it."""
