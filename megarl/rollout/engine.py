"""What every rollout engine is: the values that go in and come out, and the protocol that the trainer is written against.

Nothing here knows which engine it is; this file imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from megarl.errors import EngineError

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
Progress = Callable[[int, int], None]
"""Called with (samples finished, tokens in them) after each finished sample."""


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    `temperature` divides the logits, and log-probs are taken under it. `top_p` in (0, 1] and `top_k` (0 or less: off) limit
    what may be sampled, not the log-probs, which are those of the full distribution. `greedy` takes the likeliest token and
    reports log-probs at temperature 1. A response ends after the model's own end tokens, any of `stop_token_ids`, or
    `max_new_tokens` tokens; the end token is part of the response. With `ignore_eos` only the last of these ends it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature > 0:
            raise EngineError(f"temperature is {self.temperature}; it must be above 0 (greedy=True takes the likeliest token)")
        if not 0 < self.top_p <= 1:
            raise EngineError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class Generation:
    """One sampled response: per token its id, its log-prob in nats and the version of the weights that sampled it."""

    response_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.log_probs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise EngineError(f"the engine answered ids, log-probs and versions of different lengths: {sorted(lengths)}")


Bucket = Sequence[tuple[str, "torch.Tensor"]]
"""Weights under their Hugging Face names, unsharded; a tied `lm_head.weight` is not sent."""


class Engine(Protocol):
    """A rollout engine. One weight update at a time; `generate` may run many times at once.

    An engine answers only with weights of a known version: before its first update, after `wake` and after a failed
    update, `generate` raises EngineError.
    """

    @property
    def weight_version(self) -> int | None:
        """Version of the weights it would sample with; None while they are of no known version."""
        ...

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        keys: Sequence[str] | None = None,
        on_progress: Progress | None = None,
        deadline_s: float = 1800.0,
    ) -> list[list[Generation]]:
        """Sample `n` responses to each prompt of token ids; the answer is `[prompt][sample]`.

        `keys` names the prompts (one each); seeded and replaying engines identify a sample by (key, sample index).
        Cancelling the call stops the engine's work on it.

        Raises:
            EngineError: the engine is not able to answer, or answered something that is no generation.
            DeadlineError: not complete after `deadline_s` seconds; the engine's work on it has been stopped.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling until `resume`; what is under way is kept and continues under the weights it then finds."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def abort_all(self) -> None:
        """End every response under way; each is returned as far as it got, with finish reason `abort`."""
        ...

    async def begin_update(self, version: int, base: int | None = None) -> None:
        """Stop sampling and make ready to receive the weights of `version`: all, or those that changed since `base`.

        Raises:
            EngineError: an update is open, the engine sleeps, or `base` is not the version that it has.
        """
        ...

    async def apply_update(self, bucket: Bucket) -> None:
        """Take over some of the weights. The tensors may be changed as soon as this has returned."""
        ...

    async def end_update(self, version: int, checksums: Mapping[str, str] | None = None) -> None:
        """Verify the values now in the engine, drop what was cached under the old weights, and sample again.

        `checksums` are those of other senders of this update; those of `apply_update` are known already. Where a sender took
        none, only that everything has come is verified.

        Raises:
            EngineError: a weight is missing or differs; the engine then refuses to generate until a complete update.
        """
        ...

    async def abandon_update(self) -> None:
        """Give up the open update. The weights have no known version until a complete one; sampling stays stopped."""
        ...

    async def sleep(self) -> None:
        """Free device memory. The weights have no known version from here on."""
        ...

    async def wake(self) -> None:
        """Take device memory again; weights must be sent before `generate`."""
        ...

    async def health(self) -> None:
        """Return if the engine is able to answer, else raise EngineError saying why not."""
        ...

    async def stop(self) -> None:
        """End the engine and everything it started; calling it twice is fine."""
        ...


def check_request(prompts: Sequence[Sequence[int]], n: int, keys: Sequence[str] | None, version: int | None) -> int:
    """Refuse what no engine can answer; returns the version of the weights that will sample.

    Raises:
        EngineError: no known weights, an empty prompt, `n` below 1, or not one key per prompt.
    """
    if version is None:
        raise EngineError("the engine has no weights of a known version; send it weights before generating")
    if n < 1:
        raise EngineError(f"n is {n}; it must be at least 1")
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise EngineError(f"prompt {empty[0]} has no tokens")
    if keys is not None and len(keys) != len(prompts):
        raise EngineError(f"{len(keys)} keys for {len(prompts)} prompts; there must be one key per prompt")
    return version
