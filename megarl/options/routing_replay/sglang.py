"""The experts that an SGLang server chose, as it answers them: `return_routed_experts` of a request (0.5.23).

A server keeps the choices beside its KV cache, slot by slot. Those of a prompt that it finds in its cache, the turns before
included, are the ones that were made when the slots were filled; those of a response that was retracted are the ones of the
pass that computed it anew, and so of a single version of the weights.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megarl.config import Config
from megarl.errors import EngineError
from megarl.models.shape import ModelShape
from megarl.options.routing_replay.column import COLUMN, Routes, compact

RETURNS_ROUTES = "enable_return_routed_experts"


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of a model's `layers` that have `experts`, of which a token uses `top_k`."""

    layers: int
    expert_layers: tuple[int, ...]
    experts: int
    top_k: int

    @classmethod
    def of(cls, folder: str | Path) -> ExpertLayers | None:
        """The expert layers of the model in a Hugging Face folder; None if it has none."""
        shape = ModelShape.read(folder)
        return cls(shape.layers, tuple(sorted(shape.expert_layers)), shape.experts, shape.top_k) if shape.experts else None

    name = COLUMN.name
    body: ClassVar = {"return_routed_experts": True}

    def read(self, answer: Mapping[str, Any], tokens: int, url: str) -> Routes | None:
        """The routes of `tokens` in an answer; None where it was cut, and will be computed anew."""
        return None if answer["meta_info"]["finish_reason"]["type"] == "abort" else self.routes(answer, tokens, url)

    def routes(self, answer: Mapping[str, Any], tokens: int, url: str) -> Routes:
        """The choices of `tokens` tokens in an answer of the server at `url`; those of no answered token are not known.

        Raises:
            EngineError: there are none, or they are of another model.
        """
        encoded = answer["meta_info"].get("routed_experts")
        if encoded is None:
            raise EngineError(
                f"{url}/generate answered without the experts that it chose, which it was started to keep "
                "(--enable-return-routed-experts)"
            )
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
            chosen = flat.reshape(-1, self.layers, self.top_k)
        except (ValueError, TypeError, binascii.Error) as error:
            raise EngineError(
                f"{url}/generate answered experts that are not those of {self.layers} layers with {self.top_k} each: {error}"
            ) from error
        if len(chosen) != tokens:
            raise EngineError(f"{url}/generate answered the experts of {len(chosen)} tokens; there must be those of {tokens}")
        return compact(chosen[:, list(self.expert_layers)], self.experts)


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """A server's arguments where its choices are replayed."""
    return {RETURNS_ROUTES: True} if config.routing_replay == "engine" else {}


def answered(folder: str, arguments: Mapping[str, Any]) -> ExpertLayers | None:
    """The expert layers of the model that a server serves, if it was started to say what it chooses."""
    return ExpertLayers.of(folder) if arguments.get(RETURNS_ROUTES) else None
