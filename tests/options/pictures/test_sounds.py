"""Sounds of rows: tokens, frames and ids are those of transformers' processor; what cannot be heard is refused by name."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.media import Media
from megarl.data.row_media import open_media
from megarl.data.sample import Prompt
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, ModelError, PictureError
from megarl.models.registry import architecture_for
from megarl.options.pictures.sounds import Sounds, load_sound_rules
from tests import hearing
from tests.data.seeing_folders import seeing_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, and sounds in its folder `media`."""
    path = tmp_path_factory.mktemp("hearing") / "model"
    hearing.build_hearing_folder(path)
    hearing.sounds(path / "media")
    hearing.save_tokenizer(path)
    return path


def prompts_of(folder: Path, path: Path, rows: list[dict[str, Any]], **fields: Any) -> list[Prompt]:
    train = SourceConfig(source="jsonl", path="rows.jsonl")
    data = DataConfig(**{"train": train, "prompt_key": "problem"} | fields)
    tokenizer = load_tokenizer(str(folder))
    reader = open_media(data, str(folder), tokenizer, path / "run")
    return PromptBuilder(tokenizer, data, (), reader).build(rows, prefix="train")


def wav(seconds: float = 0.5, rate: int = hearing.RATE, channels: int = 1, **settings: Any) -> bytes:
    content, samples = BytesIO(), np.random.default_rng(3).uniform(-0.5, 0.5, (int(seconds * rate), channels))
    soundfile.write(content, samples, rate, **{"format": "WAV"} | settings)
    return content.getvalue()


def test_a_prompt_is_the_processors_token_for_token_and_frame_for_frame(folder: Path, tmp_path: Path) -> None:
    """A path, bytes of two channels, a struct and decoded samples, at marks and parts of messages."""
    short, decoded = folder / "media" / "short.wav", np.linspace(-0.5, 0.5, 16_100, dtype=np.float32)
    sounds: list[Any] = [
        str(short),
        wav(1.03, channels=2),
        {"bytes": wav(0.2), "path": None},
        {"array": decoded, "sampling_rate": 16_000},
    ]
    row = {"problem": "w3 <audio> w4 <audio> w5 <audio> <audio>", "audios": sounds}
    part = [{"type": "text", "text": "w7 "}, {"type": "audio", "audio": str(short)}]
    first, second = prompts_of(folder, tmp_path, [row, {"problem": [{"role": "user", "content": part}]}])
    files = [short, BytesIO(sounds[1]), BytesIO(sounds[2]["bytes"])]
    waves = [*(soundfile.read(file, dtype="float32", always_2d=True)[0].mean(1) for file in files), decoded]
    extractor = transformers.WhisperFeatureExtractor(**hearing.EXTRACTOR)
    read = [extractor(wave, sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True) for wave in waves]
    counts = [int(_get_feat_extract_output_lengths(of_one["attention_mask"].sum())) for of_one in read]

    def sound(count: int) -> list[int]:
        return [hearing.START, *[hearing.AUDIO] * count, hearing.END]

    ids = [3, *sound(counts[0]), 4, *sound(counts[1]), 5, *sound(counts[2]), *sound(counts[3])]
    assert first.prompt_ids == ids
    assert second.prompt_ids == [7, *sound(counts[0])]
    assert [media.tokens for media in first.media] == counts
    assert {type(path) for path in first.row["audios"]} == {str}
    played = Sounds(tmp_path / "run" / "media", load_sound_rules(folder, hearing.hearing()))
    for media, of_one in zip(first.media, read, strict=True):
        assert first.prompt_ids[media.place : media.place + media.tokens] == [hearing.AUDIO] * media.tokens
        expected = torch.as_tensor(of_one["input_features"][0]).T
        torch.testing.assert_close(played.patches(media), expected, rtol=0, atol=0)


def test_tokens_are_transformers_for_every_length() -> None:
    lengths = torch.arange(1, 1000)
    expected = _get_feat_extract_output_lengths(lengths).tolist()
    assert [hearing.hearing().tokens_of(int(length)) for length in lengths] == expected


