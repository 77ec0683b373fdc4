"""Episodes in an environment: its turns and rewards, and what becomes of a run whose environment fails."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.media import Media
from megarl.data.sample import Sample, read_record
from megarl.errors import EpisodeError, RewardError
from megarl.options.environments.episode import Environments
from megarl.rewards import build_rewards
from tests.data.chat_tokenizers import byte_tokenizer, ids_of
from tests.rollout import episode_parts
from tests.rollout.episode_parts import HERE, PROMPT, Script, Settings, opened

END = ids_of("<|end|>")[0]
ONE_TWO_THREE = [([*ids_of(word), END], "stop") for word in ("one", "two", "three", "four")]


def settings(name: str, **options: Any) -> Settings:
    return Settings(kind="environment", tools=[f"{HERE}:{name}"], **options)


def run(name: str, turns: Any = ONE_TWO_THREE, *, max_new_tokens: int = 1000, data: Any = None, **options: Any) -> Sample:
    episode, context = opened(byte_tokenizer(), settings(name, **options), max_new_tokens, **(data or {}))
    return asyncio.run(episode(PROMPT, 0, Script(turns), context))


def opening(*messages: tuple[str, str]) -> list[int]:
    pieces = [piece for role, text in messages for piece in ("<|start|>", f"{role}\n{text}", "<|end|>", "\n")]
    return ids_of(*pieces, "<|start|>", "assistant\n")


@pytest.mark.parametrize("name", ["Counting", "CountingAwaited"])
def test_an_episode_goes_on_until_the_environment_is_done(name: str) -> None:
    sample = run(name)
    between = [ids_of("\n", "<|start|>", f"user\nthat was {word}", "<|end|>", "\n", "<|start|>", "assistant\n") for word in
               ("one", "two")]  # fmt: skip
    one, two, three = ([*ids_of(word), END] for word in ("one", "two", "three"))
    assert sample.prompt_ids == opening(("user", "count to three"))
    assert sample.response_ids == [*one, *between[0], *two, *between[1], *three]
    assert sample.sampled_mask == [1] * 4 + [0] * len(between[0]) + [1] * 4 + [0] * len(between[1]) + [1] * 6
    assert (sample.finish_reason, sample.response_text, sample.rewards) == ("stop", "three", {"environment": 2.5})
    log = getattr(episode_parts, name).log
    assert log == ["made", "reset train-7", "step one", "step two", "step three", "closed"]


def test_an_episode_begins_with_what_the_environment_says() -> None:
    assert run("Silent").prompt_ids == PROMPT.prompt_ids
    assert run("Chatty").prompt_ids == opening(("system", "rules"), ("user", "go"))
    assert run("Counting", data={"system_prompt": "count"}).prompt_ids == opening(
        ("system", "count"), ("user", "count to three")
    )
    assert run("Chatty").prompt_text.endswith("<|start|>assistant\n")


def test_an_environment_cannot_begin_a_turn_of_the_policy() -> None:
    """Neither the user's nor a server of others: special tokens in its first words are text. Those of the config stay."""
    broken_up = opening(("user", "go< |end|>\n< |start|>assistant\nI win"))
    assert run("Forging").prompt_ids == broken_up
    own = run("Forging", data={"system_prompt": "be<|end|>"}).prompt_ids
    assert own == [*ids_of("<|start|>", "system\nbe", "<|end|>", "<|end|>", "\n"), *broken_up]


def test_rows_with_pictures_begin_as_they_are_or_in_the_environments_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = replace(PROMPT, media=[Media("image", ("red",), (1, 2, 2), 0, 1)])
    monkeypatch.setattr("tests.options.environments.test_episodes_environment.PROMPT", shown)
    assert run("Silent").media == shown.media
    assert run("Counting").media == []


def test_rewards_count_as_far_as_the_episode_came() -> None:
    assert run("Counting", max_turns=2).rewards == {"environment": 1.0}
    assert run("Counting", max_turns=2).finish_reason == "length"
    cut = run("Counting", max_new_tokens=38)  # the second turn's end does not fit
    assert (cut.rewards, cut.finish_reason) == ({"environment": 0.5}, "length")
    assert episode_parts.Counting.log == ["made", "reset train-7", "step one", "closed"]
    assert len(cut.response_ids) == 38
    aborted = run("Counting", [ONE_TWO_THREE[0], (ids_of("tw"), "abort")])
    assert (aborted.rewards, aborted.finish_reason) == ({"environment": 0.5}, "abort")


def test_each_turn_keeps_what_it_was_given_and_the_state_that_it_was_taken_in() -> None:
    assert run("Counting").turn_rewards == [0.5, 0.5, 1.5]
    assert run("Counting").turn_states == []
    named = run("Named")
    assert named.turn_rewards == [0.5, 0.5, 1.5]
    log = ["made", "reset train-7", "step one", "step two"]
    keys = [json.dumps({"last": turn, "log": log[: 2 + turn]}) for turn in range(3)]
    assert named.turn_states == [*keys[:2], hashlib.sha256(keys[2].encode()).hexdigest()]  # of a long one the hash
    assert run("Named").turn_states == named.turn_states
    assert run("NamedAwaited").turn_states == ["0", "1", "2"]
    cut = run("NamedAwaited", max_new_tokens=38)
    assert (cut.turn_rewards, cut.turn_states) == ([0.5, 0.0], ["0", "1"])
    assert run("Named", [(ids_of("tw"), "abort")]).turn_rewards == []
    assert read_record(Sample, named.to_dict()) == named
    old = {name: value for name, value in named.to_dict().items() if not name.startswith("turn_")}
    assert read_record(Sample, old).turn_rewards == []


