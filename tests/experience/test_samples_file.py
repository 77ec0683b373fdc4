"""samples.jsonl holds what a step made of each sample, token by token, and is still what the replay engine reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.objectives import PolicyObjective
from megarl.experience.samples_file import SamplesFile, pieces
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.replay import ReplayEngine
from megarl.runs.update_metrics import LOG_PROBS, combine


class Letters:
    """Decodes token 1 as `a`, and so on."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


def sample(name: str, response: list[int]) -> Sample:
    ones = [1] * len(response)
    return Sample(f"{name}/0", name, name, [5, 6], response, ones, [-0.5] * len(response), [0] * len(response), "stop")


def batch() -> Batch:
    made = Batch([sample("p", [1, 2, 3]), sample("q", [4])])
    made.columns["advantages"] = torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 0.0]])
    return made


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("error")  # as torch warns of arrays that may not be written to, which Ray gives
def test_a_sample_has_its_rows_values_without_padding(tmp_path) -> None:
    file = SamplesFile(tmp_path / "s.jsonl", 2, None, Letters())
    of_ray = np.array([-0.75])
    of_ray.flags.writeable = False
    file.write(1, batch(), [0.25, 1.0], {1: of_ray})
    first, second = (line["training"] for line in lines(file.path))
    assert first == {"reward": 0.25, "pieces": ["a", "b", "c"], "advantages": [1.0, 1.0, 1.0]}
    assert second == {"reward": 1.0, "pieces": ["d"], "advantages": [-1.0], "log_probs": [-0.75]}


def test_a_batch_that_knows_old_log_probs_gives_those(tmp_path) -> None:
    file, made = SamplesFile(tmp_path / "s.jsonl", 1, None, Letters()), batch()
    made.columns["old_log_probs"] = torch.tensor([[-0.1, -0.2, -0.3], [-9.0, 0.0, 0.0]])
    file.write(1, made, [0.0, 0.0], {0: np.zeros(3)})
    (line,) = lines(file.path)
    assert line["training"]["log_probs"] == pytest.approx([-0.1, -0.2, -0.3])


def test_the_replay_engine_reads_it_back(tmp_path) -> None:
    file = SamplesFile(tmp_path / "s.jsonl", 2, None, Letters())
    file.write(1, batch(), [0.0, 0.0], {})
    engine = ReplayEngine(file.path, initial_version=0)
    ((answer,),) = asyncio.run(engine.generate(EngineRequest([[5, 6]], SamplingParams(max_new_tokens=4), keys=["p"])))
    assert answer.response_ids == [1, 2, 3]


def byte_tokenizer() -> Tokenizer:
    """One token per byte, the hardest case for characters of several bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain text", " Grüße 🙂 漢字", "</script>\n"])
def test_pieces_are_one_per_token_and_make_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    found = pieces(ids, tokenizer)
    assert len(found) == len(ids) == len(text.encode())
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)


def test_the_update_brings_back_the_log_probs_of_the_rows_that_are_shown() -> None:
    from megarl.data.stream import pack
    from megarl.data.supervised import units_of
    from megarl.megatron.step import metrics_on_host

    made = batch()
    made.columns["weights"] = torch.ones(2, 3)
    columns = ["weights", "advantages", "rollout_log_probs"]
    answers = []
    for row in (0, 1):  # a micro-batch each, on ranks of their own
        stream = pack(units_of(made, [row], columns, share_prefix=False))
        output = torch.stack([torch.arange(len(stream.rows)) - 7.0, torch.zeros(len(stream.rows))], dim=-1)
        answers.append(PolicyObjective("clip", shown_rows=1)(output, stream)[1])
    found = combine(metrics_on_host(answers))[LOG_PROBS]
    assert {row: values.tolist() for row, values in found.items()} == {0: [-7.0, -6.0, -5.0]}
    assert isinstance(found[0], np.ndarray)  # pickle reads a rank's tensors with megatron-core, which no driver imports
    assert LOG_PROBS not in PolicyObjective("clip")(output, stream)[1]
