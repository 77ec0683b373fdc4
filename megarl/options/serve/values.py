"""Values that the server's parts hand to each other, and the two sides that compute, a trainer and a sampler.

Names and meanings of fields are the protocol's (package `tinker`). Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class RequestError(Exception):
    """Mistake of a client, in one sentence, for the protocol's error form; no other client notices."""

    def __init__(self, sentence: str, *, status: int = 400) -> None:
        """`status`: of the HTTP answer, where the request is refused at once and not by its future."""
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class AdapterChoice:
    """The adapters of a model: their rank, and beside which layers of the base they are."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class Picture:
    """A picture in a model's input: `content` as it was sent, at token `place`, in `length` tokens."""

    place: int
    length: int
    format: str
    content: bytes


@dataclass(frozen=True)
class Datum:
    """A sequence to train on. Position i of `inputs` belongs to token i, which predicts `target_tokens[i]`.

    `tokens` int32 `[N]` (0 where a picture is); `inputs` float32 or int64 `[N]`, or `[N, K]` of several targets per position.
    """

    tokens: Array
    inputs: Mapping[str, Array]
    pictures: tuple[Picture, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """A loss by its name in the protocol, with its parameters; of `custom` the graph."""

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    graph: Any = None


@dataclass(frozen=True)
class Passed:
    """The answer of a pass: by datum its arrays (`logprobs` float32 `[N]` or `[N, K]`), and metrics `name:reduction`."""

    outputs: Sequence[Mapping[str, Array]]
    metrics: Mapping[str, float]
    output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class AdamParams:
    """Parameters of one optimizer step; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Trainer(Protocol):
    """The training side. One thread calls it; a call returns when it is done.

    Models have names that the server makes. What a client did wrong is a `RequestError`; any other exception is the server's.
    """

    def create(self, model: str, choice: AdapterChoice | None) -> None:
        """Make a model that computes what the base does. None: all weights are trained, which one model alone may."""
        ...

    def drop(self, model: str) -> None:
        """Forget a model."""
        ...

    def run_pass(self, model: str, data: Sequence[Datum], loss: Loss, *, backward: bool) -> Passed:
        """Compute a loss, a sum over all tokens of `data`; `backward` adds its gradients to those since the last step."""
        ...

    def optimizer_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        """Apply the gradients since the last step, without any as if they were 0; returns metrics."""
        ...

    def forget_gradients(self, model: str) -> None:
        """Drop the gradients since the last step; the model is as it was behind it."""
        ...

    def save(self, model: str, folder: Path) -> None:
        """Write what training needs to go on, weights and optimizer, whole or not at all."""
        ...

    def load(self, model: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a `save` over, and the optimizer's state, or begin it anew."""
        ...

    def export(self, model: str, folder: Path) -> None:
        """Write the adapters as a PEFT folder, or all weights as a model folder, whole or not at all."""
        ...


@dataclass(frozen=True)
class SampleRequest:
    """A request for `num_samples` answers to a prompt. Fields are the protocol's; `adapter` None: the base."""

    tokens: Array
    adapter: str | None = None
    pictures: tuple[Picture, ...] = ()
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    """None: the model's own ends; empty: nothing stops."""
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Array | None = None
    """int64 `[N − 1, K]`, −1 where nothing is asked."""
    prompt_alt_tokens_k: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer: tokens int32 `[M]`, their log-probs float32 `[M]`, `STOP` or `LENGTH`; ids and log-probs `[M, k]`."""

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    topk: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Sampled:
    """The answers to a request; `prompt_logprobs` float32 `[N]`, NaN where there is none."""

    sequences: Sequence[Answer]
    prompt_logprobs: Array | None = None
    topk_prompt: tuple[Array, Array] | None = None
    """ids int32 and log-probs float32 `[N, k]`, 0 and −99999 where there are none."""
    target_prompt_logprobs: Array | None = None
    prompt_alt_tokens: tuple[Array, Array] | None = None
    cache_hit_tokens: int = 0


class Sampler(Protocol):
    """The engines. Methods may be called at the same time."""

    async def add(self, adapter: str, folder: Path) -> None:
        """Have every engine load the PEFT folder under a name."""
        ...

    async def drop(self, adapter: str) -> None:
        """Have engines forget it, once the requests that use it have ended."""
        ...

    async def sample(self, request: SampleRequest) -> Sampled:
        """Answer a request; cancelling the task ends its requests in the engines.

        Raises:
            RequestError: the request is none that engines answer.
        """
        ...