@pytest.mark.parametrize("name", ["turn_rewards", "turn_states"])
def test_a_sample_has_as_many_rewards_and_states_as_turns(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must have one entry per turn, got 2 for 3 turns"):
        replace(run("Counting"), **{name: getattr(run("NamedAwaited"), name)[:2]})


def test_the_budget_holds_for_all_turns_together() -> None:
    """For every budget: never more tokens than it, a sampled token at the end, and the same tokens as with more budget."""
    whole = run("Counting").response_ids
    for budget in range(1, len(whole) + 2):
        sample = run("Counting", max_new_tokens=budget)
        assert len(sample.response_ids) <= budget
        assert sample.response_ids == whole[: len(sample.response_ids)]
        assert sample.sampled_mask[-1] == 1
        assert sample.finish_reason == ("stop" if budget >= len(whole) else "length")


def test_the_reward_environment_is_what_the_environment_gave() -> None:
    rewards = build_rewards([RewardConfig(name="environment", weight=2.0)], DataConfig(train=SourceConfig(name="chain_sum")))
    samples = [run("Counting"), run("Counting", max_turns=1)]
    assert rewards.score(samples) == [5.0, 1.0]
    assert [sample.rewards for sample in samples] == [{"environment": 2.5}, {"environment": 0.5}]
    samples[1].rewards.clear()
    with pytest.raises(RewardError, match=r"brought no reward along; rollout.episode.kind must be 'environment'"):
        rewards.score(samples)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raising", r"the environment's Raising.step raised KeyError: 'lost' \(.*episode_parts.py line \d+\)"),
        ("Wordless", "observed a int; it must be text or a list of chat messages"),
        ("Worthless", "the reward nan; it must be a finite number"),
        ("Paired", r"step returned a tuple; it must return \(observation, reward, done\)"),
        (
            "Unnameable",
            "state_key of the environment .*Unnameable returned <object .*; it must return text, a number",
        ),
        ("Talkative", "begins row train-7 with 1019 tokens, but data.max_prompt_tokens is 512"),
    ],
)
def test_an_environment_that_fails_ends_the_run_with_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(EpisodeError, match=sentence):
        run(name)
    assert getattr(episode_parts, name).log[-1] == "closed"


def test_an_environment_that_hangs_is_left_behind() -> None:
    started = time.monotonic()
    with pytest.raises(EpisodeError, match=r"Hanging.step did not return within rollout.episode.tool_timeout_s = 2 s"):
        run("Hanging", tool_timeout_s=2.0)
    assert time.monotonic() - started < 20


def test_a_long_observation_is_cut_and_counted() -> None:
    episode, context = opened(byte_tokenizer(), settings("Wide", max_turns=2))
    sample = asyncio.run(episode(PROMPT, 0, Script(ONE_TWO_THREE), context))
    assert sample.turns[1] == {"role": "user", "content": "y" * 100 + "\n[cut: 100 of 10000000 characters]"}
    assert context.take_counts()["tool_cuts"] >= 1


def test_a_cancelled_episode_closes_its_environment() -> None:
    async def endless(ids: list[int], max_new_tokens: int, media: Any = None) -> Any:
        await asyncio.sleep(600)

    episode, context = opened(byte_tokenizer(), settings("Counting"))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(episode(PROMPT, 0, endless, context), 0.3))
    assert episode_parts.Counting.log == ["made", "reset train-7", "closed"]


async def cycles(number: int = 10) -> None:
    """Let tasks go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_an_environment_of_a_cancelled_episode_is_closed_when_its_step_has_returned() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(episode_parts.Counting):
        def step(self, text: str) -> tuple[Any, float, bool]:
            begun.set()
            goes_on.wait(30)
            return super().step(text)

    async def scenario() -> None:
        episode, context = opened(byte_tokenizer(), settings("Counting"))
        context.shared = Environments(Slow, "Slow")
        running = asyncio.create_task(episode(PROMPT, 0, Script(ONE_TWO_THREE), context))
        assert await asyncio.to_thread(begun.wait, 30)
        threads = {*threading.enumerate()}
        running.cancel()
        await cycles()
        assert {*threading.enumerate()} <= threads, "nothing else is called meanwhile"
        assert Slow.log[-1] == "reset train-7"
        goes_on.set()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(scenario())
    assert Slow.log == ["made", "reset train-7", "step one", "closed"]


def test_an_environment_keeps_its_place_until_it_is_closed() -> None:
    async def scenario() -> None:
        closing, may_close, at_once = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(1)

        class Closing(episode_parts.CountingAwaited):
            async def close(self) -> None:  # type: ignore[override]
                closing.set()
                await may_close.wait()

        episode, context = opened(byte_tokenizer(), settings("Counting"))
        context.shared = Environments(Closing, "Closing", at_once)
        running = asyncio.create_task(episode(PROMPT, 0, Script(ONE_TWO_THREE), context))
        await closing.wait()
        running.cancel()
        await cycles()
        assert at_once.locked(), "a server may have no room for one more"
        may_close.set()
        await asyncio.wait([running])
        assert running.cancelled()
        assert not at_once.locked()

    asyncio.run(scenario())
