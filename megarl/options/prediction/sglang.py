"""Speculative decoding of SGLang's servers: its arguments, and what is refused because it would not be exact (0.5.23)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megarl.config import Config
from megarl.errors import ConfigError, EngineError
from megarl.models.registry import architecture_for, load_hf_config, sees
from megarl.models.weight_formats import engine_format
from megarl.options.prediction.column import NAME, NO_DRAFTS, DraftCounts
from megarl.options.prediction.section import SpeculativeConfig, drafts_of

NAMES = {"mtp": "NEXTN", "ngram": "NGRAM", "standalone": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
"""SGLang's name of each algorithm."""

DRAFT_COUNTS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
"""What a server says of a response, in the order of the fields of `DraftCounts`."""
DRAFTING = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families of whose layer for multi-token prediction SGLang makes a draft."""


class AnsweredDrafts:
    """The counts that a server with speculative decoding says of a response (0.5.23)."""

    name = NAME
    body: ClassVar[dict[str, Any]] = {}

    def read(self, answer: Mapping[str, Any], tokens: int, url: str) -> DraftCounts | None:
        """The counts in an answer of the server at `url`; None where nothing was drafted.

        Raises:
            EngineError: they are no numbers.
        """
        try:
            counts = DraftCounts(*(int(answer["meta_info"].get(name, 0)) for name in DRAFT_COUNTS))
        except (TypeError, ValueError) as error:
            raise EngineError(f"{url}/generate answered something that is no generation: {str(answer)[:500]}") from error
        return counts if counts != NO_DRAFTS else None


def answered(folder: str, arguments: Mapping[str, Any]) -> AnsweredDrafts:
    """The counts of any server, whoever started it."""
    return AnsweredDrafts()


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """SGLang's server arguments for `rollout.speculative` of servers of the model in `folder`."""
    return draft_arguments(drafts_of(config.rollout), folder)


def draft_arguments(settings: SpeculativeConfig, model_path: str) -> dict[str, Any]:
    """SGLang's server arguments for `rollout.speculative`; `model_path` is what the servers serve."""
    if settings.algorithm == "none":
        return {}
    breadth = "speculative_ngram_max_bfs_breadth" if settings.algorithm == "ngram" else "speculative_eagle_topk"
    chosen = {
        "speculative_algorithm": NAMES[settings.algorithm],
        "speculative_num_steps": settings.num_steps,
        breadth: settings.topk,
        "speculative_num_draft_tokens": settings.num_draft_tokens or settings.num_steps + 1,
    }
    draft = model_path if settings.algorithm == "mtp" else settings.draft_model
    if draft is None:
        return chosen
    # nobody sends a draft its weights again when the server has given up its memory for a while
    return chosen | {"speculative_draft_model_path": draft, "enable_draft_weights_cpu_backup": True}


def check_servers(config: Config, platform: str) -> None:
    """Refuse what SGLang's servers would not do, or not exactly.

    Raises:
        ConfigError: names the field.
    """
    settings, field = drafts_of(config.rollout), "rollout.speculative.algorithm"
    if settings.algorithm == "none":
        return
    if platform == "cpu":
        # kernels/ops/kvcache/cache_move.py calls sgl_kernel.copy_all_layer_kv_cache_cpu when the cache is made, and
        # speculative/eagle_utils.py, _verify_uses_greedy, takes the likeliest token on a CPU whatever the temperature is
        reason = "SGLang's servers do not do exactly on a CPU: they take the likeliest token whatever the temperature is"
        raise ConfigError.of(field, settings.algorithm, reason, allowed="'none', or rollout.engine 'embedded'")
    if sees(config.model.path):
        raise ConfigError.of(field, settings.algorithm, "is not tested with models that see", allowed="'none'")
    if config.routing_replay == "engine":
        # state_capturer/routed_experts.py: "spec decoding's num_verify_tokens is still not accounted for"
        reason = "asks for the experts of every token, which SGLang's servers do not keep of drafts that they verify"
        raise ConfigError.of("policy.routing.replay", "engine", reason, allowed="'none' or 'old_policy'")
    hf_config = load_hf_config(config.model.path)
    has_layer = any(hf_config.get(name) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if settings.algorithm == "mtp" and not (has_layer and architecture_for(hf_config).name in DRAFTING):
        reason = (
            f"needs a layer for multi-token prediction as SGLang knows it (of {', '.join(DRAFTING)}), and model.path has none"
        )
        raise ConfigError.of(field, "mtp", reason, allowed="'none', 'ngram', 'standalone', 'eagle' or 'eagle3'")
    served = config.rollout.servers.model_path
    if config.syncs_prediction and served is not None and engine_format(load_hf_config(served)) is not None:
        reason = "would send a layer for multi-token prediction to engines in few bits, which is not written"
        raise ConfigError.of("policy.mtp.train", True, reason, allowed="false with such a folder in rollout.servers.model_path")
    for section, limits in _sampling(config):
        # speculative/eagle_utils.py, eagle_sample: no min-p, and top-p is judged by what top-k has left
        if limits["min_p"]:
            reason = "SGLang's servers leave out when they verify drafts"
            raise ConfigError.of(f"{section}.min_p", limits["min_p"], reason, allowed="0")
        if limits["top_k"] and limits["top_p"] < 1:
            reason = "SGLang's servers judge by what top_k has left when they verify drafts"
            raise ConfigError.of(f"{section}.top_p", limits["top_p"], reason, allowed="1 where top_k is set")


def _sampling(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields that limit sampling, by their section."""
    sections = {
        "rollout": config.rollout,
        **{f"evaluations[{index}]": evaluation for index, evaluation in enumerate(config.evaluations)},
    }
    for name, section in sections.items():
        yield name, {limit: getattr(section, limit) for limit in ("top_k", "top_p", "min_p")}
