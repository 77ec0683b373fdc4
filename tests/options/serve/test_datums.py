"""Data become rows whose every position is scored, and what a loss does not read is one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.stream import SCORED_IDS
from megarl.options.serve.datums import DatumLimits, lay, parameters_of
from megarl.options.serve.losses import FILLS
from megarl.options.serve.values import Datum, Loss, Picture, RequestError

LIMITS = DatumLimits(vocabulary=50, max_tokens=8)


def datum(tokens: list[int], targets: Any, **inputs: Any) -> Datum:
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return Datum(np.asarray(tokens, np.int32), {"target_tokens": np.asarray(targets, np.int64), **arrays})


def test_targets_that_are_the_next_tokens_are_the_response() -> None:
    data = [datum([3, 4, 5], [4, 5, 6], weights=[0, 1, 2]), datum([7], [8], weights=[3])]
    laid = lay(data, "cross_entropy", LIMITS, replicas=1)
    assert [sample.prompt_ids for sample in laid.batch.samples] == [[3], [7]]
    assert [[*sample.response_ids] for sample in laid.batch.samples] == [[4, 5, 6], [8]]
    assert laid.batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert laid.batch.columns["weights"].tolist() == [[0, 1, 2], [3, 0, 0]]
    assert (laid.columns, laid.targets, laid.rows) == (("weights",), 0, 2)


def test_other_targets_are_asked_for_by_their_ids() -> None:
    data = [datum([3, 4, 5], [4, 9, 6], weights=[0, 1, 2]), datum([7, 8], [[1, 2], [3, 4]], weights=[[0.5, 1], [1.5, 2]])]
    laid = lay(data, "cross_entropy", LIMITS, replicas=1)
    assert [[*sample.response_ids] for sample in laid.batch.samples] == [[4, 5, 6], [8, 4]]
    assert laid.targets == 2
    assert laid.batch.columns[SCORED_IDS].tolist() == [[[4, 0], [9, 0], [6, 0]], [[1, 2], [3, 4], [0, 0]]]
    assert laid.batch.columns["weights"].tolist() == [[[0, 0], [1, 0], [2, 0]], [[0.5, 1], [1.5, 2], [0, 0]]]
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert laid.answer(0, values).tolist() == [0, 2, 4]
    assert laid.answer(1, values[:2]).tolist() == [[0, 1], [2, 3]]


def test_every_replica_has_a_row() -> None:
    laid = lay([datum([3], [4], weights=[1])], "cross_entropy", LIMITS, replicas=3)
    assert (len(laid.batch), laid.rows) == (3, 1)
    assert torch.equal(laid.batch.columns[FILLS], torch.tensor([[0.0], [1.0], [1.0]]))
    assert FILLS in laid.columns


SAMPLED = {"logprobs": [0, 0], "advantages": [1, 1]}
BAD: list[tuple[str, list[Datum], str]] = [
    ("ppo", [], "data is empty"),
    ("stable_reinforce", [datum([1], [2])], "whose formula is not published; it must be one of cross_entropy"),
    ("sft", [datum([1], [2])], "loss_fn is 'sft'; it must be one of"),
    ("cross_entropy", [datum([1, 2], [2, 3, 4], weights=[1, 1, 1])], r"target_tokens \[3\] for 2 tokens; it must be \[2\]"),
    ("cross_entropy", [datum([1, 2], [2], weights=[1])], r"target_tokens \[1\] for 2 tokens"),
    ("cross_entropy", [datum([1, 2], [2, 3], weights=[1])], r"weights \[1\] for 2 tokens"),
    ("cross_entropy", [datum([1, 2], [[2], [3]], weights=[1, 1])], r"weights \[2\] for 2 tokens; it must be \[2, 1\]"),
    ("cross_entropy", [datum([1, 2], [2, 3])], r"has no loss_fn_inputs\['weights'\], which cross_entropy reads"),
    ("cross_entropy", [datum([1, 2], [2, 3], weights=[1, 1], mask=[1, 1])], "'mask'.*which cross_entropy does not read"),
    ("cross_entropy", [datum([1, 50], [2, 3], weights=[1, 1])], "datum 0 has tokens out of range; ids must be 0 to 49"),
    ("cross_entropy", [datum([1, 2], [2, -1], weights=[1, 1])], "datum 0 has target_tokens out of range"),
    ("cross_entropy", [datum([], [], weights=[])], "has 0 tokens; it must have 1 to 8"),
    ("cross_entropy", [datum([1] * 9, [1] * 9, weights=[1] * 9)], "has 9 tokens; it must have 1 to 8"),
    ("cross_entropy", [datum([1], [2], weights=[1]), datum([1], [2], weights=[np.nan])], "datum 1 has weights that are not"),
    ("ppo", [datum([1, 2], [2, 3], logprobs=[0, 0], advantages=[np.nan, 1])], "datum 0 has advantages that are not finite"),
    ("ppo", [datum([1, 2], [[2], [3]], **SAMPLED)], "several target_tokens per position, which cross_entropy alone takes"),
    ("gspo", [datum([1, 2], [2, 3], **SAMPLED)], "no loss_fn_inputs.'sequence_ratio_mask'."),
    ("ppo", [datum([1, 2], [2, 3], **SAMPLED, clip_low_threshold=[1, 1]), datum([1, 2], [2, 3], **SAMPLED)], "datum 1 has no"),
    ("ppo", [datum([1, 2], [2, 3], **SAMPLED), datum([1, 2], [2, 3], **SAMPLED, clip_low_threshold=[1, 1])], "datum 0 has not"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "data", "sentence"), BAD, ids=[sentence[:40] for _, _, sentence in BAD])
def test_bad_data_are_one_sentence(loss: str, data: list[Datum], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        lay(data, loss, LIMITS, replicas=1)


def test_pictures_are_refused_by_a_model_that_sees_none() -> None:
    seen = Datum(np.zeros(1, np.int32), {"target_tokens": np.zeros(1, np.int64), "weights": np.zeros(1, np.float32)},
                 pictures=(Picture(0, 1, "png", b""),))  # fmt: skip
    with pytest.raises(RequestError, match="datum 0 has a picture, which this server's model does not see; its chunks must"):
        lay([seen], "cross_entropy", LIMITS, replicas=1)


def test_parameters_have_defaults_and_bounds() -> None:
    assert parameters_of(Loss("ppo")) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert parameters_of(Loss("dro", {"beta": 2})) == {"beta": 2.0}
    for name, given, sentence in (
        ("ppo", {"beta": 1.0}, "loss_fn_config has 'beta', which ppo does not have; it must be one of clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "it must be left out"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta is 'much'; it must be a number"),
        ("dro", {"beta": float("nan")}, "it must be a number"),
        ("ppo", {"clip_low_threshold": 1.3}, "which is above clip_high_threshold"),
    ):
        with pytest.raises(RequestError, match=sentence):
            parameters_of(Loss(name, given))  # type: ignore[arg-type]
