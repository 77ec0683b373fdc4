"""Settings of a service: what it serves, its limits, and how long it keeps and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.options.serve.values import Sampled, SampleRequest


@dataclass(frozen=True)
class ServiceOptions:
    """`models`: names of the base model and the tokens of its context; `scratch`: a folder for weights that are passed on."""

    models: Mapping[str, int]
    scratch: Path
    context_tokens: int = 0
    max_rank: int = 128
    live_models: int = 64
    full_weights: bool = False
    max_body_bytes: int = 1 << 28
    """Of a body, and of it unpacked."""
    tenant_bytes: int = 1 << 32
    """Of a tenant's bodies that are read and passes that wait, unpacked."""
    max_waiting: int = 100_000
    """Requests that wait at once; more are asked again later."""
    snapshot_every_s: float = 300.0
    max_step_bytes: int = 1 << 32
    """Bytes of a model's passes since its last step, as they came."""
    sampling_slots: int = 256
    """Requests for samples that the sampler has at once; clients share them."""
    poll_s: float = 30.0
    """How long a client's question for an answer waits; the client itself gives up at 45 s."""
    keep_answers_s: float = 3_600.0
    keep_fetched_s: float = 600.0
    keep_answer_bytes: int = 1 << 30
    gap_s: float = 900.0
    """How long a request waits for one before it; the client asks again for 300 s."""
    session_idle_s: float = 1_800.0
    """A session without a sign of life for so long is idle, and what was passed to its samplers is dropped."""
    model_idle_s: float = 86_400.0
    """A session that has been idle, and then gave no sign of life for so long, is over: its models are kept as checkpoints, and
    dropped."""
    sampler_idle_s: float = 3_600.0
    """Weights that were passed to a sampler, are not a model's newest, and were not used for so long are dropped."""
    read_graph: Callable[[str, Sequence[tuple[str, int]], Mapping[str, Any]], Any] | None = None
    """Reads a loss that a client has defined: its name, inputs with their ranks, graph. None: clients compute such losses."""
    client_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags for clients beside those that the service sets (`ClientConfigResponse`)."""
    dynamic_flags: Mapping[str, Any] = field(default_factory=dict)
    answered: Callable[[str, str, SampleRequest, Sampled], None] | None = None
    """Told of every answer: the request's id, the model that was asked, the request and what it got."""
    say: Callable[[str], None] = print
