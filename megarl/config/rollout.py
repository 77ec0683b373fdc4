"""Sampling of responses: the section `rollout` of a run (the lines `megarl config` prints, as in `schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.option_sections import with_options
from megarl.config.section import ClassPath, Count, Positive, Seconds, Section
from megarl.option_list import functions


@with_options
class ScheduleConfig(Section):
    """When generation and training run: in turns, or at the same time (docs/rollouts.md)."""

    mode: Literal["sync", "one_step_off_policy", "async"] = "sync"
    """`sync`: generate, then train. `one_step_off_policy`: generate the next step's responses while training on this step's.
    `async`: generate continuously; weights are updated in flight."""
    max_staleness: Positive = 1
    """`async` only: maximum number of weight updates between the start of a response and its training step."""
    over_sample: Count = 0
    """Extra prompt groups started per step, in the modes `sync` and `async`. The first `prompts_per_step` to finish are trained
    on; the rest continue in the next step under new weights."""
    partial_responses: Literal["restart", "continue"] | None = None
    """What becomes of groups that were begun and would be too old: they `restart`, or `continue` under new weights from the
    tokens they have. null: they `continue` with `over_sample`, else they `restart`."""
    mask_older_tokens: bool = False
    """With `continue` in `sync` mode: leave tokens that older weights sampled out of the loss."""

    @property
    def continues(self) -> bool:
        """Return whether what was sampled is gone on with under new weights."""
        return self.partial_responses == "continue" or (self.partial_responses is None and self.over_sample > 0)

    @property
    def continues_by(self) -> tuple[str, str]:
        """The field by which it is, and the value with which it would not."""
        return ("over_sample", "0") if self.partial_responses is None else ("partial_responses", "'restart'")


@with_options
class EpisodeConfig(Section):
    """Production of a response: one turn, or several with tools, an environment or an agent (docs/episodes.md)."""

    kind: str = "single"
    """`single`: one turn. `tools`: a chat with tool calls. `environment`: turns with an environment. `agent`: a program acts.
    Or your own as `package.module:function` or `path/to/file.py:function`."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tools as a list of `package.module:function`, `path/to/file.py:function`, `sandbox:bash`, `sandbox:python`,
    `sandbox:write_file`, `sandbox:read_file`, or `mcp:NAME`; for an environment, its class."""
    max_turns: Positive = 8
    """Maximum number of turns of the policy."""
    tool_timeout_s: Seconds = 10.0
    """Time limit in seconds for one tool call or one step of an environment."""
    tool_max_tokens: Positive = 1024
    """Maximum number of tokens of the text of one tool or environment answer. Longer ones are cut, with a note in the text."""
    turn_cache_bytes: Count = 2**30
    """`rollout.engine: embedded` only: maximum size of the keys and values kept between turns. 0: none. SGLang uses its whole
    cache for them."""


class RolloutDeadlines(Section):
    """Time limits of the driver for running engines and for rewards."""

    generate_s: Seconds = 1800.0
    """Time limit in seconds for the responses of a step."""
    update_s: Seconds = 300.0
    """Time limit in seconds for a weight update and its check."""
    reward_s: Seconds = 600.0
    """Time limit in seconds for all rewards together to judge the responses of a step, or of an evaluation."""


class ServersConfig(Section):
    """SGLang servers: those that megarl starts, or those at `urls` that already run; `model_path` is for `embedded`, too."""

    urls: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """URLs of running SGLang servers, one per engine; needs `weight_transport: folder`. Empty: megarl starts the servers."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    """Port of the first server that megarl starts; the next servers take the next ports. null: free ports."""
    model_path: str | None = None
    """Hugging Face folder that engines start from, such as the model in FP8, MXFP8 or INT4: they are sent weights as it stores
    them. null: `model.path`."""


@with_options
class RolloutConfig(Section):
    """Sampling of responses."""

    engine: Literal["sglang", "embedded", "replay"] | ClassPath = "sglang"
    """`sglang`: SGLang servers. `embedded`: generation inside megarl, for tests on a CPU. `replay`: recorded responses. Or an
    engine class of your own, as `package.module:Class` or `path/to/file.py:Class`."""
    prompts_per_step: Positive = 8
    """Number of prompts per training step."""
    dynamic_sampling_rounds: Count = 0
    """DAPO's dynamic sampling: how many times to draw replacement prompts for groups whose responses all got the same
    reward. 0: off."""
    samples_per_prompt: Positive = 8
    """Number of responses per prompt (the group size G)."""
    max_new_tokens: Positive = 256
    """Maximum length of a response in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The trainer computes log-probs at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this total probability. 1: off."""
    top_k: Count = 0
    """Sample from the k likeliest tokens. 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability. 0: off. Under `top_p`, `top_k` or `min_p`
    the trainer's log-probs are over the kept tokens."""
    greedy: bool = False
    """Always take the likeliest token instead of sampling."""
    ignore_eos: bool = False
    """Ignore end tokens, so that every response has `max_new_tokens` tokens (for speed measurements)."""
    stop: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Texts that end a response, or a turn: it ends behind the token that completes the first of them, which it keeps."""
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Token ids that end a response, beside the model's own end tokens."""
    engines: Positive = 1
    """Number of rollout engines."""
    tp: Positive = 1
    """Tensor-parallel ranks of each engine."""
    weight_transport: Literal["shared_memory", "process_group", "rdma", "folder"] = "shared_memory"
    """How weights reach the engines: `shared_memory` (same machine), `process_group` (NCCL or Gloo), `rdma` (NIXL:
    `pip install 'megarl[rdma]'`), or `folder` (Hugging Face files, for `servers.urls`)."""
    delta_every: Count = 0
    """Send only changed weights, and all weights every this many updates. 0: all weights at every update."""
    verify_every: Positive = 1
    """Compare checksums of all weights in the engine with those sent, at the first and at every this many updates."""
    replay_from: str | None = None
    """File `samples.jsonl` of the run whose responses `engine: replay` returns."""
    threads: Positive | None = None
    """CPU threads per engine. null: the machine's cores, or half of them unless generation and training take turns, divided
    by its engines."""
    servers: ServersConfig = ServersConfig()
    """SGLang servers: ports, model folder, or the URLs of servers that already run."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of SGLang's servers by their Python names, e.g. `mem_fraction_static: 0.8`."""
    schedule: ScheduleConfig = ScheduleConfig()
    """When generation and training run."""
    episode: EpisodeConfig = EpisodeConfig()
    """How a response is produced."""
    deadlines: RolloutDeadlines = RolloutDeadlines()
    """How long the driver waits for running engines and for rewards."""

    @property
    def places(self) -> int:
        """Devices that the engines take of this run's; none if they are servers that run already."""
        return 0 if self.weight_transport == "folder" else self.engines * self.tp

    @property
    def lent_engines(self) -> int:
        """Further engines, that share GPUs with the trainer where `engines` have their own."""
        return sum(lent(self.schedule) for lent in functions("questions", "lent_engines"))

    @property
    def further_engines(self) -> int | None:
        """Engines that may come beside `engines` while the run goes on; None: their number is fixed."""
        return next(
            (more for further in functions("questions", "further_engines") if (more := further(self)) is not None), None
        )

    @property
    def drafts(self) -> Any:
        """The section by which engines draft tokens and verify several in one pass; None: they do not."""
        return next(filter(None, (drafts(self) for drafts in functions("questions", "drafts"))), None)

    @property
    def groups_per_engine(self) -> int:
        """Groups of a step that an engine gets if all get as many."""
        return -(-(self.prompts_per_step + self.schedule.over_sample) // self.engines)

    @property
    def sampling_limits(self) -> dict[str, Any]:
        """The limits among `top_p`, `top_k` and `min_p` that leave out tokens."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {} if self.greedy else {name: getattr(self, name) for name in off if getattr(self, name) != off[name]}

    @property
    def other_weights(self) -> str | None:
        """The field by which the engines start with other weights than the policy's, and are sent these first."""
        return next((f"rollout.servers.{name}" for name in ("model_path", "urls") if getattr(self.servers, name)), None)
