"""A tiny random model that hears, and prompts with sounds, for the tests that compare with transformers.

`build_hearing_folder(path)` writes its folder, `hugging_face()` is the same model as a transformers module. `sounds(folder)`
writes a media folder, and `units()` are four prompts that play its sounds: none, one, two, and one shorter than a chunk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from megarl.data.media import Media
from megarl.data.stream import Response, Unit
from megarl.models.hf_folder import write_hf_folder
from megarl.models.registry import architecture_for
from megarl.options.pictures.hearing import Hearing
from tests import families
from tests.families.family import SIZES, SPREAD

AUDIO, START, END = 120, 121, 122
TOKENS = {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>"}
"""Special tokens, from `AUDIO` on in this order, by what config.json calls their ids."""
TEXT_IDS = 120
"""Ids below this are text."""
RATE = 16_000
SECONDS = {"long": 2.3, "exact": 1.0, "short": 0.37}
"""Of the sounds in a media folder; windows of the tower are of two seconds."""
TEXT: dict[str, Any] = {
    "head_dim": 8, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "mlp_only_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
AUDIO_CONFIG: dict[str, Any] = {
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "d_model": 16, "n_window_infer": 200,
    "output_dim": 32, "downsample_hidden_size": 4,
}  # fmt: skip
VISION_CONFIG: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 32,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
}  # fmt: skip
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": RATE, "hop_length": 160,
    "n_fft": 400, "chunk_length": 300, "dither": 0.0, "return_attention_mask": True, "padding_value": 0.0,
}  # fmt: skip


def hf_config(**text: Any) -> Any:
    """transformers' config of the model."""
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config={name: value for name, value in SIZES.items() if name != "tie_word_embeddings"} | TEXT | text,
        audio_config=AUDIO_CONFIG,
        vision_config=VISION_CONFIG,
        **{name: AUDIO + number for number, name in enumerate(TOKENS)},
        vision_start_token_id=AUDIO + len(TOKENS),
        attn_implementation="eager",
        experts_implementation="eager",
    )


def hugging_face(**text: Any) -> Any:
    """The model in float32, in evaluation mode, with seeded random values everywhere."""
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(hf_config(**text)).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.named_parameters():
            centre = 1.0 if ("norm" in name or "ln_" in name) and name.endswith("weight") else 0.0
            value.copy_(centre + SPREAD * torch.randn(value.shape, generator=generator))
    return model


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """What the model's safetensors file holds."""
    return families.by_hub_name(model, iter(model.state_dict().items()))


def hub_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients after a backward pass by hub name, but of the tower that sees."""
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return without_sight(families.by_hub_name(model, iter(gradients.items())))


def without_sight(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but those of the tower that sees."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("visual.")}


def build_hearing_folder(path: Path, **text: Any) -> None:
    """Write the model to the new folder `path`, with the settings of its feature extractor."""
    model = hugging_face(**text)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    write_hf_folder(path, hub_tensors(model).items(), config)
    (path / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))


TEMPLATE = (
    "{%- for message in messages -%}{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' if part.type == 'audio' else part.text -}}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def save_tokenizer(path: Path) -> None:
    """Words `w0` to `w119`, and the tokens around sounds."""
    words = [*(f"w{number}" for number in range(TEXT_IDS)), *TOKENS.values()]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(word, special=True) for word in TOKENS.values()])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", pad_token="w1", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)


@functools.cache
def hearing() -> Hearing:
    """What megarl reads of the config."""
    config = hf_config().to_dict()
    found = architecture_for(config | {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"]}).vision(config)
    assert isinstance(found, Hearing)
    return found


def sounds(folder: Path) -> None:
    """Noise that swells, so that no two frames are alike."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(5)
    for name, seconds in SECONDS.items():
        samples = generator.uniform(-1, 1, int(seconds * RATE)) * np.linspace(0.01, 0.9, int(seconds * RATE))
        soundfile.write(folder / f"{name}.wav", samples.astype(np.float32), RATE, subtype="FLOAT")


def units() -> list[Unit]:
    """Four prompts with two responses each; single-token responses, and masks with holes, are among them."""
    generator = torch.Generator().manual_seed(11)

    def text(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, TEXT_IDS, (length,), generator=generator).tolist()

    found, index = list[Unit](), 0
    for names in ((), ("long",), ("exact", "long"), ("short",)):
        ids, media = text(2, 6), list[Media]()
        for name in names:
            tokens = hearing().tokens_of(int(SECONDS[name] * 100))
            media.append(Media("audio", (name,), (1, 1, tokens), len(ids) + 1, tokens))
            ids += [START, *[AUDIO] * tokens, END, *text(1, 4)]
        responses = []
        for _ in range(2):
            answer = torch.tensor(text(1, 12))
            mask = torch.rand(len(answer), generator=generator) < 0.8
            responses.append(Response(index, answer, mask, {"weights": torch.randn(len(answer), generator=generator) / 20}))
            index += 1
        found.append(Unit(torch.tensor(ids), responses, tuple(media)))
    return found


def inputs(folder: Path, media: Sequence[Media]) -> dict[str, Tensor]:
    """What transformers takes beside ids, by its own feature extractor as its processor calls it for one sound: with more, the
    last frames of shorter ones are of the silence behind them."""
    if not media:
        return {}
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    waves = [soundfile.read(file, dtype="float32")[0] for shown in media for file in shown.files(folder)]
    settings: dict[str, Any] = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_tensors": "pt"}
    read = [extractor(wave, **settings, return_attention_mask=True) for wave in waves]
    features = torch.nn.utils.rnn.pad_sequence([of_one["input_features"][0].T for of_one in read], batch_first=True).mT
    mask = torch.nn.utils.rnn.pad_sequence([of_one["attention_mask"][0] for of_one in read], batch_first=True)
    return {"input_features": features, "feature_attention_mask": mask}


def by_hugging_face(folder: Path, temperature: float) -> dict[str, Any]:
    """Tensors, values by response and gradients: each response alone behind its prompt; log-softmax in float64."""
    model = hugging_face()
    values: dict[int, Tensor] = {}
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            logits = model(ids, attention_mask=torch.ones_like(ids), **inputs(folder, unit.media)).logits
            log_p = (logits[0, len(unit.prompt_ids) - 1 : -1].double() / temperature).log_softmax(-1)
            both = torch.stack([log_p.gather(1, response.token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], -1)
            loss = -(response.columns["weights"] * (both[:, 0] + 0.3 * both[:, 1]))[response.mask].sum()
            loss.backward()
            values[response.index] = both.detach() * response.mask[:, None]
    return {"tensors": without_sight(hub_tensors(model)), "values": values, "gradients": hub_gradients(model)}
