"""Checks of a server's config: one sentence per contradiction, before anything starts."""

from __future__ import annotations

from typing import Any

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.option_list import part
from megarl.options.serve.section import ServeConfig, serve_of
from megarl.system.bearer_tokens import is_loopback


def check(config: Config) -> None:
    """Refuse what a server cannot keep, and fields that nothing would read because clients decide.

    Raises:
        ConfigError: the first contradiction.
    """
    serve = serve_of(config)
    if serve is not None:
        _check_access(serve)
        _check_base(config, serve)
        _check_weights(config, serve)
        _check_sampling(config)
        _check_unread(config)


def _check_access(serve: ServeConfig) -> None:
    if serve.tenants is None and not is_loopback(serve.host):
        remedy = "set serve.tenants to a file of keys (`megarl serve CONFIG --new-key NAME`), or serve.host to 127.0.0.1"
        raise ConfigError.needs(f"serve.host = '{serve.host}', which others can reach,", "keys of tenants", remedy)
    if serve.tls_certificate is None and serve.tls_key is not None:
        raise ConfigError.needs_set("serve.tls_key", "a certificate", "serve.tls_certificate")
    if serve.tls_key is None and serve.tls_certificate is not None:
        raise ConfigError.needs_set("serve.tls_certificate", "its private key", "serve.tls_key")


def _check_base(config: Config, serve: ServeConfig) -> None:
    for name, folder in serve.models.items():
        if folder is not None and folder != config.model.path:
            reason = "is another folder than that of the one base that a server has"
            raise ConfigError.of(f"serve.models.{name}", folder, reason, allowed=f"null, or model.path = '{config.model.path}'")
    if config.longest_sequence != serve.context_tokens:
        reason = f"is not the sum of data.max_prompt_tokens = {config.data.max_prompt_tokens} and rollout.max_new_tokens = "
        reason += f"{config.rollout.max_new_tokens}"
        allowed = f"{config.longest_sequence}, or one of these left out"
        raise ConfigError.of("serve.context_tokens", serve.context_tokens, reason, allowed=allowed)


def _check_weights(config: Config, serve: ServeConfig) -> None:
    has_adapters = config.policy.has_adapters
    if serve.full_weights and has_adapters:
        reason = "trains all weights, and policy.lora trains adapters in their place"
        raise ConfigError.of("serve.full_weights", True, reason, allowed="false with policy.lora")
    if serve.full_weights:
        return
    if not has_adapters:
        raise ConfigError.needs("a server of many models", "adapters", "set policy.lora.rank, or serve.full_weights to true")
    lora = part("lora", "section", "policy.lora").lora_of_policy(config.policy)
    if lora.adapter is not None:
        reason = "would be every model's beginning, and a model begins as the base"
        raise ConfigError.of("policy.lora.adapter", lora.adapter, reason, allowed="null in a server")
    if lora.sync != "merged":
        reason = "has engines hold one policy's adapters, and those of a server load the adapters of each model"
        raise ConfigError.of("policy.lora.sync", lora.sync, reason, allowed="'merged' in a server")
    if rate := config.policy.experts.bias_update_rate:
        reason = "moves biases of the base's routers, and the base is the same for all models"
        raise ConfigError.of("policy.experts.bias_update_rate", rate, reason, allowed="0 in a server of adapters")
    if lora.rank != serve.max_rank:
        allowed = f"serve.max_rank = {serve.max_rank}, or one of them left out"
        raise ConfigError.of("policy.lora.rank", lora.rank, allowed=allowed)


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.engine != "sglang":
        raise config.refusal("rollout.engine", "cannot add adapters of many models to a batch", allowed="'sglang' in a server")
    if rollout.schedule.mode != "sync":
        reason = "is a plan of steps, which a server's clients make themselves"
        raise config.refusal("rollout.schedule.mode", reason, allowed="'sync' in a server")
    if config.resources.placement == "colocated" and rollout.engine_args.get("enable_memory_saver") is not False:
        reason = "has engines sleep while the trainer works, and clients sample and train at the same time"
        allowed = "'separate' in a server, or rollout.engine_args.enable_memory_saver false"
        raise config.refusal("resources.placement", reason, allowed=allowed)
    for field, plain in {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "greedy": False}.items():
        if getattr(rollout, field) != plain:
            reason = "would change the log-probs of every client's training"
            raise config.refusal(
                f"rollout.{field}", reason, allowed=f"{plain} in a server: each request of a client has its own"
            )
    if rollout.drafts is not None:
        reason = "drafts by one model, and a server's engines sample from many"
        raise ConfigError.of("rollout.speculative", "given", reason, allowed="left out in a server")


def _check_unread(config: Config) -> None:
    """Refuse what belongs to a loop: here each client has its own, with its own losses, rows and rewards."""

    def refuse(field: str, value: Any, allowed: str) -> None:
        reason = "is for the loop of `megarl train`, and the clients of a server have loops of their own"
        raise ConfigError.of(field, value, reason, allowed=f"{allowed} in a server")

    if config.uses_critic:
        refuse("algorithm.advantage", config.algorithm.advantage, "one without a critic")
    if config.uses_reference:
        refuse("algorithm.kl.coef", config.algorithm.kl.coef, "0, and algorithm.advantage and policy_loss without a reference")
    if config.policy.predicts:
        refuse("policy.mtp.train", True, "false")
    if config.rewards:
        refuse("rewards", "given", "empty")
    if config.data.eval is not None:
        refuse("data.eval", "given", "null")
    if config.evaluations:
        refuse("evaluations", "given", "empty")
    if config.run.guards:
        refuse("run.guards", "given", "empty")
    if config.rollout.episode.kind != "single":
        refuse("rollout.episode.kind", config.rollout.episode.kind, "'single'")
