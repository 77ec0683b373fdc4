"""Aggregation on the real training step: a gradient is the same however the step's samples are packed, ordered and shared out.

Formulas and sources: docs/methods.md#aggregation.

Adam with an epsilon of 1 moves each weight by lr·g/(|g| + 1), so weights after one update compare gradients element by
element.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from megarl.algorithms import AGGREGATIONS, LossSettings, token_weights
from megarl.algorithms.catalogue import POLICY_LOSSES
from megarl.config import Config, parse_config
from megarl.config.layout import Layout
from megarl.data.batch import Batch
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.sample import Sample
from megarl.experience.objectives import PolicyObjective
from megarl.experience.token_choices import set_token_columns
from megarl.models.flops import FlopsModel
from tests.world import World

VOCAB = 67
FLOPS = FlopsModel(per_token=30_720, per_logit_row=64 * VOCAB, per_pair=256)
LOSSES = ("clip", "dual_clip", "gspo", "gmpo", "sapo", "cispo", "reinforce", "kl_penalty", "clip_cov", "kl_cov")
Variant = tuple[int, int | None, bool]
"""Tokens per micro-batch, seed of the samples' order (None: as they are), whether a group's prompt is computed once."""
WHOLE: Variant = (10_000, None, True)
VARIANTS: list[Variant] = [WHOLE, (10_000, 3, False), (60, None, True), (60, 1, True), (33, 2, False), (24, 4, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "llama"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


def samples() -> list[Sample]:
    """Five uneven groups, one response without a sampled token, masks with holes (tool tokens)."""
    draw = random.Random(5)
    found = []
    for group, size in enumerate((4, 3, 1, 5, 2)):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 9))]
        for number in range(size):
            length = draw.randrange(1, 13)
            mask = [int(draw.random() < 0.8) for _ in range(length)] if (group, number) != (0, 0) else [0] * length
            log_probs = [-draw.random() * 4 for _ in range(length)]
            ids = [draw.randrange(VOCAB) for _ in range(length)]
            found.append(
                Sample(f"{group}/{number}", f"{group}", f"{group}", prompt, ids, mask, log_probs, [0] * length, "stop")
            )
    return found


def run_config(loss: str) -> Config:
    """A run with `loss` on the top half of entropies, and a term for right responses."""
    arguments = {"clip_cov": {"share": 0.2, "low": 0.01}, "kl_cov": {"share": 0.2}}.get(loss, {})
    algorithm: dict[str, Any] = {"policy_loss": loss, "policy_loss_args": arguments}
    algorithm |= {"entropy": {"top_share": 0.5}, "positive_nll": {"coef": 0.1}}
    source = {"source": "reasoning_gym", "name": "chain_sum"}
    tree = {"model": {"path": "x"}, "data": {"train": source}, "rewards": [{"name": "exact_number"}], "algorithm": algorithm}
    return parse_config(tree)


def weights_after(rank: int, world_size: int, path: str, layout: Layout, cases: list[tuple[str, str, Variant]]) -> list[Any]:
    """For each case (loss, aggregation, variant) the Hugging Face weights after one update, on the leading rank."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    answers = []
    for loss, aggregation, (max_tokens, order_seed, share_prefix) in cases:
        role = RankModel(ModelOptions(path, layout), OptimizerOptions(lr=0.1, eps=1.0, clip_grad=0.0))
        ordered = samples()
        if order_seed is not None:
            random.Random(order_seed).shuffle(ordered)
        batch = Batch(ordered)
        advantages = {s.sample_id: random.Random(s.sample_id).gauss(0, 1) for s in ordered}
        batch.columns["advantages"] = torch.tensor([advantages[s.sample_id] for s in ordered])[:, None] * batch.mask
        batch.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
        batch.columns["reference_log_probs"] = batch.columns["rollout_log_probs"] * 0.9
        batch.columns["weights"] = token_weights(batch.mask, aggregation, norm_length=7)
        batch.columns["old_entropy"] = -batch.columns["rollout_log_probs"]
        rewards = [advantages[s.sample_id] for s in ordered]
        set_token_columns(batch, range(len(batch)), run_config(loss), rewards=rewards, update_number=0)
        further = POLICY_LOSSES[loss].columns
        columns = ["advantages", "old_log_probs", "reference_log_probs", "rollout_log_probs", "weights"]
        columns += ["top_entropy", "nll_weights", *further]
        units = batch.unit_rows(range(len(batch)), share_prefix=share_prefix)
        plan = plan_micro_batches(units.sizes, ranks=layout.dp, max_tokens=max_tokens, flops=FLOPS)
        mine = [*batch.shares(units, plan, columns)[layout.coords(rank).dp]]
        settings, parts = LossSettings(kl_coef=0.1), {"kl_coef": 0.05, "entropy_coef": 0.01, "nll_coef": 0.1}
        objective = PolicyObjective(loss, settings, also_given=further, **parts)
        role.update(mine, objective)
        answers.append({name: tensor.clone() for name, tensor in role.export()})
    return answers


def merged(answers: list[list[Any]], case: int) -> dict[str, torch.Tensor]:
    return {name: tensor for answer in answers for name, tensor in answer[case].items()}


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=["one", "dp2", "tp2+sp", "pp2"]
)
def test_a_gradient_does_not_depend_on_packing_order_or_ranks(world: World, folder: str, layout: Layout) -> None:
    cases = [("clip", "seq_mean_token_mean", variant) for variant in VARIANTS]
    reference = merged(world.call(weights_after, folder, Layout(), cases[:1], size=1), 0)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert max(float((reference[name] - before[name]).abs().max()) for name in reference) > 1e-3
    answers = world.call(weights_after, folder, layout, cases, size=layout.world_size)
    for number, case in enumerate(cases):
        for name, tensor in merged(answers, number).items():
            torch.testing.assert_close(
                tensor, reference[name], rtol=0, atol=2e-6, msg=lambda m, n=name, c=case: f"{n} {c}: {m}"
            )


def test_it_holds_for_every_loss_and_aggregation(world: World, folder: str) -> None:
    kinds = [(loss, "token_mean") for loss in LOSSES] + [("clip", mode) for mode in AGGREGATIONS]
    whole = world.call(weights_after, folder, Layout(), [(*kind, WHOLE) for kind in kinds], size=1)
    split = world.call(weights_after, folder, Layout(dp=2), [(*kind, VARIANTS[-1]) for kind in kinds], size=2)
    for number, kind in enumerate(kinds):
        reference = merged(whole, number)
        for name, tensor in merged(split, number).items():
            torch.testing.assert_close(
                tensor, reference[name], rtol=0, atol=2e-6, msg=lambda m, n=name, k=kind: f"{n} {k}: {m}"
            )


def test_the_comparison_would_see_another_denominator_and_other_tokens(world: World, folder: str) -> None:
    """Dividing by other numbers of tokens, or leaving out some, moves weights by more than ten times the tolerance above."""
    cases = [("clip", "token_mean", WHOLE), ("clip", "seq_mean_token_mean", WHOLE), ("clip_cov", "token_mean", WHOLE)]
    answers = world.call(weights_after, folder, Layout(), cases, size=1)
    first = merged(answers, 0)
    for other in (1, 2):
        second = merged(answers, other)
        assert max(float((first[name] - second[name]).abs().max()) for name in first) > 2e-5
