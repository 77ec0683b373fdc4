"""Pictures of requests: refused before they are decoded, decoded once, and seen as transformers sees them, gradients too."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.options.serve import served_pictures as module
from megarl.options.serve.datums import DatumLimits, lay
from megarl.options.serve.losses import FORMS, Given, token_losses
from megarl.options.serve.sampler import SglangSampler
from megarl.options.serve.values import Datum, Picture, RequestError
from tests.options.lora import adapters
from tests.options.serve.fake_sglang import FakeEngine
from tests.options.serve.in_world import served_pictures
from tests.options.serve.served_ranks import losses_and_gradients
from tests.options.serve.test_sampler import request, run
from tests.seeing import IMAGE, SEEING, TEXT_IDS, build_seeing_folder, hugging_face
from tests.themes.parallel.comparison import TOLERANCE, deviations, joined
from tests.themes.parallel.worlds import layout_for
from tests.world import World

FAMILY = "qwen3_vl"
SIDE = 32
"""Pixels of a token's side in this family."""


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sent(image: Image.Image, place: int, length: int, kind: str = "png") -> Picture:
    written = BytesIO()
    image.save(written, kind.upper())
    return Picture(place, length, kind, written.getvalue())


WIDE = noise(3 * SIDE + 5, 2 * SIDE - 3)
"""Is resized to 3 x 2 tokens."""
SMALL = noise(SIDE, SIDE, seed=1)
TALL = noise(SIDE - 2, 2 * SIDE + 9, seed=2)


def datum(loss: str, parts: Sequence[int | tuple[Image.Image, int, str]], seed: int) -> Datum:
    """Runs of random tokens, so many each, and pictures with their numbers of tokens; targets as the cookbook makes them."""
    draw = np.random.default_rng(seed)
    tokens, pictures = np.zeros(0, np.int32), []
    for part in parts:
        if isinstance(part, int):
            tokens = np.append(tokens, draw.integers(0, TEXT_IDS, part).astype(np.int32))
        else:
            image, length, kind = part
            pictures.append(sent(image, len(tokens), length, kind))
            tokens = np.append(tokens, np.zeros(length, np.int32))
    values = {
        "weights": draw.uniform(-0.2, 1, len(tokens)),
        "logprobs": draw.uniform(-6, -3.5, len(tokens)),
        "advantages": draw.normal(size=len(tokens)),
    }
    inputs: dict[str, Any] = {"target_tokens": np.append(tokens[1:], draw.integers(0, TEXT_IDS)).astype(np.int64)}
    inputs |= {name: values[name].astype(np.float32) for name in FORMS[loss].required}
    return Datum(tokens, inputs, tuple(pictures))


def data_of(loss: str) -> list[Datum]:
    wide, small, tall = (WIDE, 6, "png"), (SMALL, 1, "png"), (TALL, 2, "jpeg")
    alike = [datum(loss, [18, shown, 4], seed=7) for shown in (small, (noise(SIDE, SIDE, seed=3), 1, "png"))]
    return [
        datum(loss, [3, wide, 4, small, 2, wide, 1], seed=1),
        datum(loss, [5], seed=2),
        datum(loss, [1, tall], seed=3),  # ends with a picture
        *alike,
    ]


CASES: list[tuple[str, dict[str, float], list[Datum]]] = [
    ("cross_entropy", {}, data_of("cross_entropy")),
    ("ppo", {}, data_of("ppo")),
]


