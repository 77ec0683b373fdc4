"""Calls to engines that may leave: what they have sampled is kept on the driver's node as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray

from megarl.data.stored import Stored, StoredGeneration
from megarl.rollout.engines.protocol import EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.workers.engine_calls import EngineCalls
from megarl.workers.object_store import RayObject

FETCH_S = 120.0


class KeptAnswers(EngineCalls):
    """An engine as the scheduler calls it, whose node may go before its tokens are trained on.

    Elsewhere tokens stay in the object store of the engine's node. Here an answer is one when they are in that of the driver's:
    where the engine's node is lost before, the call has failed, and the scheduler asks another engine.
    """

    async def generate(self, request: EngineRequest) -> list[list[SampledTurn]]:
        """Ask the engine as `EngineCalls.generate` does, and fetch the tokens and texts that it has stored."""
        answers = await super().generate(request)
        moved: dict[int, Stored] = {}
        return [[await self._moved(turn, moved) for turn in of_prompt] for of_prompt in answers]

    async def _moved(self, turn: SampledTurn, moved: dict[int, Stored]) -> SampledTurn:
        if not isinstance(turn, StoredGeneration):
            return turn
        handles: Sequence[Stored] = turn.stored, turn.texts
        for handle in handles:
            if isinstance(handle, RayObject) and id(handle) not in moved:
                moved[id(handle)] = RayObject(ray.put(await self._answer(handle.reference, "generate", FETCH_S)))
        stored, texts = (moved.get(id(handle), handle) for handle in handles)
        return replace(turn, stored=stored, texts=texts)
