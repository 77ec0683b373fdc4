"""The client of a server that somebody else started, which knows no text: it is asked piece by piece where a text may end a
response, so that at most a piece is sampled behind the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from megarl.data.stop_finder import ModelTexts, StopFinder
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.rollout.engines.sglang.answered import AnsweredColumn
from megarl.rollout.engines.sglang.asked_prompt import AskedPrompt
from megarl.rollout.engines.sglang.client import AskedServer, GenerateCall, SglangClient
from megarl.rollout.engines.stops import cut_behind

PIECE_TOKENS = 64
"""Tokens that are asked for at once."""


class PieceClient(SglangClient):
    """A client that looks for stop texts itself, by the tokenizer of a folder."""

    def __init__(self, server: AskedServer, columns: Sequence[AnsweredColumn], tokenizer_folder: str) -> None:
        super().__init__(server, columns)
        self._texts = ModelTexts(tokenizer_folder)
        self._cut: set[str] = set()  # requests whose responses are to end with what they have

    async def generate(self, request: EngineRequest, version: int) -> list[list[Generation]]:
        try:
            return await super().generate(request, version)
        finally:
            self._cut &= {*self._under_way}

    async def cut(self, keys: Sequence[str]) -> None:
        chosen = {*keys}
        self._cut |= {rid for rid, key in self._under_way.items() if key in chosen}
        await super().cut(keys)

    async def _response(
        self, call: GenerateCall, prompt: AskedPrompt, rid: str, begun: Generation | None, most: int | None = None
    ) -> Generation:
        if not call.params.looked_for:
            return await super()._response(call, prompt, rid, begun, most)
        finder, whole = StopFinder(call.params.looked_for, await asyncio.to_thread(self._texts.decode)), begun
        finder.first(begun.response_ids if begun is not None else [])
        while True:
            had = whole.tokens if whole is not None else 0
            whole = await super()._response(call, prompt, rid, whole, PIECE_TOKENS)
            if (count := finder.first(whole.response_ids[had:])) is not None:
                return cut_behind(whole, len(prompt.ids), had + count)
            is_over = whole.finish_reason != "length" or whole.tokens == call.params.max_new_tokens
            if is_over or whole.response_ids[-1] in call.params.cut_token_ids:
                return whole
            if rid in self._cut:
                return replace(whole, finish_reason="abort")
