"""Reading of the config of a family that sees: the decoder's part, the tower's, positions of three axes and placeholders.

The decoder is a text family's, told by the text part of `config.json`; the tower is described by `Vision`
(`models/vision.py`). The configs of transformers 4 and 5 differ in where they have the decoder's fields: both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.vision import Mrope

Shapes = dict[str, tuple[int, ...]]
"""Tensors by the name that they have in the tower."""


@dataclass(frozen=True)
class TextConfig:
    """The part of a family's config with the decoder's fields: beside `vision_config` (transformers 4), or in
    `text_config` (5).

    `defaults` are those of transformers that differ from a text family's. `tied_in_text`: embeddings are also tied where only
    the text's config says so, as transformers before 5 wrote it.
    """

    defaults: Mapping[str, Any]
    tied_in_text: bool

    def __call__(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """The config that a text family reads.

        Raises:
            ModelError: `text_config` is no object.
        """
        nested = _object(hf_config, "text_config", hf_config)
        tied = bool(hf_config.get("tie_word_embeddings")) or (self.tied_in_text and bool(nested.get("tie_word_embeddings")))
        top_level: dict[str, Any] = {
            name: hf_config[name] for name in ("architectures", "id2label", "quantization_config") if name in hf_config
        }
        text_fields = {name: value for name, value in nested.items() if value is not None and name != "vision_config"}
        config: dict[str, Any] = {**self.defaults, **text_fields, **top_level, "tie_word_embeddings": tied}
        for field in ("rope_parameters", "rope_scaling"):
            if isinstance(config.get(field), Mapping):
                config[field] = _without_axes(config[field])
        return config


def mrope_of(hf_config: dict[str, Any], *, default: tuple[int, int, int], interleaved: bool, head_dim: int) -> Mrope:
    """Rotary angles of a config; `head_dim` is how many of the dimensions of a decoder's head rotate.

    Raises:
        ModelError: the sections are not those of half of these dimensions, or lie otherwise than the family's.
    """
    text = _object(hf_config, "text_config", hf_config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section") or default)
    if len(sections) != 3 or any(not isinstance(n, int) or n < 0 for n in sections) or sum(sections) * 2 != head_dim:
        raise ModelError(
            f"config.json: mrope_section is {list(sections)}; it must be three numbers that add up to half of "
            f"a head's {head_dim} dimensions that rotate"
        )
    refuse(rope, "mrope_interleaved", interleaved, "transformers computes no other angles for this family")
    mrope = Mrope((sections[0], sections[1], sections[2]), interleaved)
    mrope.axes()
    return mrope


def vision_config(hf_config: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config` with transformers' defaults for what it lacks.

    Raises:
        ModelError: it is no object, or patches are not squares.
    """
    section = _object(hf_config, "vision_config", {})
    config = with_defaults(section, defaults)
    if "in_chans" in section:  # the hub's name; transformers reads in_channels alone
        refuse(section, "in_chans", config["in_channels"], "transformers reads in_channels alone")
    return config


def placeholders(hf_config: dict[str, Any], image: int = 151655, video: int = 151656) -> dict[str, Any]:
    """The ids that stand in a prompt for an image's and a video's features, with the family's own as defaults."""
    return {
        "image_token": size(hf_config, "image_token_id", default=image, least=0),
        "video_token": size(hf_config, "video_token_id", default=video, least=0),
    }


def linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    """A linear layer."""
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def layer_norm(name: str, width: int) -> Shapes:
    """A LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def blocks(depth: int, of_block: Callable[[str], Shapes]) -> Shapes:
    """The tensors of `depth` equal layers; `of_block` takes what a layer's names begin with."""
    return {name: shape for number in range(depth) for name, shape in of_block(f"blocks.{number}.").items()}


def _object(hf_config: dict[str, Any], field: str, default: dict[str, Any]) -> dict[str, Any]:
    value = hf_config.get(field)
    if value is None:
        return default
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {field} is {value!r}; it must be an object")
    return dict(value)


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters as a text model has them: what transformers 4 calls `mrope` are the default frequencies."""
    plain = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {name: "default" if name in ("type", "rope_type") and value == "mrope" else value for name, value in plain.items()}
