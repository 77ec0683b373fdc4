"""`megarl serve` of a model that sees: the protocol's own client shows it pictures, in training and in prompts."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from PIL import Image
from tinker import types
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from tests.themes.e2e.test_serve import ADAM, NAME, serving
from tools.model.tiny_vision import EOS, IMAGE, make

BEFORE, AFTER = [6, 2], [3, 9, 10]
"""Ids around a picture, with the marks of its start and end."""
TOKENS = 6


def picture() -> bytes:
    """A JPEG whose sides are no multiples of a token's 28 pixels: 3 x 2 tokens."""
    written = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)).save(written, "JPEG")
    return written.getvalue()


def shown(content: bytes, tokens: int = TOKENS, kind: Any = "jpeg", behind: tuple[int, ...] = ()) -> types.ModelInput:
    chunks = [types.EncodedTextChunk(tokens=BEFORE), types.ImageChunk(data=content, format=kind, expected_tokens=tokens)]
    return types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[*AFTER, *behind])])


def datum(prompt: types.ModelInput, targets: list[int]) -> types.Datum:
    """Targets of the last tokens; those before are 0, and weigh nothing."""
    before = prompt.length - len(targets)
    inputs = {"target_tokens": [0] * before + targets, "weights": [0.0] * before + [1.0] * len(targets)}
    return types.Datum(model_input=prompt, loss_fn_inputs=inputs)


@pytest.mark.slow
@pytest.mark.exhaustive  # what ranks compute is in tests/options/serve/test_served_pictures.py
def test_a_client_trains_on_pictures_and_asks_about_them(tmp_path: Path) -> None:
    make(tmp_path / "model")
    content, target = picture(), [11, EOS]
    serve = {"models": {NAME: None}, "max_rank": 4, "live_models": 2, "context_tokens": 64, "port": 0}
    with serving(tmp_path / "model", tmp_path, serve=serve) as server:
        client = server.client()
        training = client.create_lora_training_client(base_model=NAME, rank=4, train_unembed=False)
        one = datum(shown(content, behind=(11,)), target)

        theirs = expected(tmp_path / "model", target)
        answer = training.forward([one], "cross_entropy").result(timeout=300)
        assert answer.loss_fn_outputs[0]["logprobs"].tolist()[-2:] == pytest.approx(theirs, abs=1e-5)
        losses = []
        for _ in range(6):
            losses.append(training.forward_backward([one], "cross_entropy").result(timeout=120).metrics["loss:sum"])
            training.optim_step(ADAM).result(timeout=120)
        assert losses[-1] < losses[0] - 0.5, losses

        trained = training.forward([one], "cross_entropy").result(timeout=120).metrics["loss:sum"]
        sampling = training.save_weights_and_get_sampling_client()
        asked = sampling.sample(shown(content), 4, types.SamplingParams(max_tokens=4, seed=3)).result(timeout=120)
        for sequence in asked.sequences:
            said = list(sequence.tokens)
            again = datum(shown(content, behind=tuple(said[:-1])), said)
            theirs = training.forward([again], "cross_entropy").result(timeout=120).loss_fn_outputs[0]["logprobs"].tolist()
            assert sequence.logprobs == pytest.approx(theirs[-len(said) :], abs=1e-4)

        for wrong, sentence in (
            (shown(content, tokens=5), "picture 1 has expected_tokens 5, and is 6 tokens of the model"),
            (shown(b"none"), "picture 1 has the format jpeg, but it is none that can be read"),
        ):
            with pytest.raises(tinker.TinkerError, match=sentence):
                sampling.sample(wrong, 1, types.SamplingParams(max_tokens=2)).result(timeout=120)
        other = client.create_lora_training_client(base_model=NAME, rank=2)
        with pytest.raises(tinker.TinkerError, match="datum 0: picture 1 has expected_tokens 5, and is 6 tokens"):
            other.forward([datum(shown(content, tokens=5), [11])], "cross_entropy").result(timeout=120)
        assert training.forward([one], "cross_entropy").result(timeout=120).metrics["loss:sum"] == trained
        server.stop()
    lines = [json.loads(line) for line in (tmp_path / "runs" / "served" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(f"[picture 1: jpeg, {len(content)} bytes, 6 tokens]" in line["prompt_text"] for line in lines)


def expected(folder: Path, targets: list[int]) -> list[float]:
    """Log-probs of the last targets by transformers."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    ids = torch.tensor([[*BEFORE, *[IMAGE] * TOKENS, *AFTER, targets[0]]])
    read = processor([Image.open(BytesIO(picture()))], return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **read).logits[0].double()
    rows = logits.log_softmax(-1)[-len(targets) :]
    return [float(row[token]) for row, token in zip(rows, targets, strict=True)]
