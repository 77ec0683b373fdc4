"""The keys that the embedded engine says its indexers chose, also where weights change in mid-response; and the column."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import parse_supervised_config
from megarl.data.batch import Batch
from megarl.data.sample import Sample, read_record
from megarl.errors import ConfigError
from megarl.options.sparse_attention.column import agreed, alike, from_json, kept, known, of_one_version, packed, to_json
from megarl.options.sparse_attention.section import indexer_of
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from tests.config.smallest import config
from tests.families import build_folder
from tests.rollout.turning_engine import TurningEngine

PROMPTS = [[5, 6, 7, 8], [100, 9, 10, 11, 12, 13, 4, 5, 6], [40, 41]]
PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True, extra=frozenset({"chosen_keys"}))
REPLAY = "policy.indexer.replay=engine"


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose queries attend to five keys; of the second one every other layer has no indexer."""
    path = tmp_path_factory.mktemp("models") / request.param
    build_folder(request.param, path)
    return path


def chosen_by(model: Any, ids: list[int]) -> Any:
    """bool `[tokens, indexers, tokens]`: the keys that transformers chooses for a whole sequence."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, columns: found.append(columns[0].long()))
        for name, module in model.named_modules()
        if name.endswith(".indexer")
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    chosen = torch.zeros(len(ids), len(found), len(ids), dtype=torch.bool).scatter_(-1, torch.stack(found, 1), True)
    return (chosen & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[:, None]).numpy()


def test_the_keys_of_every_token_are_those_that_the_model_chooses(folder: Path) -> None:
    engine, model = EmbeddedEngine(folder, initial_version=0), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, PARAMS, n=2)))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            keys = one.extra["chosen_keys"]
            expected = chosen_by(model, [*prompt, *one.response_ids[:-1]])
            np.testing.assert_array_equal(*alike([keys, packed(expected)]))  # one beside it may be longer
            assert expected.sum(-1).max() == 5
    [[plain]] = asyncio.run(engine.generate(EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=2))))
    assert not plain.extra


def test_a_response_under_two_versions_keeps_the_choices_of_the_last_one_alone(folder: Path) -> None:
    engine = TurningEngine(folder, initial_version=0)
    for prompt, [one] in zip(PROMPTS, asyncio.run(engine.generate(EngineRequest(PROMPTS, PARAMS))), strict=True):
        assert len({*one.weight_versions}) == 2
        keys, versions = one.extra["chosen_keys"], one.weight_versions
        expected = chosen_by(engine._model, [*prompt, *one.response_ids[:-1]])
        np.testing.assert_array_equal(*alike([keys, packed(expected)]))
        own = of_one_version(keys, len(prompt), [1] * len(versions), versions)
        older = [len(prompt) - 1 + place for place, version in enumerate(versions) if version != versions[-1]]
        assert (~known(own).any(1)).nonzero()[0].tolist() == older


def keys_of(*rows: list[int], length: int) -> Any:
    """Of one indexer and the tokens of `rows` the positions that they choose among `length`; an empty list: not known."""
    chosen = np.zeros((len(rows), 1, length), np.bool_)
    for row, positions in enumerate(rows):
        chosen[row, 0, positions] = True
    keys = packed(chosen)
    keys[[row for row, positions in enumerate(rows) if not positions]] = 255
    return keys


def test_choices_of_shorter_sequences_become_as_wide_as_the_longest() -> None:
    short, long = keys_of([0], [], [0, 2], length=3), keys_of([0], [1, 9], length=17)
    widened, same = alike([short, long])
    assert widened.tolist() == [[[1, 0, 0]], [[255] * 3], [[5, 0, 0]]]
    assert same is long
    assert known(widened)[:, 0].tolist() == [True, False, True]
    assert alike([]) == []


def test_responses_share_the_choices_on_which_they_agree() -> None:
    first, second = keys_of([0], [0, 1], [1, 2], length=3), keys_of([0], [0, 1], [0, 2], length=12)
    assert agreed([first, second]).tolist() == [[[1, 0]], [[3, 0]], [[255, 255]]]
    assert agreed([first]).tolist() == first.tolist()


def test_choices_that_were_made_first_under_the_same_weights_stay() -> None:
    first, second = keys_of([0], [1], [], length=3), keys_of([0], [0], [0], [3, 9], length=10)
    assert kept(first, second, same_weights=True).tolist() == [[[1, 0]], [[2, 0]], [[1, 0]], [[8, 2]]]
    assert kept(first, second, same_weights=False) is second
    assert kept(None, second, same_weights=True) is second


def test_rows_of_a_batch_have_keys_of_one_width_and_come_back_from_json() -> None:
    def sample(name: str, prompt: list[int], ids: list[int], keys: Any) -> Sample:
        n = len(ids)
        return Sample(name, name, "row", prompt, ids, [1] * n, [-1.0] * n, [0] * n, "stop", extra={"chosen_keys": keys})

    short = sample("a", [1, 2], [3], keys_of([0], [0, 1], [], length=2))
    long = sample("b", [1] * 8, [2, 3, 4], keys_of(*[[0]] * 10, [], length=10))
    batch = Batch([short, long, Sample("c", "c", "row", [1], [2], [1], [-1.0], [0], "stop")])
    assert batch.extra["chosen_keys"].prompts.values.shape == (2 + 8 + 1, 1, 2)
    assert batch.extra["chosen_keys"].responses.values.tolist() == [[[255, 255]], [[1, 0]], [[1, 0]], [[255, 255]]]
    for one in (short, long):
        back = read_record(Sample, json.loads(json.dumps(one.to_dict())))
        np.testing.assert_array_equal(back.extra["chosen_keys"], one.extra["chosen_keys"])
    np.testing.assert_array_equal(from_json(to_json(keys_of([1], length=30))), keys_of([1], length=30))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.engine=sglang",), r"policy\.indexer\.replay is 'engine'.*which rollout\.engine = 'sglang' cannot say"),
        (
            ("rollout.engine=replay", "rollout.replay_from=samples.jsonl"),
            r"policy\.indexer\.replay is 'engine', which asks engines for the keys that indexers chose.*it must be 'none'",
        ),
    ],
)
def test_an_engine_that_does_not_say_what_its_indexers_chose_is_refused(overrides: tuple[str, ...], message: str) -> None:
    assert indexer_of(config(REPLAY, "rollout.engine=embedded").policy).replay == "engine"
    with pytest.raises(ConfigError, match=message):
        config(REPLAY, *overrides)


def test_a_model_without_indexers_has_nothing_to_replay(tmp_path: Path) -> None:
    build_folder("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.indexer\.replay is 'engine', which is for models that choose keys by"):
        config(REPLAY, "rollout.engine=embedded", f"model.path={tmp_path}")


def test_training_on_given_responses_has_nothing_to_replay() -> None:
    tree = {"model": {"path": "nowhere"}, "data": {"train": {"source": "jsonl", "path": "rows"}}, "objective": {"name": "sft"}}
    with pytest.raises(ConfigError, match=r"policy\.indexer\.replay is 'engine', which only reinforcement learning"):
        parse_supervised_config(tree | {"policy": {"indexer": {"replay": "engine"}}})
