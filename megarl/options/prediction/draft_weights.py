"""The places at which an SGLang server's draft has the weights of the policy's layer for multi-token prediction; runs
inside the server.

SGLang (0.5.23) has the layer as a model of its own beside the policy, with the policy's embedding and output layer, and calls
the loader for the policy first, then for the draft, with the same payload. What is the draft's waits from the one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.weights.rank_plan import SliceKey
from megarl.weights.sglang_places import DERIVED_FROM, ModelParameters, box
from megarl.weights.sglang_targets import EVERY_RANK

SentPlace = tuple[tuple[Any, ...], str]
"""The fields of a `SliceKey`, and the dtype in which it was sent."""

_BEHIND_THE_DECODER = re.compile(r"model\.layers\.\d+\.")
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_PROJECTIONS = ("model.eh_proj.weight", "fc.weight")
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""The draft's parameters that are the policy's own."""


def draft_name(name: str) -> str:
    """The draft's name of a tensor that a checkpoint has as one of the layer: GLM-4.5's and DeepSeek-V3's, or Qwen3-Next's."""
    if name.startswith("mtp."):
        rest = name.removeprefix("mtp.")
        return f"model.{rest}" if rest.startswith(("layers.", "norm.")) else rest
    rest = _BEHIND_THE_DECODER.sub("", name, count=1)
    return f"model.{rest}" if rest.startswith(_OWN) else f"model.decoder.{rest}"


def is_draft(tensors: Mapping[str, Any]) -> bool:
    """Return whether these are the parameters of a draft."""
    return any(name in tensors for name in _PROJECTIONS)


def of_the_draft(model: Any) -> tuple[str, ...]:
    """What names of tensors begin with that are not a policy's of SGLang's, but its draft's."""
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    return ("mtp.",) if layers is None else (f"model.layers.{layers}.", "mtp.")


@dataclass
class PolicyAnswer:
    """Digests that the policy answered of all `boxes`, "" where they are the draft's, and what is not covered."""

    boxes: list[SliceKey]
    digests: list[str]
    uncovered: list[str]
    send: Callable[[list[SliceKey], list[str], list[str]], None]
    """Answers whoever asked."""


@dataclass
class Waiting:
    """Weights that came for the draft, and questions about it, in the call for the policy."""

    boxes: list[tuple[SliceKey, torch.Tensor]] = field(default_factory=list)
    whole: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    asked: list[tuple[int, SliceKey, str]] = field(default_factory=list)
    """Place among all digests, box, and the dtype in which it was sent."""
    answer: PolicyAnswer | None = None


_waiting = Waiting()
"""For the call by which SGLang has the draft loaded, which follows."""


def keep(key: SliceKey, values: torch.Tensor) -> None:
    """Have `values` of the draft wait for it."""
    if key.engine_rank == EVERY_RANK:
        _waiting.whole.append((key.tensor, values))
    else:
        _waiting.boxes.append((key, values))


def of_the_policy(parameters: ModelParameters, boxes: Sequence[SentPlace]) -> list[SentPlace]:
    """Leave out the boxes that are the draft's."""
    return [entry for entry in boxes if not entry[0][0].startswith(parameters.of_draft)]


def answer_later(
    parameters: ModelParameters,
    boxes: Sequence[SentPlace],
    digests: Sequence[str],
    uncovered: list[str],
    send: Callable[[list[SliceKey], list[str], list[str]], None],
) -> None:
    """Have the draft answer for itself and for the policy, whose boxes have these `digests` in their order."""
    left = iter(digests)
    is_draft = [place[0].startswith(parameters.of_draft) for place, _ in boxes]
    keys = [SliceKey(*place) for place, _ in boxes]
    _waiting.answer = PolicyAnswer(keys, ["" if draft else next(left) for draft in is_draft], uncovered, send)
    dtypes = (dtype for _, dtype in boxes)
    numbered = enumerate(zip(keys, dtypes, is_draft, strict=True))
    _waiting.asked = [(number, key, dtype) for number, (key, dtype, draft) in numbered if draft]


def load_draft(
    model: Any, parameters: ModelParameters, digests_of: Callable[[Sequence[SentPlace]], tuple[list[str], list[str]]]
) -> None:
    """Give the draft what came for it in the call before, and answer what was asked of it.

    `digests_of` boxes gives their digests, and which parameters they do not cover.
    """
    global _waiting
    waiting, _waiting = _waiting, Waiting()
    for key, values in waiting.boxes:
        box(parameters, key._replace(tensor=draft_name(key.tensor))).copy_(values)
    if waiting.whole:
        model.load_weights(waiting.whole)
    if any(DERIVED_FROM in key.tensor for key, _ in waiting.boxes):
        model.post_load_weights(is_nextn=True)
    if waiting.answer is None:
        return
    answer = waiting.answer
    boxes: list[SentPlace] = [(tuple(key._replace(tensor=draft_name(key.tensor))), dtype) for _, key, dtype in waiting.asked]
    draft_digests, missing = digests_of(boxes)
    for (index, _, _), draft_digest in zip(waiting.asked, draft_digests, strict=True):
        answer.digests[index] = draft_digest
    answer.send(answer.boxes, answer.digests, answer.uncovered + [name for name in missing if name not in SHARED])
