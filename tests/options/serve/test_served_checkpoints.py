"""Training goes on from a saved state in any layout, a damaged one leaves a model as it was, and exports are PEFT folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.adapters import LORA_A
from megarl.options.lora.weight_map import Lora
from megarl.options.serve.values import AdamParams, AdapterChoice, Datum, Loss, RequestError
from tests.families import build_folder, hugging_face
from tests.options.lora import adapters
from tests.options.serve import served_ranks
from tests.options.serve.in_world import trainer_in
from tests.options.serve.served_ranks import ADAM, data_of, saved_and_loaded
from tests.themes.parallel.comparison import joined
from tests.world import World


@pytest.mark.parametrize("lora", [adapters.LORA, None], ids=["adapters", "all weights"])
def test_training_goes_on_from_a_saved_state(world: World, tmp_path: Path, lora: Any) -> None:
    folder = tmp_path / "model"
    build_folder("llama", folder)
    wanted = joined(world.call(saved_and_loaded, folder, Layout(tp=2), lora, None, size=2))
    saved = tmp_path / "saved"
    again = joined(world.call(saved_and_loaded, folder, Layout(tp=2), lora, saved, size=2))
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())
    elsewhere = joined(world.call(saved_and_loaded, folder, Layout(pp=2), lora, saved, size=2))
    off = max(float((elsewhere[name] - tensor).abs().max()) for name, tensor in wanted.items())
    assert off < 1e-5
    begun_anew = joined(world.call(saved_and_loaded, folder, Layout(tp=2), lora, saved, "no optimizer", size=2))
    assert max(float((begun_anew[name] - tensor).abs().max()) for name, tensor in wanted.items()) > 1e-4


@pytest.mark.parametrize(
    ("family", "written", "read"),
    [("llama", Layout(tp=2, sequence_parallel=True), [(5, Layout(pp=2)), (2, Layout(dp=2))]),
     pytest.param("qwen3_moe", Layout(ep=2, dp=2), [(2, Layout(dp=2)), (5, Layout(ep=2, dp=2))], marks=pytest.mark.exhaustive),
     pytest.param("qwen3_moe", Layout(), [(5, Layout(ep=2, dp=2)), (2, Layout(pp=2))], marks=pytest.mark.exhaustive),
     pytest.param("qwen3_moe", Layout(), [(5, Layout(tp=2, etp=2, sequence_parallel=True))], marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_a_state_is_loaded_by_a_server_of_another_largest_rank(
    world: World, tmp_path: Path, family: str, written: Layout, read: list[tuple[int, Layout]]
) -> None:
    """Also one that has the zeros behind the model's rank in it, as they were written before."""
    folder, choice = tmp_path / "model", AdapterChoice(2, seed=4)
    build_folder(family, folder)
    ways = ("saved_and_loaded", "padded_and_loaded") if family == "llama" else ("saved_and_loaded",)
    for way in ways:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        call = getattr(served_ranks, way)
        wanted = joined(world.call(call, folder, written, adapters.LORA, None, "", choice, size=written.world_size))
        shapes = {size for key, size in stored_shapes(tmp_path / "saved" / "policy").items() if key.endswith(LORA_A)}
        assert {rank for rank, _ in shapes} == ({2} if way == "saved_and_loaded" else {3})
        for largest, layout in read:
            lora = Lora(largest, adapters.LORA.alpha)
            arguments = (folder, layout, lora, tmp_path / "saved", "", choice)
            found = joined(world.call(saved_and_loaded, *arguments, size=layout.world_size))
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                mine, other = (of[:2] if name.endswith(LORA_A) else of[:, :2] for of in (tensor, found[name]))
                assert mine.abs().sum() > 0
                assert float((mine - other).abs().max()) < 1e-5, (way, largest, name)
                assert not (found[name][2:] if name.endswith(LORA_A) else found[name][:, 2:]).any(), "zeros behind it"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from torch.distributed.checkpoint import FileSystemReader

    contents = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in contents.items() if hasattr(entry, "size")}


def test_a_damaged_state_leaves_the_model_as_it_was(world: World, tmp_path: Path) -> None:
    folder, saved = tmp_path / "model", tmp_path / "saved"
    build_folder("llama", folder)
    world.call(saved_and_loaded, folder, Layout(), adapters.LORA, None, size=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]

    def damaged(name: str, spoil: Any) -> Path:
        copy = tmp_path / name
        shutil.copytree(saved, copy)
        spoil(copy)
        return copy

    def cut(copy: Path) -> None:
        data = max((copy / "policy").glob("*.distcp"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:1000])

    def relabel(copy: Path, **changed: Any) -> None:
        header = json.loads((copy / "model.json").read_text())
        header["adapters"] |= changed
        (copy / "model.json").write_text(json.dumps(header))

    cases = {
        "cut": (cut, "cannot be loaded"),
        "without tensors": (lambda copy: shutil.rmtree(copy / "policy"), "no whole state of training"),
        "without header": (lambda copy: (copy / "model.json").unlink(), "no whole state of training"),
        "another rank": (lambda copy: relabel(copy, rank=3), "is of adapters of rank 3 .attn, unembed.*both must be alike"),
        "other layers": (lambda copy: relabel(copy, train_mlp=True), "both must be alike"),
    }
    for name, (spoil, sentence) in cases.items():
        [answer] = world.call(saved_and_loaded, folder, Layout(), adapters.LORA, damaged(name, spoil), name, size=1)
        error, same, has_gradients = answer
        assert same, name
        assert has_gradients, name
        assert re.search(sentence, error), error


