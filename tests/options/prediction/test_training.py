"""A layer for multi-token prediction over several updates: what it learns, what it leaves alone, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.hf_folder import HFFolder
from tests.families.family import VOCAB_SIZE
from tests.megatron.moments import assert_equal, everything, merged, role_in, update
from tests.megatron.saving import load_role, save_role
from tests.predicting import build_predicting
from tests.themes.parallel.worlds import MODES, micro_batches, objective
from tests.world import World

COPIES = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")


def predicting(layout: Layout, folder: Path, targets: str | None = "soft", **more: Any) -> Any:
    from megarl.megatron.options import PredictionOptions

    prediction = PredictionOptions(1.0, targets) if targets is not None else None  # type: ignore[arg-type]
    return role_in(layout, folder, prediction=prediction, **more)


def is_own(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.4."))


def train(rank: int, world_size: int, layout: Layout, folder: Path, targets: str | None, updates: int, more: dict) -> dict:
    role = predicting(layout, folder, targets, **more)
    mine = micro_batches(MODES["packed"], layout.dp)[layout.coords(rank).dp]
    metrics = [role.update(mine, objective) for _ in range(updates)]
    return {"metrics": metrics, "tensors": everything(role)}


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe-grouped"])
def test_the_decoder_is_trained_bit_for_bit_as_without_the_layer_which_learns(
    world: World, tmp_path: Path, family: str
) -> None:
    build_predicting(family, tmp_path / "model")
    [plain] = world.call(train, Layout(), tmp_path / "model", None, 3, {}, size=1)
    for targets in ("soft", "hard"):
        [found] = world.call(train, Layout(), tmp_path / "model", targets, 6, {}, size=1)
        losses = [metrics["mtp_loss"] for metrics in found["metrics"]]
        assert losses[-1] < losses[0]
        assert [metrics["grad_norm"] for metrics in found["metrics"][:3]] == [m["grad_norm"] for m in plain["metrics"]]
        [found] = world.call(train, Layout(), tmp_path / "model", targets, 3, {}, size=1)
        of_decoder = {key: tensor for key, tensor in found["tensors"].items() if not is_own(key.split(" ")[1])}
        assert_equal(of_decoder, plain["tensors"])
        own = found["tensors"].keys() - plain["tensors"].keys()
        before = HFFolder(tmp_path / "model")
        moved = {key for key in own if key.startswith("weight ") and not key.endswith("e_score_correction_bias")}
        moved = {key for key in moved if torch.equal(found["tensors"][key], before.get_slice(key.split(" ")[1])[...])}
        assert len(moved) < 0.1 * len(own), moved


def save(rank: int, world_size: int, layout: Layout, folder: Path, checkpoint: str) -> dict[str, Any]:
    role = predicting(layout, folder)
    for _ in range(2):
        update(role, rank)
    save_role(role, checkpoint)
    tensors = everything(role)
    update(role, rank)
    return {"tensors": tensors, "after": {name: tensor.clone() for name, tensor in role.export()}}


def load(rank: int, world_size: int, layout: Layout, folder: Path, checkpoint: str) -> dict[str, Any]:

    role = predicting(layout, folder)
    load_role(role, checkpoint)
    tensors = everything(role)
    update(role, rank)
    return {"tensors": tensors, "after": {name: tensor.clone() for name, tensor in role.export()}}


@pytest.mark.parametrize(
    ("family", "source", "others"),
    [
        ("deepseek_v3", Layout(pp=2, dp=2, ep=2), [Layout(tp=2, etp=2, sequence_parallel=True)]),
        ("qwen3_5", Layout(tp=2), [Layout(pp=2)]),
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    world: World, tmp_path: Path, family: str, source: Layout, others: list[Layout]
) -> None:
    folder, checkpoint = tmp_path / "model", str(tmp_path / "checkpoint")
    build_predicting(family, folder)
    saved = world.call(save, source, folder, checkpoint, size=source.world_size)
    for layout in (source, *others):
        loaded = world.call(load, layout, folder, checkpoint, size=layout.world_size)
        assert any("exp_avg mtp." in name or "exp_avg model.layers.4." in name for name in merged(loaded, "tensors"))
        assert_equal(merged(loaded, "tensors"), merged(saved, "tensors"))
        if layout == source:
            assert_equal(merged(loaded, "after"), merged(saved, "after"))
        for name, tensor in merged(loaded, "after").items():
            torch.testing.assert_close(tensor, merged(saved, "after")[name], rtol=1e-5, atol=1e-6)


def follow(rank: int, world_size: int, layout: Layout, folder: Path, share: float) -> list[dict[str, Any]]:
    """The decoder's weights of a policy before and after updates, and those of a reference that then follows it."""
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    policy = predicting(layout, folder)
    reference = RankModel(ModelOptions(str(folder), layout, trainable=False))
    found = [{name: tensor.clone() for name, tensor in policy.export(prediction=False)}]
    update(policy, rank)
    update(policy, rank)
    reference.copy_weights_from(policy, share)
    return [*found, *({n: t.clone() for n, t in role.export(prediction=False)} for role in (policy, reference))]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_reference_without_the_layer_follows_a_policy_that_has_it(world: World, tmp_path: Path, share: float) -> None:
    build_predicting("deepseek_v3", tmp_path / "model")
    answers = world.call(follow, Layout(pp=2), tmp_path / "model", share, size=2)
    for before, policy, reference in answers:
        assert reference.keys() == policy.keys() == before.keys()
        for name, tensor in reference.items():
            wanted = share * policy[name].double() + (1 - share) * before[name].double()
            torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-6)
        assert any(not torch.equal(policy[name], before[name]) for name in policy)


