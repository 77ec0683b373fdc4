"""A run made small, with the layouts, placement, engines, schedule and transports of another.

Its model is one of the same architecture with random weights (`models/shrunk.py`), its rows are sums.
"""

from __future__ import annotations

import json
import math
from itertools import cycle
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig, Config, SupervisedConfig, parse_config
from megarl.config.load import parse_supervised_config
from megarl.models.architecture import HFConfig
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.shrunk import chunk_layers, shrunk_config, shrunk_layout
from megarl.models.transformers_names import auto_class
from megarl.option_list import functions
from megarl.system.hidden_bars import hide_bars
from megarl.weights.run_plan import engine_target

STEPS = 2
STEP = 0.01
"""Learning rate: what an engine that missed an update computes is then far from what the trainer does."""
ROLE = {"max_tokens_per_micro_batch": 256, "threads_per_rank": 1}
ENGINE_ARGUMENTS = ("ep_size", "attn_dp_size", "dp_size", "enable_dp_attention")
"""Names in `rollout.engine_args` that say how an engine is laid out."""
WORDS = ("<pad>", "<eos>", "<unk>", "+", "=", *"0123456789")
MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens of models that see, behind the words, by their fields in config.json. No row of a small run shows a picture."""
PICTURES = {
    "patch_size": ("patch_size", 14),
    "temporal_patch_size": ("temporal_patch_size", 2),
    "merge_size": ("spatial_merge_size", 2),
}
"""Settings of the image processor, the tower's fields for them, and what these are where config.json does not say."""
SOUNDS = {
    "audio_token_id": "image_token_id",
    "audio_start_token_id": "vision_start_token_id",
    "audio_end_token_id": "vision_end_token_id",
}
"""Tokens of models that hear by their fields, and the tokens above that stand for them."""
SUMS = [(f"{a} + {b} =", str(a + b)) for a in range(10) for b in range(10)]


def small_run(config: AnyConfig, folder: Path, ray_address: str) -> AnyConfig:
    """The run made small, with its model and its rows written into `folder`."""
    if config.sampling is not None:
        return _small_rl(config, folder, ray_address)
    return _small_supervised(config, folder, ray_address)


def _small_rl(config: Config, folder: Path, ray_address: str) -> Config:
    rollout = config.rollout
    sequences = config.algorithm.mini_batches * math.lcm(*(layout.dp for layout in config.layouts.values()))
    prompts, schedule = math.lcm(sequences, rollout.engines), rollout.schedule.model_dump(mode="json")
    engine_args = {name: value for name, value in rollout.engine_args.items() if name in ENGINE_ARGUMENTS}
    target = engine_target(rollout.tp, engine_args)
    _write_model(folder / "model", _small_model(config, target.ranks, target.ep))
    tree = _common(config, folder, ray_address) | {
        "algorithm": config.algorithm.model_dump(mode="json") | {"shaping": {}},
        "data": {"train": _rows(folder, [{"question": q, "answer": a} for q, a in SUMS]), "max_prompt_tokens": 32},
        "rollout": {
            "engine": rollout.engine,
            "engines": rollout.engines,
            "tp": rollout.tp,
            "weight_transport": rollout.weight_transport,
            "schedule": schedule | {"over_sample": min(rollout.schedule.over_sample, prompts)},
            "engine_args": engine_args,
            "prompts_per_step": prompts,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "threads": 1,
        },
        "rewards": [{"name": "fuzzy_text"}],  # which tells wrong answers apart: the weights must move
    }
    for shrink in functions("small", "shrink"):
        shrink(config, tree, folder / "model", vocabulary=len(WORDS))
    if config.uses_critic:
        tree["critic"] = ROLE | {"layout": shrunk_layout(config.critic.layout, _chunk_layers(config))}
    return parse_config(tree)


def _small_supervised(config: SupervisedConfig, folder: Path, ray_address: str) -> SupervisedConfig:
    _write_model(folder / "model", _small_model(config))
    by_steps = config.objective.name == "process_reward_model"
    rows = [
        {"prompt": q, "response": a, "chosen": a, "rejected": f"{a} {a}", "steps": [a], "label": [1.0] if by_steps else odd}
        for odd, (q, a) in zip(cycle([True, False]), SUMS, strict=False)
    ]
    tree = _common(config, folder, ray_address) | {
        "objective": config.objective.model_dump(mode="json"),
        "data": {"train": _rows(folder, rows), "rows_per_step": 2 * config.policy.layout.dp, "max_tokens": 64},
    }
    return parse_supervised_config(tree)


def _common(config: AnyConfig, folder: Path, ray_address: str) -> dict[str, Any]:
    """The sections that both kinds of run have."""
    run = {"name": "run", "folder": str(folder), "steps": STEPS, "save_every": STEPS, "max_restarts": 0, "resume": "never"}
    tree = {
        "run": run,
        "model": {"path": str(folder / "model"), "dtype": "float32", "recompute": config.model.recompute},
        "policy": ROLE | {"layout": shrunk_layout(config.policy.layout, _chunk_layers(config)), "optimizer": {"lr": STEP}},
        "resources": {"placement": config.resources.placement, "ray_address": ray_address},
    }
    if config.reference.layout is not None:
        tree["reference"] = {"layout": shrunk_layout(config.reference.layout, _chunk_layers(config))}
    return tree


def _rows(folder: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    """The source of these rows, written into `folder`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "path": str(path)}


def _small_model(config: AnyConfig, engine_ranks: int = 1, engine_ep: int = 1) -> HFConfig:
    """`config.json` of the small model."""
    sizes = {"engine_ranks": engine_ranks, "engine_ep": engine_ep, "vocab_size": len(WORDS) + len(MARKS)}
    small = shrunk_config(load_hf_config(config.model.path), config.layouts.values(), **sizes)
    ends = {"eos_token_id": WORDS.index("<eos>"), "pad_token_id": WORDS.index("<pad>")}
    if "vision_config" not in small:
        return small | ends
    nested = {"text_config": small["text_config"] | ends} if "text_config" in small else {}
    marks = {field: len(WORDS) + number for number, field in enumerate(MARKS)}
    heard = {field: marks[seen] for field, seen in SOUNDS.items()} if "audio_config" in small else {}
    return small | ends | nested | marks | heard


def _chunk_layers(config: AnyConfig) -> int:
    return chunk_layers(load_hf_config(config.model.path))


def _write_model(folder: Path, hf_config: HFConfig) -> None:
    """A model with random weights and a tokenizer of words and digits."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate((*WORDS, *MARKS.values()))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Fuse()
    tower = hf_config.get("vision_config")
    if tower is not None:
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS.values()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    named = {**hf_config, "model_type": architecture_for(hf_config).name}  # transformers has no other names of a family
    model = auto_class(named).from_config(AutoConfig.for_model(**named), dtype=torch.float32)
    hide_bars()
    model.save_pretrained(folder)
    if tower is not None:
        sizes = {name: tower.get(field, default) for name, (field, default) in PICTURES.items()}
        settings = {"image_processor_type": "Qwen2VLImageProcessor", **sizes}
        if (heard := hf_config.get("audio_config")) is not None:
            settings = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": heard.get("num_mel_bins", 128)}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    fast.save_pretrained(folder)
