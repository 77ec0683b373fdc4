"""What the driver hands to the ranks of a role: one value for each replica, planned once for the passes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.sample import Sample
from megarl.models.flops import FlopsModel
from megarl.runs.training_side import POLICY, REFERENCE
from megarl.workers import roles as roles_module
from megarl.workers.role_specs import role_specs
from megarl.workers.roles import Roles

MODEL = Path(__file__).resolve().parents[2] / "examples/models/llama-3.1-70b"


class RecordingGroup:
    """Ranks that keep what they are given, and answer nothing."""

    name = POLICY
    platform = "cpu"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stored: list[Any] = []

    def per_rank(self, replicas: Sequence[Any]) -> list[Any]:
        self.stored.extend(replicas)
        return [replicas[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]

    def submit(self, method: Any, per_rank: Sequence[Any]) -> list[Any]:
        return list(per_rank)

    def wait(self, submitted: Sequence[Any], **_: Any) -> list[Any]:
        return []


def roles_and_group() -> tuple[Roles, Any]:
    config = parse_config(
        {
            "model": {"path": str(MODEL)},
            "policy": {"layout": {"tp": 2, "dp": 2}, "max_tokens_per_micro_batch": 16},
            "algorithm": {"name": "grpo"},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}, "max_prompt_tokens": 8},
            "rollout": {"engines": 1, "prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 8},
            "rewards": [{"name": "exact_number"}],
        }
    )
    group: Any = RecordingGroup(config.policy.layout)
    return Roles(config, role_specs(config), {POLICY: group}, "local", FlopsModel(1, 1, 1), sampling=None, updates=1), group


def batch_of(count: int, tokens: int) -> Batch:
    ids = [[row * 10 + place for place in range(tokens)] for row in range(count)]
    return Batch([Sample(str(r), "g", "g", [1, 2], own, [1] * tokens, [], [], "stop") for r, own in enumerate(ids)])


def test_a_replica_is_one_value_whatever_the_number_of_its_sequences() -> None:
    for count in (4, 40):
        roles, group = roles_and_group()
        with mock.patch.object(Batch, "gather"):
            roles.forward(POLICY, batch_of(count, 5), ["log_probs", "entropy"])
        assert len(group.stored) == 2
        rows = [row for [share] in group.stored for row in share.rows.tolist()]
        assert sorted(rows) == list(range(count))


class AnsweringGroup(RecordingGroup):
    """Ranks that answer each token with the number of its row, then twice that number and three times."""

    def wait(self, submitted: Sequence[Any], **_: Any) -> list[Any]:
        shares = [share for rank in (0, 1) for share in submitted[rank * self.layout.tp][1]]
        rows, lengths = (np.concatenate([getattr(share, name) for share in shares]) for name in ("rows", "lengths"))
        of_token = np.repeat(rows, lengths).astype(np.float32)
        return [None, Answers(rows, lengths, np.stack([of_token, 2 * of_token, 3 * of_token]))]


def test_each_role_answers_for_its_own_rows_and_a_replica_without_any_gets_one_that_nobody_reads() -> None:
    roles, group = roles_and_group()
    group = roles.groups[POLICY] = AnsweringGroup(group.layout)  # type: ignore[index]
    roles.specs = {**roles.specs, "teacher": roles.specs[POLICY]}
    batch = batch_of(4, 5)
    batch.columns["ids"] = torch.arange(4 * 5 * 2).view(4, 5, 2).float()
    given = {POLICY: [0, 1, 3], "teacher": [2]}
    roles.forward(given, batch, ["log_probs"], columns=["ids"], wide={"both": 2})
    asked = [sorted(row for [share] in group.stored[at : at + 2] for row in share.rows.tolist()) for at in (0, 2)]
    assert asked == [[0, 1, 3], [0, 2]]
    for [share] in group.stored:
        assert torch.equal(torch.tensor(share.columns["ids"]), torch.cat([batch.columns["ids"][row] for row in share.rows]))
    rows = torch.arange(4.0)[:, None].expand(4, 5)
    assert torch.equal(batch.columns["log_probs"], rows)
    assert torch.equal(batch.columns["both"], torch.stack([2 * rows, 3 * rows], dim=-1))
    with pytest.raises(ValueError, match="was answered with 3 columns; there must be 4"):
        roles.forward(given, batch, ["log_probs"], wide={"both": 3})


def test_examples_that_are_mixed_in_follow_in_micro_batches_and_with_columns_of_their_own() -> None:
    roles, group = roles_and_group()
    batch, examples = batch_of(6, 5), batch_of(3, 7)
    batch.columns["weights"], examples.columns["ptx_weights"] = torch.rand(6, 5), torch.rand(3, 7)
    _, submitted, _ = roles.start_update(POLICY, batch, range(6), ["weights"], None, mixed_in=(examples, ["ptx_weights"]))
    for role, shares, _, _, _ in submitted:
        assert role == POLICY
        micro_batches = [micro_batch for share in shares for micro_batch in share]
        columns = [
            {name for unit in micro_batch for r in unit.responses for name in r.columns} for micro_batch in micro_batches
        ]
        assert columns == sorted(columns, key=lambda names: "ptx_weights" in names)
        assert all(len(names) == 1 for names in columns)
    for name, source, of_batch in (("weights", batch, 0), ("ptx_weights", examples, 1)):
        found = {
            response.index: response.columns[name]
            for shares in group.stored
            for micro_batch in shares[of_batch]
            for unit in micro_batch
            for response in unit.responses
        }
        assert sorted(found) == list(range(len(source)))
        assert all(torch.equal(found[row], source.columns[name][row]) for row in found)


def test_the_passes_of_a_step_are_planned_once() -> None:
    with mock.patch.object(roles_module, "plan_micro_batches", mock.Mock(side_effect=plan_micro_batches)) as planner:
        roles, _ = roles_and_group()
        batch = batch_of(6, 5)
        with mock.patch.object(Batch, "gather"):
            roles.forward(POLICY, batch, [])
            roles.forward(REFERENCE, batch, [])
        roles.start_update(POLICY, batch, range(6), [], None)
        assert planner.call_count == 1
        roles.start_update(POLICY, batch, range(4), [], None)
        assert planner.call_count == 2
