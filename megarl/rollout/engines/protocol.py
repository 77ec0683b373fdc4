"""The form of every rollout engine: the values that go in and come out, and the class that every engine derives from.

Nothing here knows which engine it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from megarl.config import Config
from megarl.config.engine_kinds import EngineCapabilities
from megarl.data.columns import columns, joined
from megarl.data.media import Media
from megarl.data.prefills import NO_PREFILLS, PrefillCounts
from megarl.errors import EngineError
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.weights.digests import SentDigests
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.sglang_senders import ServerEndpoint
from megarl.weights.staging import NamedTensors

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    `temperature` divides the logits, and log-probs are taken under it. `top_p` in (0, 1], `top_k` (0 or less: off) and
    `min_p` in [0, 1] limit what may be sampled, each judged by the full distribution, and not the log-probs, which are those
    of the full distribution. `greedy` takes the likeliest token and reports log-probs at temperature 1. A response ends
    after the model's own end tokens, any of `stop_token_ids`, or `max_new_tokens` tokens; the end token is part of the
    response. So is the token behind which its text first has one of the texts `stop`, with all that this token says. With
    `ignore_eos` only `max_new_tokens` ends it.
    `cut_token_ids` end it, too, but as `max_new_tokens` does: such a response must not go on. `extra`: the columns that the
    engine is asked for, by name (`data/columns.py`).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cut_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    ignore_eos: bool = False
    extra: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature > 0:
            raise EngineError(f"temperature is {self.temperature}; it must be above 0 (greedy=True takes the likeliest token)")
        if not 0 < self.top_p <= 1:
            raise EngineError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise EngineError(f"min_p is {self.min_p}; it must be from 0 to 1")

    @property
    def looked_for(self) -> tuple[str, ...]:
        """The texts that an engine looks for behind every token."""
        return () if self.ignore_eos else self.stop


@dataclass(frozen=True)
class Generation:
    """One sampled response: per token its id, its log-prob in nats and the version of the weights that sampled it.

    A response that the engine went on with (`begun`) is whole: what it had is in front. `abort`: it was cut (`Engine.cut`), or
    the engine gave it up.
    `extra`: values of the columns that options add, by name (`data/columns.py`); a token column is of the prompt's tokens and
    of all but the last one of the response, all from passes under the version of the last token. `prefill`: what was asked for
    it.
    """

    response_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    extra: dict[str, Any] = field(default_factory=dict, compare=False)
    prefill: PrefillCounts = NO_PREFILLS

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.log_probs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise EngineError(f"the engine answered ids, log-probs and versions of different lengths: {sorted(lengths)}")
        if self.extra and (strange := sorted(self.extra.keys() - columns().keys())):
            raise EngineError(f"the engine answered the column '{strange[0]}'; those of options are {', '.join(columns())}")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.response_ids)


def behind(begun: Generation, generation: Generation) -> Generation:
    """The whole response: `generation` goes on from the tokens of `begun`."""
    versions = begun.weight_versions[-1:], generation.weight_versions[-1:]
    return replace(
        generation,
        response_ids=begun.response_ids + generation.response_ids,
        log_probs=begun.log_probs + generation.log_probs,
        weight_versions=begun.weight_versions + generation.weight_versions,
        extra=joined(begun.extra, generation.extra, same_weights=not versions[1] or versions[0] == versions[1]),
        prefill=begun.prefill + generation.prefill,
    )


Begun = Sequence[Sequence[Any]]
"""By prompt and sample, the `Generation` that there is something of; None: there is nothing. Before a request reaches the
engine's process it may be a handle to it (`stored_turns.Turn`)."""


