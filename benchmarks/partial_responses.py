"""What continuing cut responses saves in `sync` mode, and what keeping keys and values between the turns of an episode saves.

    python benchmarks/partial_responses.py --out benchmarks/results/partial_responses.json

Both on the embedded engine with a Llama of random weights (4 layers, hidden size 256), in this process. The first part drives
the scheduler through steps of 4 groups with 3 more, of which every third waits before each of its tokens, as a long tail would
make it, and counts tokens. The second part holds conversations of 8 turns one after the other, with and without the turn cache.
Seconds are of the processor, on one thread: they do not depend on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
import transformers
from measured_code import code_of
from workload import ROOT, machine, versions

sys.path.insert(0, str(ROOT))

from megarl.core.staleness_manager import StalenessManager
from megarl.data.prefills import NO_PREFILLS
from megarl.data.sample import Prompt
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler

STEPS, GROUPS, MORE, SAMPLES, TOKENS, WAIT_S = 8, 4, 3, 4, 48, 0.02
TURNS, PROMPT, TOLD, SAID, CONVERSATIONS = 8, 256, 192, 16, 4


def make_model(folder: Path) -> Path:
    """A Llama that is large enough for a prefill to cost something."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=2048, num_key_value_heads=4, max_position_embeddings=4096, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class SlowTail(EmbeddedEngine):
    """Every third group waits before each of its tokens."""

    def _wait_for_weights(self, call: Any) -> None:
        if crc32(call.rows[0].key.encode()) % 3 == 0:
            self._turn.wait(timeout=WAIT_S)
        super()._wait_for_weights(call)


class Handle:
    """An engine in this process as a scheduler calls it."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.engine, name)

        async def call(*given: Any, deadline_s: float | None = None, **named: Any) -> Any:
            return await method(*given, **named)

        return call


class Words:
    """A tokenizer that any ids are words to."""

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def steps(model: Path, *, continues: bool) -> dict[str, Any]:
    """Steps of the scheduler: tokens that were trained and thrown away, and seconds."""
    engine = SlowTail(model, seed=1, initial_version=0)
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    manager = StalenessManager(GROUPS, 0, MORE, continues=continues)
    respond = single_turns(params, SAMPLES, 300.0, Words())
    scheduler = Scheduler([Handle(engine)], manager, respond, groups_per_engine=3, cuts=True)  # type: ignore[list-item]
    scheduler.resume([0], 0)
    given, seconds, trained, older = 0, [], 0, 0

    def prompts(count: int) -> list[Prompt]:
        nonlocal given
        given += count
        return [Prompt(f"r{i}", f"g{i}", [5 + i % 2000] * 16, "") for i in range(given - count, given)]

    for version in range(STEPS):
        begun = time.process_time()
        if version:
            engine._weights.version = version  # an update that changes nothing
            scheduler.hold([0])
            scheduler.resume([0], version)
        scheduler.open_step(version, prompts)
        assert scheduler.wait(300.0)
        for group in scheduler.pop_batch().samples:
            trained += sum(len(sample.response_ids) for sample in group)
            older += sum(token < version for sample in group for token in sample.weight_versions)
        seconds.append(time.process_time() - begun)
    scheduler.close()
    aborted = scheduler.partial.aborted_tokens
    return {
        "trained_tokens": trained,
        "aborted_tokens": aborted,
        "sampled_per_trained_token": (trained + aborted) / trained,
        "older_tokens": older,
        "suspended_groups": manager.suspended,
        "cpu_seconds_per_step": sum(seconds[1:]) / (STEPS - 1),
    }


async def conversations(model: Path, turn_cache_bytes: int) -> dict[str, Any]:
    """Conversations of several turns, each with what it is told: tokens that were computed before a first one was sampled."""
    engine = EmbeddedEngine(model, seed=1, initial_version=0, turn_cache_bytes=turn_cache_bytes)
    params = SamplingParams(max_new_tokens=SAID, ignore_eos=True)
    seconds, prefill = [], NO_PREFILLS
    said: list[list[int]] = []
    for number in range(CONVERSATIONS):
        ids = [(7 * number + i) % 2000 for i in range(PROMPT)]
        begun = time.process_time()
        for turn in range(TURNS):
            key = f"{number}/{turn}"
            [[answer]] = await engine.generate(EngineRequest([ids], params, keys=[key], conversation=str(number)))
            said.append(answer.response_ids)
            ids = [*ids, *answer.response_ids, *((11 * turn + i) % 2000 for i in range(TOLD))]
            prefill += answer.prefill
        await engine.end_conversations([str(number)])
        seconds.append(time.process_time() - begun)
    asked = {"asked_tokens": prefill.asked, "cached_tokens": prefill.cached, "cache_hit_rate": prefill.cached / prefill.asked}
    return {**asked, "cpu_seconds_per_conversation": median(seconds), "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    out = Path(parser.parse_args().out)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        restart, goes_on = steps(model, continues=False), steps(model, continues=True)
        without, kept = (asyncio.run(conversations(model, size)) for size in (0, 2**30))
    assert without.pop("said") == kept.pop("said"), "what is said does not depend on what is kept"
    found = {
        "command": "python benchmarks/partial_responses.py",
        "machine": machine(),
        "versions": versions(),
        "code": code_of("partial_responses"),
        "partial_responses": {
            "restart": restart,
            "continue": goes_on,
            "cpu_seconds_ratio": restart["cpu_seconds_per_step"] / goes_on["cpu_seconds_per_step"],
        },
        "turn_cache": {
            "without": without,
            "kept": kept,
            "cpu_seconds_ratio": without["cpu_seconds_per_conversation"] / kept["cpu_seconds_per_conversation"],
        },
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