def with_infinite_weight(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Any], bool]:
    role = predicting(Layout(), folder)
    weights = dict(role.export())
    with torch.no_grad():
        weights["mtp.fc.weight"][0, 0] = torch.inf
    before = {name: tensor.clone() for name, tensor in weights.items()}
    metrics = role.update(micro_batches(MODES["packed"], 1)[0], objective)
    return metrics, all(torch.equal(before[name], tensor) for name, tensor in role.export())


def test_an_update_whose_prediction_loss_is_not_finite_is_not_applied(world: World, tmp_path: Path) -> None:
    build_predicting("qwen3_5", tmp_path / "model")
    [(metrics, unchanged)] = world.call(with_infinite_weight, tmp_path / "model", size=1)
    assert (metrics["skipped"], metrics["non_finite"], unchanged) == (1.0, 1.0, True)


def write(rank: int, world_size: int, layout: Layout, folder: Path, target: str) -> dict[str, Any]:
    from megarl.megatron.hf_export import write_role

    role = predicting(layout, folder)
    update(role, rank)
    write_role(role, target)
    return {"tensors": {name: tensor.clone() for name, tensor in role.export()}}


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe-grouped", "qwen3_next"])
def test_an_export_holds_the_trained_layer_and_what_it_shares_with_the_decoder(
    world: World, tmp_path: Path, family: str
) -> None:
    build_predicting(family, tmp_path / "model")
    layout = Layout(pp=2, dp=2, ep=2)
    expected = merged(world.call(write, layout, tmp_path / "model", str(tmp_path / "out"), size=4), "tensors")
    before, written = HFFolder(tmp_path / "model"), HFFolder(tmp_path / "out")
    assert {*written.names} == {*before.names}
    assert written.config == before.config
    for name, tensor in expected.items():
        assert torch.equal(written.get_slice(name)[...], tensor), name
    assert any(is_own(name) and not torch.equal(before.get_slice(name)[...], expected[name]) for name in expected)
    tied = before.config["tie_word_embeddings"]
    originals = ("model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight")
    for copy, original in zip(COPIES, originals, strict=True):
        if copy in before.names:
            assert torch.equal(written.get_slice(copy)[...], expected[original])
            assert not torch.equal(before.get_slice(copy)[...], expected[original])


def test_the_layer_can_be_trained_alone_and_can_be_frozen(world: World, tmp_path: Path) -> None:
    build_predicting("qwen3_5", tmp_path / "model")
    before = HFFolder(tmp_path / "model")
    for freeze, trained in ((("model.*", "lm_head.*"), True), (("mtp.*",), False)):
        for recompute in ("none", "full"):
            more = {"freeze": freeze, "recompute": recompute}
            [found] = world.call(train, Layout(), tmp_path / "model", "soft", 2, more, size=1)
            weights = {key.removeprefix("weight "): t for key, t in found["tensors"].items() if key.startswith("weight ")}
            moved = {name for name, tensor in weights.items() if not torch.equal(tensor, before.get_slice(name)[...])}
            assert moved == {name for name in weights if is_own(name) == trained}, (freeze, recompute)


def loss_over_slices(rank: int, world_size: int) -> list[Any]:
    """Loss, hits and the summed gradient of rows, on ranks that share a padded vocabulary."""
    from megarl.megatron.heads import VocabularySlice
    from megarl.options.prediction.loss import PredictionLoss

    weight, drafted, policy, targets = loss_inputs()
    padded = torch.cat([weight, torch.full((-VOCAB_SIZE % world_size, weight.shape[1]), 9.0)])
    mine = padded.chunk(world_size)[rank]
    found = []
    for of_policy in (policy, None):
        rows = drafted.clone().requires_grad_()
        group = torch.distributed.group.WORLD
        assert group is not None
        vocabulary = VocabularySlice(mine, rank * len(mine), VOCAB_SIZE, 0.7, group)
        losses, hits = PredictionLoss.apply(rows, of_policy, targets, vocabulary, 3)
        (losses * torch.arange(1.0, 1 + len(losses))).sum().backward()
        gradient = rows.grad
        assert gradient is not None
        torch.distributed.all_reduce(gradient)
        found.append((losses.detach(), hits, gradient))
    return found


def loss_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCAB_SIZE, 8, generator=generator)
    drafted, policy = (torch.randn(7, 8, generator=generator) for _ in range(2))
    targets = torch.randint(0, VOCAB_SIZE, (7,), generator=generator)
    targets[:3] = (drafted @ weight.T).argmax(-1)[:3]
    weight[targets[1] + 1 if targets[1] < 130 else 0] = weight[targets[1]]  # of equal ones the first counts
    return weight, drafted, policy, targets


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_is_the_cross_entropy_over_the_whole_vocabulary(world: World, ranks: int) -> None:
    weight, drafted, policy, targets = (t.double() if t.is_floating_point() else t for t in loss_inputs())
    for kind, (losses, hits, gradient) in enumerate(world.call(loss_over_slices, size=ranks)[-1]):
        rows = drafted.clone().requires_grad_()
        own = (rows @ weight.T / 0.7).log_softmax(-1)
        wanted = (policy @ weight.T / 0.7).softmax(-1) if not kind else torch.eye(VOCAB_SIZE, dtype=torch.double)[targets]
        expected = -(wanted * own).sum(-1)
        (expected * torch.arange(1.0, 8.0)).sum().backward()
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), rows.grad, rtol=1e-5, atol=1e-5)
        assert hits.tolist() == [True, targets[1] != 130, True, *(own.argmax(-1) == targets)[3:].tolist()]
