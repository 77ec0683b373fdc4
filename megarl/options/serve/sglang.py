"""The arguments of SGLang's servers in a run that is a server of the Tinker protocol."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.models.adapters import adapter_part, adapters_of
from megarl.models.registry import load_hf_config
from megarl.option_list import part
from megarl.options.serve.engine_arguments import adapter_room, seed_arguments
from megarl.options.serve.section import serve_of


def check_servers(config: Config, platform: str) -> None:
    """Refuse a server whose engines would not add its adapters, before anything starts.

    Raises:
        ConfigError: they would not.
    """
    if serve_of(config) is None:
        return
    adapters = adapters_of(config.policy, load_hf_config(config.model.path), "policy.lora")
    why = adapter_part("sglang").refusal(config.model.path, adapters) if adapters is not None else None
    if why is not None:
        attention = "[q_proj, k_proj, v_proj, o_proj, lm_head]"
        targets = part("lora", "section", "policy.lora").lora_of_policy(config.policy).targets
        raise ConfigError(
            f"policy.lora.targets is {[*targets]}, and the engines of a server cannot sample with {why}; set it to "
            f"layers that they can, such as {attention}, or serve.full_weights to true"
        )


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """Arguments for the model in `folder`; none unless the config describes a server.

    Raises:
        EngineError: SGLang's servers would not add adapters to this model exactly.
    """
    serve = serve_of(config)
    if serve is None:
        return {}
    adapters = adapters_of(config.policy, load_hf_config(folder), "policy.lora")
    if adapters is None:
        return seed_arguments()
    modules = adapter_part("sglang").adapter_arguments(adapters, folder, "cpu")["lora_target_modules"]
    return seed_arguments() | adapter_room(modules, serve.max_rank, serve.live_models)