@dataclass(frozen=True)
class EngineRequest:
    """A request to an engine: `n` responses to each of `P` prompts, passed on as one value from the scheduler to the engine.

    Raises:
        EngineError: a prompt has no tokens, `n` is below 1, or there is not one key per prompt.
    """

    prompts: Sequence[Sequence[int]]
    """`[P][tokens]`: token ids; each prompt has one or more."""
    params: SamplingParams
    """Parameters of sampling, the same for all responses."""
    _: KW_ONLY
    n: int = 1
    """Responses to each prompt."""
    keys: Sequence[str] | None = None
    """`[P]`: names of the prompts; None: they have none. Seeded and replaying engines identify a sample by (key, sample index),
    and `Engine.cut` names prompts by their keys."""
    deadline_s: float = 1800.0
    """Seconds until the answer must be complete, counted from the call of `Engine.generate`."""
    media: Sequence[Sequence[Media]] | None = None
    """`[P][pictures]`: the pictures of each prompt, in the order of their places among its ids; None: there are none. Engines
    whose capabilities do not say `sees` are asked for no prompt with pictures."""
    begun: Begun | None = None
    """`[P][n]`: responses to go on with under the present weights, where they ended with `abort`; others are given back. None:
    all begin anew, as they always do on engines whose capabilities do not say `continues`."""
    stored: bool = False
    """Whether tokens are to stay where they are sampled: answers are `StoredGeneration`s then (`data/stored.py`), if the engine
    has a process that stores them."""
    conversation: str | None = None
    """The name of the conversation that a single prompt goes on with; None: the prompts stand for themselves. An engine whose
    capabilities say `keeps_turns` may keep what it computed for the next turn; others ignore the name."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise EngineError(f"n is {self.n}; it must be at least 1")
        empty = [i for i, prompt in enumerate(self.prompts) if not len(prompt)]
        if empty:
            raise EngineError(f"prompt {empty[0]} has no tokens")
        if self.keys is not None and len(self.keys) != len(self.prompts):
            raise EngineError(f"{len(self.keys)} keys for {len(self.prompts)} prompts; there must be one key per prompt")


@dataclass(frozen=True)
class EnginePlace:
    """The place of one of a run's engines: its number, the CPU threads it gets, the platform, and where its logs go.

    `gpus` are its GPUs, one for each rank, by their numbers among those that every process of its node sees; none on a CPU.
    Of an engine on several nodes they are those of its first one; `other_nodes` has those of each further node, equally many.
    `beside_bytes`: what others keep on each of these GPUs while the engine serves; 0 where that is not known.
    """

    number: int
    threads: int
    platform: str
    log_folder: Path
    gpus: tuple[int, ...] = ()
    beside_bytes: int = 0
    other_nodes: tuple[tuple[int, ...], ...] = ()


class EngineProcess(Protocol):
    """A process that `Engine.start_on_node` starts; ended by whoever asked for it."""

    def wait(self) -> str:
        """Wait until it has ended; returns what is known of its end."""
        ...

    def stop(self) -> None:
        """End it and everything it started."""
        ...


class Engine(ABC):
    """A rollout engine. One weight update at a time; `generate` may run many times at once.

    An engine answers only with weights of a known version: before its first update, after `wake` and after a failed
    update, `generate` raises EngineError.

    A class of the user's own, named by `rollout.engine`, says in `capabilities` what it is able to do, and gives the
    abstract methods below. `check` and `options` are called in the driver, everything else in the engine's own process.
    """

    capabilities: ClassVar[EngineCapabilities]

    # before there is one ------------------------------------------------------------------------------------------

    @classmethod  # noqa: B027 - most engines serve whatever they are given
    def check(cls, config: Config, platform: str) -> None:
        """Raise a MegarlError, one sentence, if engines of this kind cannot serve this config; nothing runs yet."""

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        """The arguments of `start` for the engine at `place`, which another process can be sent."""
        return {}

    @classmethod
    async def start(cls, model_path: str, *, initial_version: int | None = None, **options: Any) -> Engine:
        """An engine for the Hugging Face folder `model_path`, able to answer.

        `initial_version` declares which version the weights in the folder are; None: none, weights must be sent first.
        It is None when the engine is started again after a failure.

        Raises:
            EngineError: it did not start; nothing of it is left.
        """
        return cls(model_path, initial_version=initial_version, **options)  # type: ignore[call-arg]

    @classmethod
    def start_on_node(cls, options: Any) -> EngineProcess:
        """Start what belongs to an engine on one of its further nodes; called there.

        `options` are what the engine gave the node's proxy. `start` gets these proxies as the keyword `nodes`, if its place has
        `other_nodes`; only engines whose capabilities say `over_nodes` are given such places.
        """
        raise NotImplementedError(f"{cls.__name__} is on one node")

    # answers ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """Version of the weights it would sample with; None while they are of no known version."""

    @abstractmethod
    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        """Sample what `request` asks for; the answer is `[prompt][sample]`. Cancelling the call stops the engine's work on it.

        Raises:
            EngineError: the engine is not able to answer, or answered something that is no generation.
            DeadlineError: not complete after `request.deadline_s` seconds; the engine's work on it has been stopped.
        """

    async def cut(self, keys: Sequence[str]) -> None:
        """End the responses under way to prompts with these `keys`: `generate` returns them with what they have, as `abort`.

        It need not wait for that. Asked of engines whose capabilities say `continues`.
        """
        raise EngineError(f"{type(self).__name__} does not cut responses short")

    async def end_conversations(self, names: Sequence[str]) -> None:  # noqa: B027 - most keep nothing for one by name
        """These conversations have no further turn."""

    async def capacity(self) -> EngineCapacity:
        """Room of the engine. Asked, once, of engines whose capabilities say `reports`."""
        return EngineCapacity()

    async def take_ended(self) -> list[str]:
        """Wait until responses of requests that go on have ended; their prompts' keys, one for each response, told once.

        Asked, by one caller at a time, of engines whose capabilities say `reports`.
        """
        raise EngineError(f"{type(self).__name__} does not say which responses have ended")

    @abstractmethod
    async def health(self) -> None:
        """Return if the engine is able to answer, else raise EngineError saying why not."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine and everything it started; calling it twice is fine."""

    # weights ------------------------------------------------------------------------------------------------------

    @property
    def served_model(self) -> ServedModel | None:
        """The model that the engine serves, to be compared with the trainer's; None: any weights are the right ones."""
        return None

    @property
    def endpoint(self) -> ServerEndpoint | None:
        """The server to which ranks send its weights directly; None: `apply_update` is called with them."""
        return None

    @abstractmethod
    async def begin_update(self, version: int, base: int | None = None) -> None:
        """Stop sampling and make ready to receive the weights of `version`: all, or those that changed since `base`.

        Raises:
            EngineError: an update is open, the engine sleeps, or `base` is not the version that it has.
        """

    async def apply_update(self, bucket: NamedTensors) -> None:
        """Take over some of the weights: tensors in main memory, which may be changed as soon as this has returned."""
        raise EngineError(f"{type(self).__name__} takes no weights as tensors")

    async def load_update(self, folder: str) -> None:
        """Read the weights from the Hugging Face folder `folder`; asked of engines whose `capabilities.weights` say so."""
        raise EngineError(f"{type(self).__name__} takes no weights as a folder")

    @abstractmethod
    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        """Verify the values now in the engine, drop what was cached under the old weights, and sample again.

        `checksums` are those of other senders of this update; those of `apply_update` are known already. Where a sender took
        none, only that everything has come is verified.

        Raises:
            EngineError: a weight is missing or differs; the engine then refuses to generate until a complete update.
        """

    async def end_update_by_sums(self, version: int, sent: SentDigests) -> Sequence[int]:
        """End the update as `end_update`, told by sums alone what others sent; asked of engines that have an `endpoint`.

        Where these are not what it has, nothing is ended: it returns the ranks that are in doubt, `EVERY_RANK` perhaps among
        them. `end_update` follows, with the checksums of their boxes.
        """
        raise EngineError(f"{type(self).__name__} takes no slices of weights")

    async def give_weights(self, version: int, start: int) -> tuple[int | None, Any]:
        """Some of its weights, which must be those of `version`, for another engine's `take_weights`, and where the next begin.

        `start`: 0, or what was returned last; None: these were the last ones. It goes on sampling. EngineError: it cannot.
        """
        raise EngineError(f"{type(self).__name__} gives its weights to no other engine")

    async def take_weights(self, given: Any) -> None:
        """Take what `give_weights` of an engine of this kind returned, in an update that is open."""
        await self.apply_update(given)

    @abstractmethod
    async def abandon_update(self) -> None:
        """Give up the open update. The weights have no known version until a complete one; sampling stays stopped."""

    async def sleep(self) -> None:
        """Free device memory. The weights have no known version from here on."""
        raise EngineError(f"{type(self).__name__} does not give up its memory")

    async def wake(self) -> None:
        """Take device memory again, at least that of the weights, which must be sent before `generate`."""
        raise EngineError(f"{type(self).__name__} has not given up its memory")

    async def wake_cache(self) -> None:
        """Take what `wake` left out of the memory, once weights are there and before `generate`; by default that is none."""
        return


def check_version(version: int | None) -> int:
    """The version of the weights that will sample; raises EngineError if it is not known."""
    if version is None:
        raise EngineError("the engine has no weights of a known version; send it weights before generating")
    return version
