"""What each rank of a world does with served models; the tests beside it compare what the ranks answer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from megarl.options.serve.values import AdamParams, AdapterChoice, Datum, Loss
from tests.families.family import VOCAB_SIZE
from tests.options.serve.in_world import trainer_in
from tests.themes.parallel.worlds import gathered_gradients, put_back

ADAM = AdamParams(learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.4)
INPUTS = ("logprobs", "advantages", "weights", "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold")


def data_of(
    loss: str, seed: int = 1, *, wide: int = 0, shifts: bool = True, lengths: Sequence[int] = (9, 1, 5, 14, 3)
) -> list[Datum]:
    """Random data with what `loss` reads; `wide`: so many targets per position."""
    from megarl.options.serve.losses import FORMS

    draw, found = np.random.default_rng(seed), []
    for length in lengths:
        tokens = draw.integers(0, VOCAB_SIZE, length).astype(np.int32)
        targets = np.append(tokens[1:], draw.integers(0, VOCAB_SIZE)).astype(np.int64)
        if wide or not shifts:
            targets = draw.integers(0, VOCAB_SIZE, (length, wide) if wide else length)
        inputs: dict[str, Any] = {"target_tokens": targets}
        values = {
            "weights": draw.uniform(-0.2, 1, targets.shape),
            "logprobs": draw.uniform(-6, -3.5, length),
            "advantages": draw.normal(size=length) * (draw.random(length) < 0.8),
            "sequence_ratio_mask": (draw.random(length) < 0.7).astype(float),
        }
        inputs |= {name: values[name].astype(np.float32) for name in FORMS[loss].required}
        found.append(Datum(tokens, inputs))
    return found


def begun_alike(*, shifts: bool) -> list[Datum]:
    """Three data whose first 20 tokens are the same; without `shifts` one has no shift of its tokens as targets."""
    draw, found = np.random.default_rng(3), []
    prompt = draw.integers(0, VOCAB_SIZE, 20)
    for number in range(3):
        tokens = np.append(prompt, draw.integers(0, VOCAB_SIZE, 3 + number)).astype(np.int32)
        targets = draw.permutation(tokens) if number == 1 and not shifts else np.append(tokens[1:], 7)
        weights = draw.uniform(-0.2, 1, len(tokens)).astype(np.float32)
        found.append(Datum(tokens, {"target_tokens": targets.astype(np.int64), "weights": weights}))
    return found


def gradients(trainer: Any) -> dict[str, Tensor]:
    """Gradients since the last step by hub name, on each stage's leading rank; they are lost, and weights as they were."""
    from megarl.megatron.gathered_updates import reduce_gradients

    role = trainer.roles.role
    weights = [parameter.detach().clone() for chunk in role.chunks for parameter in chunk.parameters()]
    reduce_gradients(role.chunks)
    gathered_gradients(role)
    found = {name: tensor.clone() for name, tensor in (role.export_adapters() if role.options.lora else role.export())}
    put_back(role, weights)
    role.gathered = None
    return found


def losses_and_gradients(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    lora: Lora,
    adapters: Mapping[str, Tensor],
    cases: Any,
    media: Path | None = None,
) -> list[dict[str, Any]]:
    """Of each case (loss, its parameters, data) the answer of a pass without gradients, of one with them, and these.

    `media`: a folder for the data's pictures.
    """
    from megarl.options.lora.layers import load_adapters

    trainer = trainer_in(layout, folder, lora, media=media)
    trainer.create("mine", AdapterChoice(lora.rank))
    load_adapters(trainer.roles.role.chunks, 0, adapters.__getitem__)
    answers = []
    for loss, parameters, data in cases:
        seen = trainer.run_pass("mine", data, Loss(loss, parameters), backward=False)
        passed = trainer.run_pass("mine", data, Loss(loss, parameters), backward=True)
        answers.append({"seen": seen, "passed": passed, "gradients": gradients(trainer)})
    return answers


def trained_alone(trainer: Any, name: str, folder: Path, *, loss: str = "ppo", steps: int = 3, seed: int = 1) -> Any:
    """A generator that trains a model: it yields between calls, and last gives all that it was answered."""
    answers: list[Any] = []
    for step in range(steps):
        for part in range(2):
            passed = trainer.run_pass(name, data_of(loss, seed + 7 * step + part), Loss(loss), backward=True)
            answers.append([output["logprobs"] for output in passed.outputs])
            yield None
        answers.append([trainer.optimizer_step(name, ADAM)["grad_norm"]])
        yield None
    trainer.export(name, folder)
    yield answers


