"""The task of an agent: where it may ask for turns, and what it is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AgentTask:
    """One episode of an agent. `base_url` and `api_key` are what an OpenAI client takes, `model` the name to ask for."""

    base_url: str
    """Ends in `/v1`; clients of Anthropic take it without that."""
    api_key: str
    model: str
    prompt: str
    """The row's question: what the run's own episodes would have begun with, without the chat template."""
    row: dict[str, Any]
