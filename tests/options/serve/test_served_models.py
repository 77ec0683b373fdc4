"""Served models compute what peft does in every layout, steps are torch's AdamW, and models side by side are models alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from megarl.options.serve.losses import FORMS, Given, token_losses
from megarl.options.serve.values import AdamParams, AdapterChoice, Datum
from tests.families import FAMILIES, build_folder, hugging_face
from tests.megatron.routing_reference import RecordedRouters
from tests.options.lora import adapters
from tests.options.serve.served_ranks import begun_alike, data_of, losses_and_gradients, side_by_side, steps_of_adam
from tests.themes.parallel.comparison import TOLERANCE, deviations, joined
from tests.themes.parallel.worlds import layout_for
from tests.world import World

CASES: list[tuple[str, dict[str, float], list[Datum]]] = [
    *((loss, dict[str, float](), data_of(loss)) for loss in FORMS),
    ("cross_entropy", {}, data_of("cross_entropy", wide=3)),
    ("importance_sampling", {}, data_of("importance_sampling", shifts=False)),
    ("cross_entropy", {}, begun_alike(shifts=False)),
    ("cross_entropy", {}, begun_alike(shifts=True)),
    ("dro", {"beta": 0.7}, data_of("dro", lengths=(4,))),
]
"""The last has fewer data than some layouts have replicas."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A family's folder and adapters, and of each case log-probs, loss and gradients by peft in float64."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("served") / family
            build_folder(family, folder)
            made = adapters.with_adapters(hugging_face(family), folder)
            own = {name: tensor.clone() for name, tensor in adapters.tensors(made).items()}
            exact = made.double()
            routers = RecordedRouters(exact.base_model.model, family)
            cases = [by_peft(exact, *case) | {"experts": dense_metrics(routers)} for case in CASES]
            known[family] = {"folder": folder, "adapters": own, "cases": cases}
        return known[family]

    return get


def by_peft(model: Any, loss: str, parameters: dict[str, float], data: list[Datum]) -> dict[str, Any]:
    """One datum after another, without packing."""
    model.zero_grad()
    total, size, log_probs = torch.zeros((), dtype=torch.float64), 0.0, []
    for datum in data:
        logits = model(input_ids=torch.tensor(datum.tokens)[None].long()).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])
        of_targets = logits.log_softmax(-1).gather(1, targets.view(len(targets), -1)).view(targets.shape)
        columns = {name: torch.tensor(values).double() for name, values in datum.inputs.items() if name != "target_tokens"}
        given = Given(columns, dict(FORMS[loss].parameters) | parameters, torch.zeros(len(targets), dtype=torch.long), 1)
        losses = token_losses(loss, of_targets, given)
        total, size = total + losses.sum(), size + float(losses.detach().abs().sum())
        log_probs.append(of_targets.detach())
    total.backward()
    gradients = {name: tensor.clone() for name, tensor in adapters.tensors(model, gradients=True).items()}
    return {"loss": float(total.detach()), "size": size, "log_probs": log_probs, "gradients": gradients}


def dense_metrics(routers: RecordedRouters) -> dict[str, float]:
    """Metrics of experts, as the client describes them, of what was routed since the last call: a layer after the other."""
    of_layers = []
    for passes in routers.layers.values():
        tokens = torch.cat([one.chosen for one in passes]).double().sum(0)
        passes.clear()
        balance = tokens.sum() / len(tokens)
        violation = (tokens - balance) / balance
        of_layers.append([(tokens >= 1).double().mean(), (tokens > balance).double().mean(), violation.max(), violation.min()])
    if not of_layers:
        return {}
    touched, over, most, least = torch.tensor(of_layers, dtype=torch.float64).T
    return {
        "e_frac_with_tokens:mean": float(touched.mean()),
        "e_frac_oversubscribed:mean": float(over.mean()),
        "e_max_violation:mean": float(most.mean()),
        "e_max_violation:max": float(most.max()),
        "e_min_violation:mean": float(least.mean()),
    }


