"""How responses are sampled: the section `rollout` of a run (the lines `megarl config` prints, as in `schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.section import Count, Positive, Seconds, Section


class ScheduleConfig(Section):
    """Whether generation and training take turns or run at the same time (docs/rollouts.md)."""

    mode: Literal["sync", "one_step", "async"] = "sync"
    """In turns; the next step's responses while this step trains; or generation that never stops, also for new weights."""
    staleness: Positive = 1
    """In `async`: a sample that trains at version v was started at version v - staleness or later."""
    over_sample: Count = 0
    """Further groups that are started; the first to finish make the step, and the others are certain of the next."""


class EpisodeConfig(Section):
    """What happens between a prompt and the end of its response (docs/episodes.md)."""

    kind: str = "single"
    """`single` turn, chat with `tools`, an `environment`, or your own as `package.module:function`."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Python functions as `package.module:function`; for an environment its class."""
    max_turns: Positive = 8
    """Turns of the policy, at most."""
    tool_timeout_s: Seconds = 10.0
    """Seconds for one call of a tool or one step of an environment."""
    tool_max_tokens: Positive = 1024
    """Tokens of one answer of a tool or environment; what is longer is cut, and says so."""


class RolloutDeadlines(Section):
    """How long the driver waits for an engine that has started."""

    generate_s: Seconds = 1800.0
    """Seconds until one step's responses are complete."""
    update_s: Seconds = 300.0
    """Seconds until a weight update is applied and verified."""


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["sglang", "embedded", "replay"] = "sglang"
    """SGLang servers, generation inside the trainer's process, or recorded responses."""
    prompts_per_step: Positive = 8
    """Prompts per training step."""
    resample_rounds: Count = 0
    """Rounds of further prompts to replace groups whose rewards all agree (DAPO's dynamic sampling); 0: they stay."""
    samples_per_prompt: Positive = 8
    """Responses per prompt (the group size G)."""
    max_new_tokens: Positive = 256
    """Longest response in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; log-probs are taken under it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability; 1: off."""
    top_k: Count = 0
    """Sample among the k likeliest tokens; 0: off."""
    greedy: bool = False
    """Take the likeliest token instead of sampling (for reproducible curves)."""
    ignore_eos: bool = False
    """Sample on past end tokens, so that every response has `max_new_tokens` (for measuring speed)."""
    engines: Positive = 1
    """Number of engines."""
    tp: Positive = 1
    """Tensor-parallel ranks per engine."""
    sync: Literal["tensors", "process_group", "disk"] = "tensors"
    """Weights reach the engine as shared tensors (same machine), over a process group, or as a folder (`engine_args.urls`)."""
    delta_every: Count = 0
    """Send only weights that changed, and all of them every so many updates; 0: all at every update."""
    verify_every: Positive = 1
    """Compare the engine's copy of every weight with what was sent at every so many updates, and at the first."""
    replay_from: str | None = None
    """`samples.jsonl` of the responses that `engine: replay` gives back."""
    threads: Positive | None = None
    """CPU threads per engine; null: all cores where generation and training take turns, else half of them."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further SGLang server arguments by their Python names (`port`: the first engine's), or `urls` of running servers."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Whether generation and training take turns or run at the same time."""
    episode: EpisodeConfig = EpisodeConfig()
    """What happens between a prompt and the end of its response."""
    deadlines: RolloutDeadlines = RolloutDeadlines()
    """How long the driver waits for an engine."""

    @property
    def places(self) -> int:
        """Devices that the engines take of this run's; none if they are servers that run already."""
        return 0 if self.sync == "disk" else self.engines * self.tp

    @property
    def other_weights(self) -> str | None:
        """The engine argument by which the engines start with other weights than the policy's, and are sent these first."""
        return next((name for name in ("model_path", "urls") if name in self.engine_args), None)
