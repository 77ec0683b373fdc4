"""Counts of drafts: they travel with responses, and through files of earlier versions, too."""

from __future__ import annotations

import json

from megarl.data.prefills import PrefillCounts
from megarl.data.sample import Sample, read_record
from megarl.options.prediction.column import DraftCounts
from megarl.rollout.engines.protocol import Generation, behind
from megarl.rollout.scheduling.partial_groups import PartialGroup

COUNTS = {"passes": 1, "drafted": 2, "accepted": 1}


def test_a_turn_that_an_earlier_version_wrote_is_read() -> None:
    plain = {"response_ids": [4], "log_probs": [-0.5], "weight_versions": [3], "finish_reason": "stop"}
    counts = {"drafts": COUNTS, "prefill": {"asked": 7, "cached": 3}}
    found = PartialGroup.of_dict({"name": plain | counts | {"routes": None}}).turn("name")
    assert found == Generation([4], [-0.5], [3], "stop", prefill=PrefillCounts(7, 3))
    assert found.extra == {"drafts": DraftCounts(1, 2, 1)}


def test_counts_of_a_turn_survive_a_file_also_where_it_was_cut() -> None:
    group = PartialGroup()
    group.keep("name", Generation([4], [-0.5], [3], "abort", {"drafts": DraftCounts(1, 2, 1)}))
    read = PartialGroup.of_dict(json.loads(json.dumps(group.to_dict()))).turn("name")
    assert read is not None
    assert read.extra == {"drafts": DraftCounts(1, 2, 1)}


def test_a_response_in_two_pieces_has_the_counts_of_both() -> None:
    pieces = [Generation([4], [-0.5], [version], "length", {"drafts": DraftCounts(1, 2, 1)}) for version in (3, 4)]
    assert behind(*pieces).extra == {"drafts": DraftCounts(2, 4, 2)}
    assert behind(pieces[0], Generation([5], [-0.5], [3], "stop")).extra == {"drafts": DraftCounts(1, 2, 1)}


def test_a_sample_has_its_counts_in_json_under_their_name() -> None:
    sample = Sample("s", "g", "r", [1], [3], [1], [0.0], [0], "stop", extra={"drafts": DraftCounts(1, 2, 1)})
    record = json.loads(json.dumps(sample.to_dict()))
    assert record["drafts"] == COUNTS
    assert "extra" not in record
    assert read_record(Sample, record).extra == sample.extra
