"""Roles on real megatron-core worlds: every layout gives Hugging Face's log-probs, and its weights after AdamW updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit, split_shared_prompts
from tests.megatron.saving import load_role, save_role
from tests.world import World

VOCAB = 131
UPDATES = 3
LR, EPS, CLIP = 1e-2, 1e-3, 0.5
TEMPERATURE = 0.7

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "tp2+sp·pp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "dp2·pp2": Layout(pp=2, dp=2),
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random tiny model of each family as a Hugging Face folder; biases and norms are random too."""
    found = {}
    for family, (config_class, extra) in FAMILIES.items():
        torch.manual_seed(0)
        config = config_class(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, **extra,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        found[family] = tmp_path_factory.mktemp("models") / family
        model.save_pretrained(found[family])
    return found


def micro_batches(dp: int) -> list[list[list[Unit]]]:
    """Per data-parallel rank: micro-batches of units; together always the same responses."""
    generator = torch.Generator().manual_seed(7)

    def ids(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, VOCAB, (length,), generator=generator)

    units, index = [], 0
    for _ in range(4):
        responses = []
        for _ in range(3):
            tokens = ids(1, 9)
            mask = torch.rand(len(tokens), generator=generator) < 0.8
            weights = torch.randn(len(tokens), generator=generator) / 20
            responses.append(Response(index, tokens, mask, {"weights": weights}))
            index += 1
        units.append(Unit(ids(2, 12), responses))
    shares = [units[rank::dp] for rank in range(dp)]
    return [[share[: len(share) // 2], share[len(share) // 2 :]] for share in shares]


def objective(output: torch.Tensor, stream: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Log-probs and entropy both matter, each token with a weight of its own."""
    loss = -(stream.columns["weights"] * (output[:, 0] + 0.3 * output[:, 1])).sum()
    return loss, {"tokens": float(len(output))}


def run_role(
    rank: int, world_size: int, path: str, layout: Layout, spec: str, save_to: str | None, accumulates: bool = False
) -> dict[str, Any]:
    """`accumulates`: every update is a pass for each micro-batch, and a step by what these gathered."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.gathered_updates import apply_gathered, gather
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    options = ModelOptions(path, layout, layer_spec=spec, temperature=TEMPERATURE, logit_chunk_tokens=5)
    settings = OptimizerOptions(lr=LR, eps=EPS, clip_grad=CLIP, betas=(0.9, 0.95))
    role = RankModel(options, settings)
    mine = micro_batches(layout.dp)[layout.coords(rank).dp]
    before = role.forward(mine)

    def update() -> dict[str, Any]:
        if not accumulates:
            return role.update(mine, objective)
        for micro_batch in mine:
            gather(role, [micro_batch], objective)
            role.forward(mine)  # leaves the gradients alone
        return apply_gathered(role)

    updates = [update() for _ in range(UPDATES - 1)]
    if save_to is not None:
        save_role(role, save_to)
        role = RankModel(options, settings)
        load_role(role, save_to)
    updates.append(update())
    exported = {name: tensor.clone() for name, tensor in role.export()}
    return {"before": before, "updates": updates, "exported": exported}


def hugging_face(path: Path) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """(log-probs and entropy by response, weights after the updates, gradient norms) by transformers and torch.optim."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, betas=(0.9, 0.95), weight_decay=0.0)
    units = [unit for share in micro_batches(1) for part in share for unit in part]
    before: dict[int, torch.Tensor] = {}
    norms = []
    for update in range(UPDATES):
        optimizer.zero_grad()
        for unit in split_shared_prompts(units):
            response = unit.responses[0]
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            logits = model(ids).logits[0, len(unit.prompt_ids) - 1 : -1] / TEMPERATURE
            log_p = logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            log_probs = log_p.gather(1, response.token_ids[:, None])[:, 0]
            loss = -(response.columns["weights"] * (log_probs + 0.3 * entropy))[response.mask].sum()
            loss.backward()
            if update == 0:
                both = torch.stack([log_probs, entropy], -1).detach()
                before[response.index] = both * response.mask[:, None]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}, norms


def check(answers: list[dict[str, Any]], layout: Layout, path: Path) -> None:
    before, weights, norms = hugging_face(path)
    got = {index: values for answer in answers for index, values in answer["before"].items()}
    assert got.keys() == before.keys()
    for index, values in before.items():
        torch.testing.assert_close(got[index], values, rtol=0, atol=1e-5)
    for number, norm in enumerate(norms):
        assert answers[0]["updates"][number]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    exported: dict[str, torch.Tensor] = {}
    for answer in answers:
        assert not exported.keys() & answer["exported"].keys()
        exported |= answer["exported"]
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


IN_OTHERS = ("dp2", "tp2", "pp2")  # dp2·pp2 and tp2+sp have them, and below "tp2" and "pp2" run with the local spec


@pytest.mark.parametrize(
    "layout",
    [pytest.param(at, id=n, marks=pytest.mark.exhaustive if n in IN_OTHERS else ()) for n, at in LAYOUTS.items()],
)
def test_every_layout_trains_llama_like_hugging_face(
    world: World, folders: dict[str, Path], layout: Layout, tmp_path: Path
) -> None:
    """The last update runs in a role that was saved and loaded, so the checkpoint carries weights and Adam's moments."""
    arguments = (str(folders["llama"]), layout, "reference", str(tmp_path / "checkpoint"))
    check(world.call(run_role, *arguments, size=layout.world_size), layout, folders["llama"])


@pytest.mark.parametrize("name", ["one", "dp2·pp2", "tp2+sp"])
def test_gradients_gathered_over_several_passes_make_the_same_updates(
    world: World, folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    arguments = (str(folders["llama"]), layout, "reference", str(tmp_path / "checkpoint"), True)
    check(world.call(run_role, *arguments, size=layout.world_size), layout, folders["llama"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["one", "tp2+sp·pp2"])
def test_qwen_trains_like_hugging_face(world: World, folders: dict[str, Path], family: str, name: str) -> None:
    layout = LAYOUTS[name]
    answers = world.call(run_role, str(folders[family]), layout, "reference", None, size=layout.world_size)
    check(answers, layout, folders[family])


@pytest.mark.parametrize("name", ["one", "tp2", "pp2"])
def test_megatron_cores_local_spec_agrees_with_hugging_face_too(world: World, folders: dict[str, Path], name: str) -> None:
    layout = LAYOUTS[name]
    answers = world.call(run_role, str(folders["llama"]), layout, "local", None, size=layout.world_size)
    check(answers, layout, folders["llama"])