def side_by_side(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    lora: Lora,
    choices: Sequence[AdapterChoice],
    live: int,
    dtype: str,
) -> Any:
    """What models answer that take turns call by call, and what each answers alone in a role of its own."""
    trainer = trainer_in(layout, folder, lora, live=live, dtype=dtype)
    out = folder.parent / "exports"
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    torch.distributed.barrier()
    running = {}
    for number, choice in enumerate(choices):
        trainer.create(f"model{number}", choice)
        running[number] = trained_alone(trainer, f"model{number}", out / f"together{number}", seed=100 * number)
    together: dict[int, Any] = {}
    while running:
        for number, steps in [*running.items()]:
            if (answers := next(steps)) is not None:
                together[number] = answers
                del running[number]
    alone = {}
    for number, choice in enumerate(choices):
        trainer.create("alone", choice)
        *_, alone[number] = trained_alone(trainer, "alone", out / f"alone{number}", seed=100 * number)
        trainer.drop("alone")
    moved = trainer.roles.asked.count("switch")
    return together, alone, moved


def steps_of_adam(
    rank: int, world_size: int, folder: Path, layout: Layout, lora: Lora | None, dtype: str, adams: Sequence[AdamParams]
) -> Any:
    """What is trained before, and behind each step of `adams`; between the second and the third there is no pass."""
    trainer = trainer_in(layout, folder, lora, dtype=dtype)
    trainer.create("mine", AdapterChoice(lora.rank, seed=5) if lora is not None else None)
    role = trainer.roles.role

    def trained() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in (role.export_adapters() if lora else role.export())}

    found: list[Any] = [trained()]
    of_steps: list[Any] = []
    for number, adam in enumerate(adams):
        gradient: Any = None
        if number != 2:
            trainer.run_pass("mine", data_of("cross_entropy", number), Loss("cross_entropy"), backward=True)
            gradient = gradients(trainer)
            trainer.run_pass("mine", data_of("cross_entropy", number), Loss("cross_entropy"), backward=True)
        metrics = trainer.optimizer_step("mine", adam)
        found.append(trained())
        of_steps.append((gradient, metrics))
    return found, of_steps


OF_RANK_2 = AdapterChoice(2, seed=4, train_mlp=False)


def save(trainer: Any, model: str, folder: Path) -> None:
    """Save as the one driver of a run does: here each rank is one, and the first alone has to do with folders."""
    from megarl.options.serve.rank_questions import ModelCall

    if torch.distributed.get_rank() == 0:
        trainer.save(model, folder)
    else:
        tensors = folder.with_name(f"{folder.name}.partial") / "policy"
        while not tensors.exists():
            time.sleep(0.01)
        trainer.roles.ask("policy", ModelCall("save", (str(tensors),), model))
    torch.distributed.barrier()


def saved_and_loaded(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    lora: Lora | None,
    checkpoint: Path | None,
    damage: str = "",
    choice: AdapterChoice = OF_RANK_2,
) -> Any:
    """Without a checkpoint: trains two steps, saves into `saved`, and two more. With one: loads it and makes these two.

    `damage` is what is wrong with it: then also that the model is as it was. Answers what is trained at the end, by hub name.
    """
    from megarl.options.serve.values import RequestError

    trainer = trainer_in(layout, folder, lora)
    role = trainer.roles.role

    def step(number: int) -> None:
        trainer.run_pass("mine", data_of("ppo", number), Loss("ppo"), backward=True)
        trainer.optimizer_step("mine", ADAM)

    def trained() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in (role.export_adapters() if lora else role.export())}

    trainer.create("mine", choice if lora is not None else None)
    if lora is not None:
        trainer.create("other", AdapterChoice(lora.rank, seed=1))
        trainer.run_pass("other", data_of("ppo", 9), Loss("ppo"), backward=True)
    if checkpoint is None:
        for number in range(2):
            step(number)
        save(trainer, "mine", folder.parent / "saved")
    else:
        step(5)
        trainer.run_pass("mine", data_of("ppo", 6), Loss("ppo"), backward=True)  # whose gradients a load forgets
        before = trained()
        try:
            trainer.load("mine", checkpoint, with_optimizer=damage != "no optimizer")
        except RequestError as error:
            after = trained()
            same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            return str(error), same, role.gathered is not None
        if lora is not None:
            trainer.optimizer_step("other", ADAM)
    for number in range(2, 4):
        step(number)
    return trained()


def padded_and_loaded(*arguments: Any) -> Any:
    """As `saved_and_loaded`, of a rank whose checkpoints have what is always zero, too."""
    from unittest.mock import patch

    with patch("megarl.options.serve.rank_models._of_rank", lambda box, rank: [box]):
        return saved_and_loaded(*arguments)
