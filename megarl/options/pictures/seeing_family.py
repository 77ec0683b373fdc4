"""A family that sees, made of a text family and of what its config says of the tower.

Hub checkpoints of the families differ in the names of tower and decoder, as do folders that versions of transformers wrote: any
of them is read, and the hub's are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.fused_experts import FusedExperts
from megarl.models.packings import Copy
from megarl.models.rope import Rope
from megarl.models.vision import TOWER, Vision
from megarl.models.weight_map import Rule, WeightMap

ROPE_KINDS = ("default", "linear", "llama3")
"""Scalings that positions on three axes have been compared with transformers under."""


def seeing(
    name: str,
    hf_class: str,
    text: Architecture,
    text_config: Callable[[HFConfig], HFConfig],
    vision: Callable[[HFConfig], Vision],
    *,
    prefixes: tuple[str, str],
    tower_name: Callable[[str], str] | None = None,
    output: str = "lm_head.",
    fused_experts: Callable[[HFConfig], FusedExperts] | None = None,
    has_windows: bool = False,
) -> Architecture:
    """A family whose decoder is `text`'s; `prefixes` are the hub's names of tower and decoder (`model.` in text families).

    `tower_name` gives the hub's name of a tensor of `Vision.shapes`, where it is more than the prefix before it; `output` is
    what the hub calls the output layer. `has_windows`: transformers computes those that `text` reads, as in the text family.
    """
    of_tower = tower_name or (lambda tensor: prefixes[0] + tensor)

    def checked(hf_config: HFConfig) -> Vision:
        parsed, hidden = vision(hf_config), text_config(hf_config).get("hidden_size")
        if parsed.out != hidden:
            raise ModelError(
                f"config.json: the tower's features have {parsed.out} numbers, but the decoder's hidden_size is {hidden}"
            )
        return parsed

    def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
        if checked(hf_config).mrope is not None:
            Rope.from_hf(text_config(hf_config), kinds=ROPE_KINDS)
        return text.gpt_kwargs(text_config(hf_config))

    def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
        kwargs = text.transformer_config_kwargs(text_config(hf_config))
        return kwargs if has_windows else _without_windows(kwargs)

    def weight_map(hf_config: HFConfig) -> WeightMap:
        of_text = text.weight_map(text_config(hf_config))
        tower = [
            Rule(TOWER + tensor, (of_tower(tensor),), Copy(shape), stage="first")
            for tensor, shape in checked(hf_config).shapes.items()
        ]
        return replace(
            of_text,
            rules=(*tower, *(_renamed(rule, prefixes[1], output) for rule in of_text.rules)),
            left_out=_under(prefixes[1], output, of_text.left_out),
            prediction=None,
        )

    return Architecture(
        name=name,
        hf_classes=(hf_class, hf_class.replace("ForConditionalGeneration", "ForSequenceClassification")),
        transformer_config_kwargs=transformer_config_kwargs,
        gpt_kwargs=gpt_kwargs,
        weight_map=weight_map,
        sglang=SglangFacts(
            refusal=lambda hf_config: text.sglang.refusal(text_config(hf_config)),
            arguments={**text.sglang.arguments, "mm_enable_dp_encoder": True},  # every rank then has the whole tower
        ),
        hub=text.hub,
        text_config=text_config,
        vision=checked,
        other_names=_other_names(*prefixes),
        fused_experts=fused_experts,
    )


def _without_windows(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "window_size" in kwargs:
        raise ModelError(
            f"config.json: sliding_window is {kwargs['window_size'][0] + 1}, but transformers' decoder of this family attends "
            "to all tokens; use_sliding_window must be false"
        )
    return kwargs


def _other_names(tower: str, decoder: str) -> tuple[tuple[str, str], ...]:
    """What names may begin with, and what the hub's begin with then; the first that fits counts."""
    return (("model.visual.", tower), ("model.language_model.", decoder), ("visual.", tower), ("model.", decoder))


def _renamed(rule: Rule, decoder: str, output: str) -> Rule:
    return replace(rule, hf_names=_under(decoder, output, rule.hf_names))


def _under(decoder: str, output: str, names: Iterable[str]) -> tuple[str, ...]:
    def renamed(name: str) -> str:
        return name.replace("model.", decoder, 1) if name.startswith("model.") else name.replace("lm_head.", output, 1)

    return tuple(map(renamed, names))
