"""Real SGLang servers of models that see: answers and updates against transformers, also for pictures asked before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from megarl.data.stream import Unit
from megarl.errors import EngineError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.checksums import EngineLayout, check_model
from tests import seeing
from tests.models.test_transformers_names import other_values, stored, update
from tests.rollout.tiny import Weights

PROCESSORS = {"qwen3_vl_moe": "Qwen3VLProcessor", "glm4v_moe": "Glm4vProcessor"}
"""Those that are not called as their model is."""


def served_folder(family: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that SGLang serves on a CPU, with a tokenizer, and pictures in its folder `media`."""
    entry = seeing.SEEING[family]
    for width in ("intermediate_size", "moe_intermediate_size"):
        monkeypatch.setitem(entry.text, width, 64)  # others are padded
    monkeypatch.setitem(entry.vision, "in_chans", 3)  # as hub configs have it, and SGLang reads it
    if family == "qwen3_vl_moe":  # what SGLang has whatever the config says
        monkeypatch.setitem(entry.vision, "deepstack_visual_indexes", [0, 1, 2])
        monkeypatch.setitem(entry.text, "mlp_only_layers", [])
    seeing.build_seeing_folder(family, path)
    seeing.pictures(family, path / "media")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["processor_class"] = PROCESSORS.get(family, f"{entry.class_prefix}Processor")  # as on the hub
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    words = [f"w{number}" for number in range(seeing.TEXT_IDS)]
    special = list(entry.tokens.values())
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, *special])}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", pad_token="w1").save_pretrained(path)
    return path


def difference(model: Any, family: str, folder: Path, units: Sequence[Unit], groups: Sequence[Sequence[Generation]]) -> float:
    """The largest difference of answers' log-probs from transformers' in float64; in float32 its own are off by up to 1e-5."""
    worst = 0.0
    model = deepcopy(model).double()
    model.set_experts_implementation("eager")  # the only one that takes float64
    for unit, group in zip(units, groups, strict=True):
        for answer in group:
            ids = torch.cat([unit.prompt_ids, torch.tensor(answer.response_ids[:-1], dtype=torch.long)])[None]
            more: dict[str, Any] = seeing.inputs(family, folder / "media", unit.media)
            more = {name: value.double() if value.is_floating_point() else value for name, value in more.items()}
            if unit.media and seeing.vision_of(family).mrope is not None:
                more |= {"mm_token_type_ids": (ids == seeing.IMAGE).int() + 2 * (ids == seeing.VIDEO).int()}
            with torch.no_grad():
                logits = model(ids, **more).logits[0, len(unit.prompt_ids) - 1 :]
            assert logits.dtype == torch.float64
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(answer.log_probs)).abs().max()))
    return worst


def with_values(folder: Path, weights: Weights, sent: Path) -> Any:
    """transformers' model with these weights, by way of a folder."""
    write_hf_folder(sent, weights, HFFolder(folder).config)
    return AutoModelForImageTextToText.from_pretrained(sent, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen3_vl", 1),
        # runs of tests/themes/e2e/test_vision.py serve one with windows; a test below has the towers of two ranks
        *(
            pytest.param(family, tp, marks=pytest.mark.exhaustive)
            for family, tp in (("qwen2_vl", 1), ("qwen2_5_vl", 2), ("qwen3_vl_moe", 2), ("glm4v_moe", 2))
        ),
    ],
)
def test_answers_are_transformers_also_after_updates_and_for_pictures_asked_before(
    family: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = served_folder(family, tmp_path / "model", monkeypatch)
    # no picture, one, and two of which one is the same; then conversations, with pictures in the middle
    units = [*seeing.units(family)[:3], *seeing.conversations(family)]
    if seeing.SEEING[family].frames_apart:  # a native video, and a picture behind it
        units += seeing.units(family)[3:]
    prompts, media = [unit.prompt_ids.tolist() for unit in units], [unit.media for unit in units]
    params = SamplingParams(max_new_tokens=6, cut_token_ids=(seeing.IMAGE, seeing.VIDEO))
    options = ServerOptions(
        str(folder), tmp_path / "log", tp=tp, threads=1, max_total_tokens=2048, max_running_requests=8,
        start_timeout_s=400, media_folder=folder / "media",
    )  # fmt: skip
    original = stored(folder)
    everything = other_values(folder)
    tower = [(name, original[name] if "visual" not in name else value) for name, value in everything]

    async def scenario() -> None:
        engine = await SglangEngine.open(options, 0)
        try:
            groups = await engine.generate(EngineRequest(prompts, params, n=3, media=media))
            assert difference(seeing.hugging_face(family), family, folder, units, groups) < 1e-5
            # whatever is sampled ends it, as a placeholder does
            cut = replace(params, cut_token_ids=tuple(range(seeing.hf_config(family).text_config.vocab_size)))
            for answer in await engine.generate(EngineRequest(prompts, cut, media=media)):
                assert (len(answer[0].response_ids), answer[0].finish_reason) == (1, "length")
            for version, weights in ((1, tower), (2, everything)):  # the tower alone, then the decoder
                await update(engine, weights, version)
                groups = await engine.generate(EngineRequest(prompts, params, n=2, media=media))
                assert difference(with_values(folder, weights, tmp_path / str(version)), family, folder, units, groups) < 1e-5
            name = next(name for name, _ in everything if "visual" in name and "blocks.1.mlp" in name)
            with pytest.raises(EngineError, match=f"nobody sent {name}@"):
                await update(engine, [pair for pair in everything if pair[0] != name], 3)
        finally:
            await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"deepstack_visual_indexes": [0, 2]}, "it adds features of the tower behind 3 decoder layers, and the model has 2"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_what_sglang_would_compute_otherwise_is_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = served_folder("qwen3_vl_moe", tmp_path / "model", monkeypatch)
    check_model(folder)
    config = json.loads((folder / "config.json").read_text())
    part = config["text_config" if "mlp_only_layers" in changes else "vision_config"]
    part |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=sentence):
        check_model(folder)


def test_a_glm_of_whose_tower_sglang_would_pad_heads_or_rotate_them_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("intermediate_size", "moe_intermediate_size"):
        monkeypatch.setitem(seeing.SEEING["glm4v_moe"].text, width, 128)
    seeing.build_seeing_folder("glm4v_moe", tmp_path / "model")
    check_model(tmp_path / "model", tp=2)
    with pytest.raises(EngineError, match=r"with rollout.tp = 4 it pads the 2 heads of the vision tower; tp must divide them"):
        check_model(tmp_path / "model", tp=4)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["vision_config"]["rope_parameters"]["rope_theta"] = 1e6
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"its tower rotates by the base 10000, whatever vision_config\.rope_parameters says"):
        check_model(tmp_path / "model")


def test_towers_are_whole_on_every_rank_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder("qwen2_5_vl", tmp_path / "model", monkeypatch)
    layout = EngineLayout.of_model(folder, "float32", 2)
    assert layout.server_arguments["mm_enable_dp_encoder"] is True
    patches = layout.slices["visual.patch_embed.proj.weight"]
    assert [(box.engine_rank, box.rows, box.cols) for box in patches] == [(rank, 16, 3 * 2 * 14 * 14) for rank in (0, 1)]