def test_sounds_are_placed_as_text() -> None:
    """Tokens of a sound go one position on, in transformers too."""
    [unit] = [unit for unit in hearing.units() if len(unit.media) == 2]
    ids = unit.prompt_ids[None]
    positions, _ = hearing.hugging_face().get_rope_index(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(positions[:, 0].long(), torch.arange(ids.shape[1]).expand(3, -1))


BAD = {
    "another rate": (wav(rate=8000), r"has a sampling rate of 8000 Hz; it must be 16000 Hz, the model's: resample it first"),
    "no file": ("gone.wav", r"\('gone.wav'\) is no file"),
    "no sound": (b"no sound at all", r"cannot be decoded as a sound \(.*\); it must be a WAV or FLAC file"),
    "cut off": (wav()[:40], r"cannot be decoded as a sound|has 0 samples"),
    "empty": (b"", r"is empty"),
    "too short": (wav(0.01), r"has 160 samples; it must have at least 400, which is one frame"),
    "not finite": ({"array": np.full(800, np.nan), "sampling_rate": 16_000}, r"has samples that are not finite"),
    "decoded at another rate": ({"array": np.zeros(800), "sampling_rate": 22_050}, r"has a sampling rate of 22050 Hz; it must"),
    "two channels decoded": (
        {"array": np.zeros((2, 800)), "sampling_rate": 16_000},
        r"is an array of shape \[2, 800\]; it must",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sound_that_cannot_be_heard_is_refused_by_row_and_number(name: str, folder: Path, tmp_path: Path) -> None:
    value, sentence = BAD[name]
    rows = [{"problem": "w1", "audios": None}, {"problem": "<audio> w1", "audios": [value]}]
    with pytest.raises(PictureError, match=r"row 2|line 2|row 1") as caught:
        prompts_of(folder, tmp_path, rows)
    message = str(caught.value)
    assert "sound 1 of 1" in message
    assert message.endswith("mend the row, or set data.bad_pictures to 'drop'")
    assert len(prompts_of(folder, tmp_path, rows, bad_pictures="drop")) == 1
    with pytest.raises(PictureError, match=sentence):
        prompts_of(folder, tmp_path, rows)


def test_marks_and_sounds_must_go_together_and_tokens_of_sounds_are_no_text(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"has 0 sounds under 'audios', but 1 place for them \(<audio>\)"):
        prompts_of(folder, tmp_path, [{"problem": "<audio> w1"}])
    with pytest.raises(PictureError, match=r"has the text '<\|audio_pad\|>' in the user's turn, which stands for a sound"):
        prompts_of(folder, tmp_path, [{"problem": "<|audio_pad|> w1"}])
    with pytest.raises(
        DataError, match=r"has nothing under 'audios' \(data.audio_key\), but under 'audio'; set data.audio_key to"
    ):
        prompts_of(folder, tmp_path, [{"problem": "w1", "audio": wav()}])


def test_models_that_hear_see_nothing_and_others_hear_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has pictures under 'images' \(data.image_key\), but the model takes none; train a vision"
    ):
        prompts_of(folder, tmp_path, [{"problem": "w1", "images": ["a.png"]}])
    sees = seeing_folder(tmp_path / "sees", "qwen3_vl")
    with pytest.raises(DataError, match=r"has sounds under 'audios' .* takes none; train a model that hears \(docs/audio.md\)"):
        prompts_of(sees, tmp_path, [{"problem": "How?", "audios": ["a.wav"]}])


def test_a_kept_sound_of_another_length_is_refused(folder: Path) -> None:
    played = Sounds(folder / "media", load_sound_rules(folder, hearing.hearing()))
    with pytest.raises(DataError, match=r"short.wav' has 5 tokens, but its prompt has 4 for it"):
        played.patches(Media("audio", ("short",), (1, 1, 4), 0, 4))
    with pytest.raises(DataError, match=r"gone.wav', which a prompt shows, cannot be read"):
        played.patches(Media("audio", ("gone",), (1, 1, 4), 0, 4))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("n_window", 40, r"n_window is 40; it must be 50: transformers counts 13 tokens"),
        ("output_dim", 16, r"the tower's features have 16 numbers, but the decoder's hidden_size is 32"),
        ("d_model", 15, r"audio_config.d_model is 15; it must be even"),
        ("n_window_infer", 150, r"audio_config.n_window_infer is 150; it must be a multiple of 100"),
        ("dropout", 0.1, r"dropout is 0.1; it must be 0.0"),
    ],
)
def test_a_tower_that_is_not_known_is_refused_by_its_field(field: str, value: Any, sentence: str) -> None:
    config = hearing.hf_config().to_dict() | {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"]}
    config["audio_config"] = config["audio_config"] | {field: value}
    with pytest.raises(ModelError, match=sentence):
        architecture_for(config).gpt_kwargs(config)
        architecture_for(config).weight_map(config)


def test_a_folder_of_the_whole_model_says_what_to_save() -> None:
    config = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
    with pytest.raises(ModelError, match=r"megarl trains its thinker alone; save that as a folder of its own \(docs/audio.md"):
        architecture_for(config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"feature_size": 80},
            r"its feature extractor's feature_size is 80, but config.json's audio_config has num_mel_bins 128",
        ),
        ({"dither": 0.1}, r"its feature extractor's dither is 0.1, which draws noise; it must be 0"),
    ],
)
def test_an_extractor_for_another_tower_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(hearing.EXTRACTOR | change))
    with pytest.raises(ModelError, match=sentence):
        load_sound_rules(tmp_path, hearing.hearing())