def exported(rank: int, world_size: int, folder: Path, choice: AdapterChoice) -> Any:
    """Log-probs after two steps of a model whose adapters are then in the folder `peft`."""
    trainer = trainer_in(Layout(tp=2), folder, adapters.LORA)
    trainer.create("mine", choice)
    for number in range(2):
        trainer.run_pass("mine", data_of("cross_entropy", number), Loss("cross_entropy"), backward=True)
        trainer.optimizer_step("mine", AdamParams(learning_rate=0.05))
    trainer.export("mine", folder.parent / "peft")
    passed = trainer.run_pass("mine", data_of("cross_entropy", 5), Loss("cross_entropy"), backward=False)
    return [output["logprobs"] for output in passed.outputs]


def test_exported_adapters_compute_the_same_by_peft(world: World, tmp_path: Path) -> None:
    from peft import PeftModel

    build_folder("llama", tmp_path / "model")
    found, _ = world.call(exported, tmp_path / "model", AdapterChoice(2, seed=4, train_attn=False), size=2)
    model = PeftModel.from_pretrained(hugging_face("llama"), str(tmp_path / "peft")).eval()
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert config["lora_alpha"] == adapters.LORA.alpha
    for datum, log_probs in zip(data_of("cross_entropy", 5), found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(datum.tokens)[None].long()).logits[0].double()
        targets = torch.tensor(datum.inputs["target_tokens"])
        wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(log_probs, wanted, rtol=1e-5, atol=1e-5)


def asked(rank: int, world_size: int, folder: Path) -> Any:
    """What a trainer answers to what it cannot do, and gradients that nothing of it has changed."""
    from megarl.options.serve.custom_graph import read_graph
    from tests.options.serve.served_ranks import gradients

    trainer = trainer_in(Layout(), folder, adapters.LORA)
    trainer.create("mine", AdapterChoice(3, seed=4))
    data = data_of("ppo", 1)
    trainer.run_pass("mine", data, Loss("ppo"), backward=True)
    spoilt = [*data[1:], Datum(data[0].tokens, dict(data[0].inputs) | {"advantages": data[0].inputs["advantages"] * np.nan})]
    sentences = []
    for call in (
        lambda: trainer.create("mine", AdapterChoice(1)),
        lambda: trainer.create("new", AdapterChoice(4)),
        lambda: trainer.create("new", AdapterChoice(0)),
        lambda: trainer.create("new", AdapterChoice(2, seed=-1)),
        lambda: trainer.create("new", AdapterChoice(2, train_attn=False, train_mlp=False)),
        lambda: trainer.create("new", None),
        lambda: trainer.run_pass("new", data, Loss("ppo"), backward=True),
        lambda: trainer.run_pass("mine", spoilt, Loss("ppo"), backward=True),
        lambda: trainer.run_pass("mine", data, Loss("custom"), backward=True),
        lambda: trainer.optimizer_step("mine", AdamParams(beta1=1.0)),
        lambda: trainer.optimizer_step("mine", AdamParams(learning_rate=float("nan"))),
        lambda: trainer.load("mine", folder, with_optimizer=True),
    ):
        try:
            call()
        except RequestError as error:
            sentences.append(str(error))
    kept = gradients(trainer)
    trainer.run_pass("mine", data, Loss("ppo"), backward=True)
    wanted = gradients(trainer)
    result = {"tuple": [{"ref": "n"}, {"dict": {"custom/s:sum": {"ref": "s"}}}]}
    nodes = [
        {"name": "x", "op": "placeholder", "target": "logprobs", "args": [], "kwargs": {}},
        {"name": "w", "op": "placeholder", "target": "weights", "args": [], "kwargs": {}},
        {"name": "m", "op": "call_function", "target": "operator.mul", "args": [{"ref": "x"}, {"ref": "w"}], "kwargs": {}},
        {"name": "s", "op": "call_method", "target": "sum", "args": [{"ref": "m"}], "kwargs": {}},
        {"name": "n", "op": "call_function", "target": "operator.neg", "args": [{"ref": "s"}], "kwargs": {}},
        {"name": "o", "op": "output", "target": "output", "args": [result], "kwargs": {}},
    ]  # fmt: skip
    graph = read_graph("mine", [("logprobs", 1), ("weights", 1)], {"format": 1, "nodes": nodes})
    weighted = data_of("cross_entropy", 3)
    custom = trainer.run_pass("mine", weighted, Loss("custom", {"loss_id": 1}, graph), backward=True)
    of_custom = gradients(trainer)
    plain = trainer.run_pass("mine", weighted, Loss("cross_entropy"), backward=True)
    of_plain = gradients(trainer)
    step = trainer.optimizer_step("mine", ADAM)
    return sentences, (kept, wanted), (custom, plain), (of_custom, of_plain), step


def test_what_cannot_be_done_is_one_sentence_and_changes_nothing(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    [(sentences, before, (custom, plain), by_graph, step)] = world.call(asked, tmp_path / "model", size=1)
    expected = [
        "exists already", "rank is 4; it must be 1 to 3", "rank is 0", "seed is -1", "leaves no layer", "lora_config is",
        "does not exist", "datum 4 has advantages that are not finite", "names no loss", "beta1 is 1.0", "learning_rate is nan",
        "no whole state",
    ]  # fmt: skip
    assert len(sentences) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, sentences, strict=True)), sentences
    for kept, wanted in (before, by_graph):
        assert any(gradient.any() for gradient in wanted.values())
        assert all(torch.equal(kept[name], gradient) for name, gradient in wanted.items())
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)
    assert custom.metrics["custom/s:sum"] == pytest.approx(-plain.metrics["loss:sum"], rel=1e-6)
    assert step["skipped"] == 0
    assert step["grad_norm"] == 0
