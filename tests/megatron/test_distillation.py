"""A teacher's likeliest tokens and a divergence to it, on real ranks: ids, log-probs and every gradient element are those of a
dense computation over the whole vocabulary with Hugging Face's models, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import SCORED_IDS, MicroBatch, Response, TopK, Unit
from megarl.experience.objectives import PolicyObjective
from megarl.options.distillation.formulas import DistillationTerm
from megarl.options.distillation.loss import DistillationLoss
from tests.megatron.test_context_parallel import check, gradients
from tests.world import World

VOCAB, TEACHERS_VOCAB, K = 131, 140, 9
"""The teacher's output layer has nine rows more than the policy's, whose ids the policy does not have."""
TEMPERATURE, COEF = 0.7, 0.6
LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "tp4+sp": Layout(tp=4, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
    "tp2·dp2": Layout(tp=2, dp=2),
}
TERMS = {
    "reverse_kl": DistillationTerm(COEF, "reverse_kl"),
    "forward_kl": DistillationTerm(COEF, "forward_kl"),
    "jsd": DistillationTerm(COEF, "jsd", 0.3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a teacher with other weights and a padded vocabulary."""
    found = {}
    for seed, (name, vocab) in enumerate({"policy": VOCAB, "teacher": TEACHERS_VOCAB}.items()):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(found[name])
    return found


def units() -> list[Unit]:
    """Four prompts with two responses each, their masks with holes; every second token is stale: it was less likely then."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number in range(4):
        responses = []
        for index in (2 * number, 2 * number + 1):
            length = 3 + index
            mask = torch.arange(length) % 3 != 1
            names = ("weights", "advantages", "rollout_log_probs", "old_log_probs")
            columns = {name: torch.rand(length, generator=generator) - 0.5 for name in names}
            columns |= {name: columns[name] - 3 for name in ("rollout_log_probs", "old_log_probs")}
            tokens = torch.randint(0, VOCAB, (length,), generator=generator)
            responses.append(Response(index, tokens, mask, columns))
        found.append(Unit(torch.randint(0, VOCAB, (2 + 3 * number,), generator=generator), responses))
    return found


def objective(term: DistillationTerm) -> PolicyObjective:
    return PolicyObjective("clip", terms=(DistillationLoss(term),))


def run(rank: int, world_size: int, folders: dict[str, Path], layout: Layout) -> dict[str, Any]:
    """What the teacher answers; its log-probs of the policy's likeliest tokens; per term metrics and gradients."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)

    def options(name: str, *, trainable: bool) -> ModelOptions:
        return ModelOptions(str(folders[name]), layout, temperature=TEMPERATURE, logit_chunk_tokens=5, trainable=trainable)

    def mine(columns: dict[str, dict[int, Tensor]]) -> list[MicroBatch]:
        share = units()[layout.coords(rank).dp :: layout.dp]
        for unit in share:
            for response in unit.responses:
                response.columns |= {name: of_rows[response.index] for name, of_rows in columns.items()}
        return [share[:1], share[1:]]

    def everywhere(answers: Any) -> dict[int, Tensor]:
        """Answers of the reporting ranks, on all of them."""
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, dict(answers))
        return {index: row for part in parts for index, row in part.items()}

    teacher, top_k = RankModel(options("teacher", trainable=False)), TopK(K, VOCAB)
    taught = teacher.forward(mine({}), top_k=top_k)
    answered = everywhere(taught)
    ids, of_teacher = ({i: row[:, at : at + K] for i, row in answered.items()} for at in (2, 2 + K))
    policy = RankModel(options("policy", trainable=True), OptimizerOptions(lr=1e-3))
    likeliest = everywhere(policy.forward(mine({}), top_k=top_k))
    asked = teacher.forward(mine({SCORED_IDS: {i: row[:, 2 : 2 + K] for i, row in likeliest.items()}}))
    weights = [parameter.detach().clone() for chunk in policy.chunks for parameter in chunk.parameters()]
    columns = {
        SCORED_IDS: ids,
        "teacher_scored_log_probs": of_teacher,
        "teacher_log_probs": {i: r[:, 0] for i, r in answered.items()},
    }
    terms = {}
    for name, term in TERMS.items():
        for chunk in policy.chunks:
            chunk.train()
        metrics = forward_backward(policy.chunks, policy.options, mine(columns), objective(term))
        terms[name] = {"metrics": metrics if policy.reports else {}, "gradients": gradients(policy)}
        parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
    return {"taught": dict(taught), "asked": dict(asked), "likeliest": likeliest, "terms": terms}


