"""The two records that travel through a run: a prompt to be answered, and a sample that answers it.

Plain data without tensors, so that they cross process borders and JSON files unchanged; token columns alone are arrays. Samples
are found by their ids, never by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, TypeVar

from megarl.data.columns import from_json, of_tokens, to_json
from megarl.data.media import Media
from megarl.data.prefills import NO_PREFILLS, PrefillCounts

FORMER_FIELDS = ("data_source",)
"""Fields that earlier versions wrote, and nobody read."""
EPISODE_REWARD = "environment"
"""Key in `Sample.rewards` of the reward that an episode itself gave."""


@dataclass
class Prompt:
    """One prompt of one step.

    `row_id` names the data row, `group_id` this visit of it: all samples of one visit share the group id. `media` are its
    pictures in the order of their places; each has its tokens among `prompt_ids`, and one placeholder in `prompt_text`.
    """

    row_id: str
    group_id: str
    prompt_ids: list[int]
    prompt_text: str
    row: dict[str, Any] = field(default_factory=dict)
    media: list[Media] = field(default_factory=list)


@dataclass
class Sample:
    """One response to a prompt.

    `sampled_mask`, `rollout_log_probs` and `weight_versions` have one entry per response token. `sampled_mask` is 1
    where the policy itself sampled the token (0: tool or environment token). `rollout_log_probs` are the engine's, in
    nats under the sampling temperature. `finish_reason` is `stop`, `length` (truncated) or `abort`.
    An episode of several turns has them
    in `turns`, as chat messages in order (`assistant`: the policy; `tool` or `user`: what it was told), and
    `response_text` is then the policy's last turn: what a tool said is no answer.

    `turn_rewards` is what an environment gave to each turn of the policy, and `turn_states` a key of the state before it, equal
    for equal states. Both are empty where nobody said, or have one entry per turn: per run of tokens that the policy sampled.

    A response that comes from a data row was sampled by no engine: `rollout_log_probs` and `weight_versions` are both
    empty, and `sampled_mask` is 1 on the tokens to be trained on. `labels` is empty, or has one number from 0 to 1 per
    such token, in their order: whether the step that the token ends is right, or whether the response is desirable.
    `media` are the pictures of the prompt, and behind them those that were told between turns; a place counts the ids of prompt
    and response together. In `turns` a content with pictures is a list of parts, each picture by the path of its kept file.
    `branch_of` is the id of the first branch of its episode, where the sample is a further one (`data/branches.py`).
    `extra`: values of the columns that options add, by name (`data/columns.py`). `prefill`: what engines were asked to go on
    from.
    """

    sample_id: str
    group_id: str
    row_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    sampled_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[int]
    finish_reason: str
    prompt_text: str = ""
    response_text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_states: list[str] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    branch_of: str = ""
    extra: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    prefill: PrefillCounts = field(default=NO_PREFILLS, compare=False)

    def __post_init__(self) -> None:
        for name, values in of_tokens(self.extra).items():
            if len(values) != self.total_length:
                raise ValueError(
                    f"sample {self.sample_id}: {name} must have one entry per token of prompt and response, got {len(values)} "
                    f"for {self.total_length}"
                )
        lengths = {len(self.response_ids), len(self.sampled_mask)}
        if self.rollout_log_probs or self.weight_versions:
            lengths |= {len(self.rollout_log_probs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"sample {self.sample_id}: response_ids, sampled_mask, rollout_log_probs and weight_versions must have "
                f"one entry per response token (the last two may both be empty), got lengths {sorted(lengths)}"
            )
        for name in ("turn_rewards", "turn_states") if self.turn_rewards or self.turn_states else ():
            turns = sum(now and not before for before, now in pairwise([0, *self.sampled_mask]))
            count = len(getattr(self, name))
            if count not in (0, turns):
                raise ValueError(f"sample {self.sample_id}: {name} must have one entry per turn, got {count} for {turns} turns")
        if self.labels and len(self.labels) != sum(self.sampled_mask):
            raise ValueError(
                f"sample {self.sample_id}: labels must have one entry per token in the mask, got {len(self.labels)} "
                f"for {sum(self.sampled_mask)}"
            )

    @property
    def episode_id(self) -> str:
        """Equal for the branches of one episode."""
        return self.branch_of or self.sample_id

    @property
    def prompt_media(self) -> tuple[Media, ...]:
        """The pictures of the prompt."""
        return tuple(media for media in self.media if media.place < len(self.prompt_ids))

    @property
    def response_media(self) -> tuple[Media, ...]:
        """The pictures among the response's ids, their places counted from its first one."""
        start = len(self.prompt_ids)
        return tuple(media.moved(-start) for media in self.media if media.place >= start)

    @property
    def has_rollout(self) -> bool:
        """Return whether an engine sampled the response, or there is nothing to sample log-probs of."""
        return len(self.rollout_log_probs) == len(self.response_ids)

    @property
    def response_length(self) -> int:
        """Tokens of the response."""
        return len(self.response_ids)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.sampled_mask)

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Versions of the weights, each with the number of tokens in a row that it has, in order; empty without a rollout."""
        return tuple((version, len([*run])) for version, run in groupby(self.weight_versions))

    def loaded(self) -> Sample:
        """The sample with its tokens in this process."""
        return self

    @property
    def total_length(self) -> int:
        """Prompt plus response length in tokens."""
        return len(self.prompt_ids) + self.response_length

    @property
    def truncated(self) -> bool:
        """Return whether the response was cut by the length limit."""
        return self.finish_reason == "length"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form; `read_record(Sample, d)` reads it back. Counts and columns are in it if there are any."""
        sample = self.loaded()
        plain = asdict(replace(sample, extra={}))
        del plain["extra"]
        if sample.prefill == NO_PREFILLS:
            del plain["prefill"]
        return plain | to_json(sample.extra)


PromptOrSample = TypeVar("PromptOrSample", Prompt, Sample)


def read_record(kind: type[PromptOrSample], record: Mapping[str, Any]) -> PromptOrSample:
    """A Prompt or Sample from its JSON form, also one that an earlier version wrote (`media`: paths)."""
    values = {name: value for name, value in record.items() if name not in FORMER_FIELDS}
    values["media"] = [Media.of_json(item) for item in record.get("media", []) if isinstance(item, Mapping)]
    if "prefill" in record:
        values["prefill"] = PrefillCounts(**record["prefill"])
    extra, values = from_json(values)
    return kind(**values | ({"extra": extra} if extra else {}))


@dataclass(frozen=True)
class RolloutBatch:
    """A step's groups of responses: its prompts, the samples of each, and how many versions old each group's weights are."""

    prompts: list[Prompt]
    samples: list[list[Sample]]
    staleness: list[int]
