"""Prompts that are asked outside batches (evaluation, `megarl generate`): engines are kept full, and answers come in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.engine_kinds import EngineCapabilities
from megarl.data.sample import Prompt
from megarl.data.tokenize import load_tokenizer
from megarl.errors import DataError
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.workers import rollouts as module
from megarl.workers.rollouts import Rollouts
from tests.config.smallest import config
from tests.rollout.fake_engines import FakeEngine, Spelling

MODEL = Path(__file__).parents[2] / "models" / "tiny-arithmetic"
PROMPTS = [Prompt(f"r{i}", f"g{i}", [i], str(i)) for i in range(24)]


class OneIsSlow(FakeEngine):
    """Answers prompt 0 when all others are answered, and every other with its own number."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ended, self.others_ended = 0, asyncio.Event()

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        self.now.update(request.keys or ())
        self.most = max(self.most, request.n * sum(self.now.values()))
        try:
            await asyncio.sleep(0.001)
            if "g0" in (request.keys or ()):
                await self.others_ended.wait()
        finally:
            self.now.subtract(request.keys or ())
        self.ended += len(request.prompts)
        if self.ended == len(PROMPTS) - 1:
            self.others_ended.set()
        return [[Generation([ids[0]], [0.0], [0], "stop") for _ in range(request.n)] for ids in request.prompts]


class Words(Spelling):
    eos_token_id = 99


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollouts]:
    """Two groups of four responses are a step, of an engine that answers many requests at once."""
    monkeypatch.setattr(module, "EngineCalls", lambda engine, number: engine)
    monkeypatch.setattr(module, "capabilities_of", lambda rollout: EngineCapabilities(concurrent=True))
    made: Any = object.__new__(Rollouts)
    sizes = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.deadlines.generate_s=20")
    made.config, made.tokenizer, made.episodes, made.lent, made.engines = config(*sizes), Words(), None, (), [OneIsSlow()]
    made._turns, made._placeholders, made._updates = None, (), None
    made.scheduler = made._schedule(None, lambda group: None)
    made.scheduler.resume([0], 0)
    yield made
    made.close()


@pytest.mark.parametrize("n", [1, 2])
def test_no_prompt_waits_for_another_ones_answer_and_the_engine_is_full(rollouts: Rollouts, n: int) -> None:
    samples = rollouts.answer(PROMPTS, n, greedy=n == 1)
    assert [sample.response_ids for sample in samples] == [[i] for i in range(24) for _ in range(n)]
    assert rollouts.engines[0].most == 8
    assert rollouts.answered() == (24, 24)


def test_a_prompt_of_a_program_is_a_row_of_its_own_whatever_columns_rows_are_made_of() -> None:
    if not MODEL.exists():
        pytest.skip("needs models/tiny-arithmetic (make tiny-model)")
    made: Any = object.__new__(Rollouts)
    made.config = config("data.prompt='Say {word}'", "data.chat_template=never", "data.max_prompt_tokens=8")
    made.tokenizer, made.episodes = load_tokenizer(str(MODEL)), None
    prompt = made.prompt({"prompt": "1+2=", "answer": "3"}, "asked-7")
    assert prompt.prompt_ids == made.tokenizer("1+2=", add_special_tokens=False).input_ids
    assert (prompt.prompt_text, prompt.row["answer"]) == ("1+2=", "3")
    assert prompt.row_id.startswith("asked-7")
    with pytest.raises(DataError, match=r"the prompt.*data\.max_prompt_tokens"):
        made.prompt({"prompt": "1+2+3+4+5="}, "asked-8")