def log_probs(folder: Path, *, gradient: bool) -> tuple[Any, dict[int, Tensor]]:
    """The model, and log-probs of the whole vocabulary before each response token, float64 `[L, V]`, one response at a time."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    with torch.set_grad_enabled(gradient):
        for unit in units():
            for response in unit.responses:
                ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
                logits = model(ids).logits[0, len(unit.prompt_ids) - 1 : -1]
                found[response.index] = (logits.double() / TEMPERATURE).log_softmax(-1)
    return model, found


def dense_loss(student: Tensor, teacher: Tensor, ids: Tensor, response: Response, term: DistillationTerm) -> Tensor:
    """PPO's clipped loss plus the divergence of the distributions over `ids` and everything else, from whole vocabularies."""

    def told_apart(probabilities: Tensor) -> Tensor:
        rest = probabilities.sum(1, keepdim=True) - probabilities.gather(1, ids).sum(1, keepdim=True)
        return torch.cat([probabilities.gather(1, ids), rest], dim=1)

    p, q = told_apart(student.exp()), told_apart(teacher.exp())
    mixture = term.beta * q + (1 - term.beta) * p
    kl = {
        "reverse_kl": (p * (p / q).log()).sum(1),
        "forward_kl": (q * (q / p).log()).sum(1),
        "jsd": term.beta * (q * (q / mixture).log()).sum(1) + (1 - term.beta) * (p * (p / mixture).log()).sum(1),
    }[term.divergence]
    own = student.gather(1, response.token_ids[:, None])[:, 0]
    ratio, advantages = (own - response.columns["old_log_probs"]).exp(), response.columns["advantages"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (response.columns["weights"] * (COEF * kl - surrogate))[response.mask].sum()


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    """The dense computation: gradients of each term by name, and what is told of the vocabulary by response."""
    _, teacher = log_probs(folders["teacher"], gradient=False)
    model, student = log_probs(folders["policy"], gradient=True)
    responses = [response for unit in units() for response in unit.responses]
    ids = {index: row[:, :VOCAB].topk(K).indices for index, row in teacher.items()}
    of_terms = {}
    for name, term in TERMS.items():
        model.zero_grad()
        loss = sum(dense_loss(student[r.index], teacher[r.index], ids[r.index], r, term) for r in responses)
        loss.backward(retain_graph=True)  # type: ignore[union-attr]
        of_terms[name] = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    return {"teacher": teacher, "student": student, "ids": ids, "terms": of_terms}


@pytest.fixture(scope="module")
def own_world() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_the_dense_divergence_and_its_gradient(
    own_world: World, folders: dict[str, Path], expected: dict[str, Any], name: str
) -> None:
    layout = LAYOUTS[name]
    answers = own_world.call(run, folders, layout, size=layout.world_size)
    taught, asked = ({i: row for a in answers for i, row in a[what].items()} for what in ("taught", "asked"))
    scored = 0
    for response in (response for unit in units() for response in unit.responses):
        index, mask = response.index, response.mask
        teacher, ids = expected["teacher"][index][mask], expected["ids"][index][mask]
        found = taught[index][mask].double()
        assert torch.equal(found[:, 2 : 2 + K].long(), ids)
        torch.testing.assert_close(found[:, 2 + K :], teacher.gather(1, ids), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[:, 0], teacher.gather(1, response.token_ids[mask, None])[:, 0], rtol=0, atol=1e-5)
        of_policy = expected["student"][index].detach()[mask].topk(K).indices
        assert torch.equal(answers[0]["likeliest"][index][mask][:, 2 : 2 + K].long(), of_policy)
        torch.testing.assert_close(asked[index][mask][:, 2:].double(), teacher.gather(1, of_policy), rtol=0, atol=1e-5)
        assert not taught[index][~mask].any()
        scored += int(mask.sum())
    for term, wanted in expected["terms"].items():
        whole = {key: grad for answer in answers for key, grad in answer["terms"][term]["gradients"].items()}
        check(whole, wanted, f"{name}, {term}, gradients")
        metrics = [answer["terms"][term]["metrics"] for answer in answers]
        assert sum(one.get("tokens", 0.0) for one in metrics) == scored
        gap = sum(
            float((expected["student"][r.index].detach() - expected["teacher"][r.index][:, :VOCAB])
                  .gather(1, r.token_ids[:, None])[r.mask].sum())
            for unit in units() for r in unit.responses
        )  # fmt: skip
        assert sum(one.get("distillation/reverse_kl", 0.0) for one in metrics) == pytest.approx(gap, rel=1e-5)