@pytest.mark.parametrize(
    ("layout", "family"),
    [("tp2+sp", "qwen3"), ("pp2", "llama"), ("cp2", "qwen3"), ("ep2", "qwen3_moe"), ("dp2", "qwen3_moe"), ("tp2·pp2", "llama"),
     pytest.param("dp2", "llama", marks=pytest.mark.exhaustive),
     pytest.param("tp2+sp", "qwen3_moe", marks=pytest.mark.exhaustive),
     pytest.param("tp2·cp2+sp", "qwen3", marks=pytest.mark.exhaustive),
     pytest.param("ep2·tp2+sp", "qwen3_moe", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_losses_and_gradients_are_pefts(
    world: World, reference: Callable[[str], dict[str, Any]], layout: str, family: str
) -> None:
    expected, of_ranks = reference(family), layout_for(layout, **FAMILIES[family].kind)
    assert of_ranks is not None
    arguments = (expected["folder"], of_ranks, adapters.LORA, expected["adapters"], CASES)
    answers = world.call(losses_and_gradients, *arguments, size=of_ranks.world_size)
    for number, wanted in enumerate(expected["cases"]):
        for which in ("seen", "passed"):
            found = answers[0][number][which]
            assert found.metrics["loss:sum"] == pytest.approx(wanted["loss"], abs=TOLERANCE * wanted["size"]), CASES[number][0]
            for output, log_probs in zip(found.outputs, wanted["log_probs"], strict=True):
                assert output["logprobs"].dtype == np.float32
                assert output["logprobs"].shape == log_probs.shape
                np.testing.assert_allclose(output["logprobs"], log_probs, rtol=TOLERANCE, atol=TOLERANCE)
        of_experts = {name: value for name, value in answers[0][number]["passed"].metrics.items() if name.startswith("e_")}
        assert of_experts == pytest.approx(wanted["experts"], rel=1e-12)
        gradients = joined(answer[number]["gradients"] for answer in answers)
        off = deviations(gradients, wanted["gradients"], lambda tensor: tensor.abs().max().clamp_min(1e-30))
        assert max(off.values()) < TOLERANCE, (
            CASES[number][0],
            {name: value for name, value in off.items() if value > TOLERANCE},
        )


ALL = AdapterChoice(3, seed=4)
CHOICES = [ALL, AdapterChoice(2, seed=4, train_mlp=False), AdapterChoice(1, seed=9, train_attn=False), AdapterChoice(3, seed=5)]


@pytest.mark.parametrize(
    ("layout", "live", "dtype"), [(Layout(tp=2, sequence_parallel=True), 1, "float32"), (Layout(dp=2), 64, "bfloat16")]
)
def test_models_side_by_side_are_the_same_models_alone_bit_for_bit(
    world: World, tmp_path: Path, layout: Layout, live: int, dtype: str
) -> None:
    build_folder("llama", tmp_path / "model")
    answers = world.call(side_by_side, tmp_path / "model", layout, adapters.LORA, CHOICES, live, dtype, size=2)
    together, alone, moved = answers[0]
    assert moved > 3 * len(CHOICES)
    for number, choice in enumerate(CHOICES):
        for found, wanted in zip(together[number], alone[number], strict=True):
            assert len(found) == len(wanted)
            assert all(map(np.array_equal, found, wanted))
        found, wanted = (
            load_file(tmp_path / "exports" / f"{kind}{number}" / "adapter_model.safetensors") for kind in ("together", "alone")
        )
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor)
            assert choice.rank in tensor.shape
            assert tensor.abs().sum() > 0, name
            assert choice.train_mlp or "mlp" not in name
            assert choice.train_attn or "attn" not in name
    if live == 1:
        assert len([*(tmp_path / "moved").iterdir()]) == 2 * (len(CHOICES) - live), "all but the last have a file of each rank"


ADAMS = [
    AdamParams(0.01, 0.9, 0.95, 1e-12),
    AdamParams(0.02, 0.8, 0.9, 1e-3, weight_decay=0.1, grad_clip_norm=0.5),
    AdamParams(0.03, 0.9, 0.95, 1e-8, weight_decay=0.2),
    AdamParams(0.01, 0.5, 0.99, 1e-4, grad_clip_norm=1e6),
]


SPLIT_EXPERTS = Layout(tp=2, etp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [("llama", Layout(), adapters.LORA), ("llama", Layout(dp=2), adapters.LORA), ("llama", Layout(pp=2), None),
     pytest.param("qwen3_moe", SPLIT_EXPERTS, adapters.LORA, marks=pytest.mark.exhaustive)],
    ids=["adapters", "adapters, dp2", "all weights, pp2", "adapters, tp2+sp, experts"],
)  # fmt: skip
def test_steps_are_those_of_torchs_adamw(world: World, tmp_path: Path, family: str, layout: Layout, lora: Lora | None) -> None:
    """The third step has no pass before it and counts as one with gradients of 0."""
    build_folder(family, tmp_path / "model")
    answers = world.call(steps_of_adam, tmp_path / "model", layout, lora, "float32", ADAMS, size=layout.world_size)
    states = [joined(found[number] for found, _ in answers) for number in range(len(ADAMS) + 1)]
    of_steps = [joined(steps[number][0] or {} for _, steps in answers) for number in range(len(ADAMS))]
    metrics = answers[0][1]
    parameters = {name: tensor.double().clone().requires_grad_(True) for name, tensor in states[0].items()}
    optimizer = torch.optim.AdamW([*parameters.values()])
    for number, adam in enumerate(ADAMS):
        for name, parameter in parameters.items():
            gradient = of_steps[number].get(name)
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.double()
        norm = torch.nn.utils.clip_grad_norm_([*parameters.values()], adam.grad_clip_norm or 1e30)
        optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        optimizer.step()
        assert metrics[number][1]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics[number][1]["lr"] == adam.learning_rate
        off = {
            name: float((states[number + 1][name] - parameter.detach()).abs().max()) for name, parameter in parameters.items()
        }
        moved = max(float((states[number + 1][name] - states[number][name]).abs().max()) for name in parameters)
        assert max(off.values()) < 2e-6 < moved, (number, max(off.values()))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(states[number + 1][name])


@pytest.mark.exhaustive
def test_adapters_of_split_experts_are_those_of_one_rank_after_two_steps(world: World, tmp_path: Path) -> None:
    """A step of Adam begins as the learning rate with the gradient's sign, however small that is.

    So elements are compared whose gradients are far from zero; of the others no step is larger than the learning rate.
    """
    build_folder("qwen3_moe", tmp_path / "model")
    adams, runs, far = [AdamParams()] * 2, [], 1e-2
    for layout in (Layout(), SPLIT_EXPERTS):
        arguments = (tmp_path / "model", layout, adapters.LORA, "float32", adams)
        answers = world.call(steps_of_adam, *arguments, size=layout.world_size)
        of_steps = [joined(steps[number][0] for _, steps in answers) for number in range(len(adams))]
        runs.append((joined(states[-1] for states, _ in answers), of_steps))
    (wanted, gradients), (found, others) = runs
    rate, compared = adams[0].learning_rate, 0
    for name, tensor in wanted.items():
        off, is_far = (found[name] - tensor).abs(), torch.ones_like(tensor, dtype=torch.bool)
        for mine, other in zip(gradients, others, strict=True):
            is_far &= (mine[name].abs() > far * mine[name].abs().max()) | ((mine[name] == 0) & (other[name] == 0))
        compared += int(is_far.sum())
        assert off.max() < 2.01 * rate * len(adams), name
        assert not is_far.any() or off[is_far].max() < rate * TOLERANCE / far, name
    assert compared > 0.5 * sum(tensor.numel() for tensor in wanted.values())


def test_new_models_are_the_same_in_every_layout_and_add_nothing(world: World, tmp_path: Path) -> None:
    build_folder("qwen3", tmp_path / "model")
    found: list[dict[str, Tensor]] = []
    for layout in (Layout(), Layout(tp=2), Layout(pp=2)):
        answers = world.call(begun, tmp_path / "model", layout, Lora(5, 8.0), CHOICES, size=layout.world_size)
        found.append(joined(answer for answer in answers))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor)
    # drawn as in a role whose adapters all are of this rank
    [alone] = world.call(begun, tmp_path / "model", Layout(), Lora(2, 8.0), [AdapterChoice(2, seed=4)], size=1)
    for name, tensor in alone.items():
        own = found[0].get(name.replace("0/", "1/"))
        assert own is None or torch.equal(own, tensor)
    drawn = {name: tensor for name, tensor in found[0].items() if name.startswith("0/") and "lora_A" in name}
    assert len({tensor.flatten()[0].item() for tensor in drawn.values()}) == len(drawn)
    of_other_seed = {name: found[0][name.replace("0/", "3/", 1)] for name in drawn}
    assert not any(torch.equal(of_other_seed[name], tensor) for name, tensor in drawn.items())


def begun(
    rank: int, world_size: int, folder: Path, layout: Layout, lora: Lora, choices: list[AdapterChoice]
) -> dict[str, Tensor]:
    from megarl.options.serve.rank_models import models_of
    from tests.options.serve.in_world import trainer_in

    trainer = trainer_in(layout, folder, lora)
    found = {}
    for number, choice in enumerate(choices):
        trainer.create(f"model{number}", choice)
        of_model = models_of(trainer.roles.role).adapters(choice)
        found |= {f"{number}/{name}": tensor.clone() for name, tensor in of_model}
    for number, choice in enumerate(choices):
        trainer._switch(f"model{number}")
        scales = {adapter.scale for adapter in models_of(trainer.roles.role)._adapters}
        assert scales == {lora.alpha / choice.rank}, "of the model's own rank, not of the largest"
        for name, tensor in trainer.roles.role.export_adapters():
            behind = tensor[choice.rank :] if name.endswith("lora_A.weight") else tensor[:, choice.rank :]
            assert not behind.any(), f"{name} of model {number} has more than its rank"
    assert all("lora_A" in name or not tensor.any() for name, tensor in found.items())
    return found
