"""A server with the endpoints of SGLang that the sampler asks, and an engine in front of it; nothing is computed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from megarl.errors import EngineError


def flat(side: str, ids: Any, values: Any, nulls: int) -> dict[str, Any]:
    """SGLang's fields of the likeliest tokens of a side; `ids` and `values` `[rows, k]`."""
    arrays = {"val": np.asarray(values, dtype=np.float32), "idx": np.asarray(ids, dtype=np.int32)}
    coded = {
        f"{side}_top_logprobs_{name}_flat_b64": base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()
    }
    return coded | {f"{side}_top_logprobs_shape": [*arrays["val"].shape], f"{side}_top_logprobs_null_prefix": nulls}


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """Tokens 1, 2, … with log-probs −0.1, −0.2, …; the prompt's token i has log-prob −i."""
    count, start, k = (
        body["sampling_params"]["max_new_tokens"],
        body.get("logprob_start_len", -1),
        body.get("top_logprobs_num", 0),
    )
    size, ids = len(body["input_ids"]), list(range(1, count + 1))
    info: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": count},
        "cached_tokens": 3,
        "output_token_logprobs": [[-token / 10, token, None] for token in ids],
    }
    if start >= 0:
        info["input_token_logprobs"] = [[-float(at) if at > start else None, 0, None] for at in range(start, size)]
    if k:
        info |= flat("output", [[*range(k)]] * count, [[0.0] * k] * count, 0)
        rows = size - start - 1 if start >= 0 else 0
        info |= flat("input", np.tile(np.arange(k), (rows, 1)), np.zeros((rows, k)), 1)
    if (wanted := body.get("token_ids_logprob")) is not None:
        rows = [[[-(at + token / 1000), token, None] for token in wanted] for at in range(start + 1, size)]
        info["input_token_ids_logprobs"] = [None, *rows]
    return {"output_ids": ids, "meta_info": info}


@dataclass(eq=False)
class FakeServer:
    """One server: what it was asked, what it holds, and what its next answers wait for."""

    token: str
    most: int = 99
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    """Requests under way by the adapter's name."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    weights: str = "base"
    """The folder of the weights that it samples with."""
    sampled_with: list[str] = field(default_factory=list)
    """Of each request these weights."""
    sampling: int = 0
    """Requests under way."""
    refuses: str = ""
    is_dead: bool = False
    runner: Any = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/{endpoint}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.gate.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = json.loads(await request.read())
        status, answer = await getattr(self, request.match_info["endpoint"])(body)
        if self.is_dead:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(answer, status=status)

    async def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        self.sampled_with.append(self.weights)
        if self.refuses:
            return 400, {"error": {"message": self.refuses}}
        name = body.get("lora_path")
        if name is not None:
            assert name in self.held, "it was asked with adapters that it does not have"
            self.held[name] += 1
        self.sampling += 1
        try:
            await self.gate.wait()
        finally:
            self.sampling -= 1
            if name is not None and name in self.held:
                self.held[name] -= 1
        if not isinstance(body["rid"], list):
            return 200, answer_to(body)
        each = zip(body["input_ids"], body["sampling_params"], strict=True)
        return 200, [answer_to(body | {"input_ids": ids, "sampling_params": params}) for ids, params in each]

    async def abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.aborted.append(body["rid"])
        return 200, None

    async def load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        self.loads.append(Path(body["lora_path"]).name)
        if self.refuses or name in self.held:
            return 400, {"success": False, "error_message": self.refuses or f"{name} is already loaded"}
        self.held[name] = 0
        assert len(self.held) <= self.most, "it was given more adapters than it holds"
        return 200, {"success": True}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert not self.sampling, "weights changed under a request"
        self.weights = Path(body["model_path"]).name
        self.loads.append(self.weights)
        return 200, {"success": True}

    async def unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        assert self.held.pop(name) == 0, "adapters that are in use were dropped"
        self.unloads.append(name)
        return 200, {"success": True}


@dataclass(eq=False)
class FakeEngine:
    """An engine with such a server; `restarts` counts how often it was started again."""

    server: FakeServer
    restarts: int = 0
    fails: int = 0
    """How many of the next starts fail."""
    calls: Counter[str] = field(default_factory=Counter)

    async def endpoint(self, deadline_s: float) -> Any:
        self.calls["endpoint"] += 1
        return self.server

    async def health(self, *, deadline_s: float) -> None:
        self.calls["health"] += 1
        if self.server.is_dead:
            raise EngineError("the server ended with exit code -9")

    async def restart(self, deadline_s: float) -> None:
        self.restarts += 1
        if self.fails:
            self.fails -= 1
            raise EngineError("no GPU is free")
        await self.kill()
        self.server = FakeServer(f"again-{self.restarts}", self.server.most)
        await self.server.start()

    async def kill(self) -> None:
        """End the server; requests under way break."""
        self.server.is_dead = True
        self.server.gate.set()
        await self.server.runner.cleanup()
