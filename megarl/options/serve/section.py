"""The section `serve`, and what a config that has it may leave out: rows, rewards, a loss (docs/serve.md). Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Seconds, Section
from megarl.errors import DataError

NO_ROWS = {"source": "python", "name": f"{__name__}:no_rows"}
"""The `data.train` of a server, whose sequences all come from its clients."""

TARGETS = ["all-linear", "lm_head"]
"""Layers beside which a model may have adapters: of attention, of MLPs and experts, and the output layer."""
STEPS, RESTARTS = 5_000_000, 1_000
"""Minutes for which a server writes figures, and how often it may start again after a failure: as good as no bounds."""


class ServeConfig(Section):
    """A server of the Tinker protocol (`megarl serve`, docs/serve.md)."""

    host: str = "127.0.0.1"
    """Address to listen at. One that other machines can reach needs `tenants`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at. 0: a free one."""
    tenants: str | None = None
    """YAML file of tenants: hashes of their keys, and their quotas. null: every client is the same tenant, whatever its key."""
    tls_certificate: str | None = None
    """PEM file with the server's certificate and those that it depends on. null: plain HTTP."""
    tls_key: str | None = None
    """PEM file with the private key of `tls_certificate`."""
    models: dict[str, str | None] = Field(default_factory=dict)
    """Names by which clients ask for the base, each with `model.path` or null, such as `Qwen/Qwen3-0.6B: null`. Left out:
    `model.path` as it stands."""
    full_weights: bool = False
    """Train all weights, of one model at a time, in place of adapters of many."""
    max_rank: Positive = 32
    """Highest rank of the adapters of a model. Where it is left out: `policy.lora.rank`, if that is set."""
    live_models: Positive = 64
    """Models whose adapters, gradients and moments ranks keep in main memory, and engines their adapters. Those that were used
    longest ago are moved to the disk."""
    context_tokens: Positive = 4096
    """Longest sequence, prompt and answer together: `data.max_prompt_tokens` and `rollout.max_new_tokens` in sum."""
    snapshot_every_s: Seconds = 300.0
    """Seconds between snapshots of models that changed, which a server that was killed goes on from."""
    idle_session_s: Seconds = 86_400.0
    """Seconds after which a session is over whose client is idle: none of its signs of life, sent every 10 s, came for half an
    hour. Its models are kept as checkpoints for 30 days, and dropped."""
    max_body_bytes: Positive = 64 * 2**20
    """Largest body of a request in bytes, also once it is decompressed."""
    max_step_bytes: Positive = 4 * 2**30
    """Largest number of bytes of `forward_backward` requests of a model, as they came, without an `optim_step`. One more is
    refused, and the step behind it."""
    max_waiting: Positive = 20_000
    """Largest number of requests that wait at once, of all clients. More are answered with status 429."""


SERVE = AddedField("Config", "serve", ServeConfig | None, None, "A server of the Tinker protocol. null: this is none.")
FIELDS = (SERVE,)
serve_of = SERVE.of
"""The section `serve` of a config; None: it describes no server."""


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the plain tree of a server's config leaves out; any other tree is returned as it is.

    Values of a wrong type are left to the schema's own sentences.
    """
    serve = tree.get("serve")
    if not isinstance(serve, Mapping):
        return tree
    data, rollout, policy = (_mapping(tree.get(name)) for name in ("data", "rollout", "policy"))
    rank = _mapping(policy.get("lora")).get("rank", 0)
    limits: dict[str, Any] = {"max_rank": rank} if isinstance(rank, int) and rank > 0 else {}
    limits = {name: ServeConfig.model_fields[name].default for name in ("max_rank", "context_tokens")} | limits | {**serve}
    if not limits.get("models") and isinstance(base := _mapping(tree.get("model")).get("path"), str):
        limits["models"] = {base: None}
    context = limits["context_tokens"] if isinstance(limits["context_tokens"], int) else 2
    prompt, new = (section.get(name) for section, name in ((data, "max_prompt_tokens"), (rollout, "max_new_tokens")))
    prompt = prompt or max(1, context - new if isinstance(new, int) else context // 2)
    new = new or max(1, context - prompt if isinstance(prompt, int) else context // 2)
    max_rank = limits["max_rank"] if isinstance(limits["max_rank"], int) else 1
    without = serve.get("full_weights") or (rank == 0 and "rank" in _mapping(policy.get("lora")))
    adapters = {} if without else {"lora": {"rank": max_rank, "sync": "merged", "targets": TARGETS}}
    longer = {"max_tokens_per_micro_batch": context} if context > 8192 else {}
    defaults = {
        "run": {"name": "serve", "steps": STEPS, "max_restarts": RESTARTS},
        "policy": {**adapters, **longer},
        "algorithm": {"kl": {"coef": 0.0}},
        "data": {"train": NO_ROWS, "max_prompt_tokens": prompt},
        "rollout": {"max_new_tokens": new},
        "resources": {"placement": "separate"},
    }
    return _over(defaults, tree) | {"serve": limits}


def no_rows() -> list[dict[str, Any]]:
    """Tell a command that asks a server for rows which command it wants.

    Raises:
        DataError: always.
    """
    raise DataError(
        "the config has a section serve, and its clients bring the rows: run it by `megarl serve`, or remove the section and "
        "set data.train"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `below` with what `above` says in its place; mappings are joined key by key, a null section is none."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _over(merged[key], value)
        elif value is not None or not isinstance(merged.get(key), Mapping):
            merged[key] = value
    return merged