def by_peft(model: Any, processor: Any, loss: str, data: list[Datum]) -> dict[str, Any]:
    """One datum after another in float64, with transformers' own processor of the pictures as they were sent."""
    model.zero_grad()
    total, size, log_probs = torch.zeros((), dtype=torch.float64), 0.0, []
    for one in data:
        ids, more = torch.tensor(one.tokens)[None].long(), {}
        if one.pictures:
            for picture in one.pictures:
                ids[0, picture.place : picture.place + picture.length] = IMAGE
            read = processor([Image.open(BytesIO(picture.content)) for picture in one.pictures], return_tensors="pt")
            grids = read["image_grid_thw"]
            assert (grids.prod(1) // 4).tolist() == [picture.length for picture in one.pictures]
            more = {"pixel_values": read["pixel_values"].double(), "image_grid_thw": grids}
            more["mm_token_type_ids"] = (ids == IMAGE).int()
        logits = model(input_ids=ids, **more).logits[0]
        targets = torch.tensor(one.inputs["target_tokens"])
        of_targets = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        columns = {name: torch.tensor(values).double() for name, values in one.inputs.items() if name != "target_tokens"}
        losses = token_losses(loss, of_targets, Given(columns, FORMS[loss].parameters, torch.zeros_like(targets), 1))
        total, size = total + losses.sum(), size + float(losses.detach().abs().sum())
        log_probs.append(of_targets.detach())
    total.backward()
    gradients = {name: tensor.clone() for name, tensor in adapters.tensors(model, gradients=True).items()}
    return {"loss": float(total.detach()), "size": size, "log_probs": log_probs, "gradients": gradients}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing") / FAMILY
    build_seeing_folder(FAMILY, made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """Adapters, and of each case log-probs, loss and gradients by transformers and peft."""
    from transformers import Qwen2VLImageProcessorPil

    made = adapters.with_adapters(hugging_face(FAMILY), folder)
    own = {name: tensor.clone() for name, tensor in adapters.tensors(made).items()}
    patch = SEEING[FAMILY].patch
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": patch**2 * 4, "longest_edge": 10**6})
    exact = made.double()
    return {"adapters": own, "cases": [by_peft(exact, processor, loss, data) for loss, _, data in CASES]}


@pytest.mark.parametrize("layout", ["tp2+sp", "dp2", pytest.param("pp2", marks=pytest.mark.exhaustive),
                                    pytest.param("cp2", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_pictures_are_seen_as_transformers_and_peft_see_them(
    world: World, folder: Path, reference: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    of_ranks = layout_for(layout, experts=False)
    assert of_ranks is not None
    arguments = (folder, of_ranks, adapters.LORA, reference["adapters"], CASES, tmp_path / "media")
    answers = world.call(losses_and_gradients, *arguments, size=of_ranks.world_size)
    for number, wanted in enumerate(reference["cases"]):
        for which in ("seen", "passed"):
            found = answers[0][number][which]
            assert found.metrics["loss:sum"] == pytest.approx(wanted["loss"], abs=TOLERANCE * wanted["size"])
            for output, log_probs in zip(found.outputs, wanted["log_probs"], strict=True):
                np.testing.assert_allclose(output["logprobs"], log_probs, rtol=TOLERANCE, atol=TOLERANCE)
        gradients = joined(answer[number]["gradients"] for answer in answers)
        gradients = {name: tensor for name, tensor in gradients.items() if "visual" not in name}
        off = deviations(gradients, wanted["gradients"], lambda tensor: tensor.abs().max().clamp_min(1e-30))
        assert max(off.values()) < TOLERANCE, {name: value for name, value in off.items() if value > TOLERANCE}


def bomb(width: int, height: int) -> bytes:
    """A PNG of that many pixels in few bytes: all of them black."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress(b"\0" * min((1 + 3 * width) * height, 10**6), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PNG = sent(SMALL, 2, 1).content
BAD: list[tuple[Picture | list[Picture], str]] = [
    (Picture(2, 1, "png", bomb(8000, 8000)), "picture 1 is 8000x8000 pixels; it must have at most 33554432 in all"),
    (Picture(2, 1, "png", bomb(60000, 60000)), "picture 1 has far more than 33554432 pixels"),
    ([Picture(2 + n, 1, "png", bomb(5000, 5000 + n)) for n in range(11)], "have 275276024 pixels; they must have at most 2684"),
    (Picture(2, 1, "jpeg", PNG), "picture 1 has the format jpeg, but it is none that can be read"),
    (Picture(2, 1, "png", b"no picture"), "picture 1 has the format png, but it is none that can be read"),
    (Picture(2, 1, "png", b"\0" * (module.MOST_BYTES + 1)), "picture 1 has 16777217 bytes; it must have at most 16777216"),
]


def showing(*pictures: Picture) -> Datum:
    length = max(picture.place + picture.length for picture in pictures) + 1
    inputs: dict[str, Any] = {"target_tokens": np.zeros(length, np.int64), "weights": np.zeros(length, np.float32)}
    return Datum(np.zeros(length, np.int32), inputs, pictures)


@pytest.mark.parametrize(("wrong", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_what_is_too_large_or_no_picture_is_refused_before_it_is_decoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, sentence: str
) -> None:
    def decoded(*_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("megarl.options.pictures.picture_keeper.upright_rgb", decoded)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    limits = DatumLimits(124, 64, served_pictures(folder, tmp_path))
    pictures = wrong if isinstance(wrong, list) else [wrong]
    with pytest.raises(RequestError, match=sentence):
        lay([showing(sent(SMALL, 2, 1)), showing(*pictures)], "cross_entropy", limits, replicas=1)
    assert [*tmp_path.iterdir()] == []


def test_a_picture_that_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    limits = DatumLimits(124, 64, served_pictures(folder, tmp_path))
    good, cut = sent(SMALL, 2, 1), Picture(3, 1, "png", PNG[: len(PNG) // 2])
    thin = sent(noise(1, 300), 2, 1)
    for pictures, sentence in (
        ((good, cut), "datum 1: picture 2 cannot be decoded, it is damaged or cut off"),
        (
            (replace(good, length=2),),
            "picture 1 has expected_tokens 2, and is 1 tokens of the model, which sees it as 32x32 pixels",
        ),
        ((sent(SMALL, 0, 1),), "datum 1 begins with a picture; a token must come before it"),
        ((thin,), "datum 1: picture 1 is .* pixels, but a side must be at most 200 times the other"),
    ):
        with pytest.raises(RequestError, match=sentence):
            lay([showing(good), showing(*pictures)], "cross_entropy", limits, replicas=1)


def test_equal_bytes_are_decoded_once_and_files_stay_for_the_request_that_shows_them(folder: Path, tmp_path: Path) -> None:
    pictures = served_pictures(folder, tmp_path, kept_bytes=1)
    decoded, keep = [], pictures._keep
    pictures._keep = lambda what, picture: decoded.append(what) or keep(what, picture)
    one, other = sent(SMALL, 2, 1), sent(WIDE, 4, 6)
    shown = pictures.of_data([showing(one), showing(replace(one, place=5), other)])
    assert decoded == ["datum 0: picture 1", "datum 1: picture 2"]
    assert [[media.place for media in of_datum] for _, of_datum in shown] == [[2], [5, 4]]
    assert shown[1][0].tokens.tolist() == [0, 0, 0, 0, *[IMAGE] * 6, 0]
    assert len([*tmp_path.iterdir()]) == 2
    pictures.of_data([showing(other)])
    assert len(decoded) == 2
    [left] = tmp_path.iterdir()
    assert left.stem == shown[1][1][1].digests[0], "there is no room for what this request does not show"


def test_engines_are_given_the_pixels_that_ranks_see(folder: Path, tmp_path: Path) -> None:
    ranks, engines = (served_pictures(folder, tmp_path / side) for side in ("ranks", "engines"))
    shown = (sent(WIDE, 1, 6), sent(TALL, 8, 2, "jpeg"))
    found = engines.final(shown)
    [(_, media)] = ranks.of_data([showing(*shown)])
    assert [(picture.place, picture.length, picture.format) for picture in found] == [(1, 6, "png"), (8, 2, "png")]
    for picture, seen in zip(found, media, strict=True):
        with Image.open(BytesIO(picture.content)) as image, Image.open(seen.files(tmp_path / "ranks")[0]) as kept:
            assert image.size == kept.size
            assert image.tobytes() == kept.tobytes()
    with pytest.raises(RequestError, match="prompt: picture 1 has expected_tokens 5, and is 6 tokens"):
        engines.final([replace(shown[0], length=5)])


def test_servers_are_asked_with_final_pictures_and_not_at_all_with_wrong_ones(folder: Path, tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        sampler.pictures = served_pictures(folder, tmp_path)
        with pytest.raises(RequestError, match="pictures of the prompt make it 0 tokens for the model; it has 8"):
            await sampler.sample(request([5, *[0] * 6, 6], pictures=(sent(WIDE, 1, 6),)))
        [body] = engines[0].server.asked
        [url] = body["image_data"]
        with Image.open(BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
            assert image.size == (3 * SIDE, 2 * SIDE)
        with pytest.raises(RequestError, match="prompt: picture 1 has expected_tokens 5, and is 6 tokens"):
            await sampler.sample(request([5, *[0] * 5, 6], pictures=(sent(WIDE, 1, 5),)))
        assert len(engines[0].server.asked) == 1

    run(scenario)
