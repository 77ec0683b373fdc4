"""How responses are sampled: the section `rollout` of a run (the lines `megarl config` prints, as in `schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.section import ClassPath, Count, Positive, Seconds, Section


class ScheduleConfig(Section):
    """When generation and training run: in turns, or at the same time (docs/rollouts.md)."""

    mode: Literal["sync", "one_step_off_policy", "async"] = "sync"
    """`sync`: generate, then train. `one_step_off_policy`: generate the next step's responses while training on this step's.
    `async`: generate continuously; weights are updated in flight."""
    max_staleness: Positive = 1
    """`async` only: maximum number of weight updates between the start of a response and its training step."""
    over_sample: Count = 0
    """Extra prompt groups started per step. The first `prompts_per_step` to finish are trained on; the rest are kept for
    the next step."""
    partial_responses: Literal["restart", "continue"] = "restart"
    """What becomes of the extra groups that were not used and would be too old: they `restart`, or `continue` from the tokens
    they have under new weights."""
    mask_older_tokens: bool = False
    """With `continue` in `sync` mode: leave tokens that older weights sampled out of the loss."""
    lent_engines: Count = 0
    """Further engines, on the trainer's GPUs: they sleep while it works and generate while it waits for samples. Needs `async`
    and `resources.placement: separate` (docs/rollouts.md). 0: none."""

    @property
    def continues(self) -> bool:
        """Whether what was sampled is gone on with under new weights."""
        return self.partial_responses == "continue"


class VerifiersConfig(Section):
    """An environment of the `verifiers` package that acts by itself (docs/sandboxes.md)."""

    environment: str = ""
    """Name of the environment, as `verifiers.load_environment` takes it. Empty: none."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    python: str | None = None
    """Python that has `verifiers` 0.1 and the environment. null: the one of megarl."""


class AgentConfig(Section):
    """A program that acts by itself: it asks an endpoint of megarl for turns of the policy, as OpenAI's or Anthropic's
    (docs/agents.md)."""

    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Command line, started for each episode. `{prompt}` and `{row.KEY}` in it stand for fields of the row."""
    function: str | None = None
    """In place of `command`: a function `agent(task)` as `package.module:function` or `path/to/file.py:function`. An `async
    def` serves many episodes at once."""
    verifiers: VerifiersConfig = VerifiersConfig()
    """In place of `command`: an environment of the `verifiers` package, whose rubric gives the reward."""
    processes: Positive | None = None
    """Number of processes that run `function` or `verifiers`. null: half as many as cores."""
    at_once: Positive = 64
    """Maximum number of agents that act at the same time."""
    timeout_s: Seconds = 600.0
    """Time limit in seconds for one episode; what was said until then is kept, as truncated."""
    rewards: Literal["episode", "branch"] = "episode"
    """What is rewarded: the whole `episode`, by the branch of its last turn, or each `branch` by itself."""
    history: Literal["tokens", "template"] = "tokens"
    """How later requests show earlier turns: by the `tokens` that were sampled, or as the chat `template` writes them anew."""
    models: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further names by which agents may ask for the policy. It is always called `megarl`."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on. Other than loopback: whoever reaches it still needs an episode's key."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`."""
    pass_environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables of the run that `command` gets too."""


class SandboxConfig(Section):
    """A folder for each episode, in which tools and agents run commands that reach nothing else (docs/sandboxes.md)."""

    kind: Literal["none", "auto", "seccomp", "docker", "apptainer"] = "none"
    """`seccomp`: the kernel confines commands on this machine. `docker`, `apptainer`: in containers of `image`. `auto`: a
    container where there is one and `image` is set, else `seccomp`."""
    image: str | None = None
    """Image of `docker` (a name; it is never pulled) or `apptainer` (a file). Its `sh` runs the commands."""
    memory_mb: Positive = 2048
    """Memory in MiB of all processes of a command together; under `seccomp` also the address space of each of them."""
    processes: Positive = 64
    """Maximum number of processes (and threads) of a command."""
    disk_mb: Positive = 256
    """Size of the folder in MiB; a command that fills it further is ended. A folder with more than twice as much is emptied."""
    output_kb: Positive = 64
    """KiB of a command's output and of its errors that are kept; one that prints 64 times as much is ended."""
    timeout_s: Seconds = 30.0
    """Time limit in seconds for one command."""
    network: bool = False
    """Whether commands reach the network. An agent's command under `seccomp` reaches the port of its endpoint all the same."""
    files: str | None = None
    """Folder whose files each sandbox begins with."""
    files_key: str | None = None
    """Key of a row that has further files: `{path: text}`."""
    readable: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """`seccomp`: folders that commands may read and run programs from, besides the system's and Python's."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of commands; they have no others but `PATH`, `HOME` and `TMPDIR`."""
    at_once: Positive = 16
    """Maximum number of commands that run at the same time."""


class McpServerConfig(Section):
    """An MCP server whose tools the policy may call, as `mcp:NAME` (docs/sandboxes.md)."""

    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Command line of a server that speaks over its input and output."""
    url: str | None = None
    """In place of `command`: address of a server that speaks streamable HTTP, such as `http://host:8000/mcp`."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the tools that the policy is shown. Empty: all."""
    per_episode: bool = False
    """Whether each episode has a server (or, with `url`, a session) of its own. false: all share one."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`."""
    pass_environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables of the run that `command` gets too."""
    token_env: str | None = None
    """Name of the environment variable that has the bearer token for `url`."""


class OpenEnvConfig(Section):
    """An environment of an OpenEnv server, in place of a class of yours (docs/sandboxes.md)."""

    url: str = ""
    """Address of the server, such as `http://host:8000`. Empty: none."""
    action_key: str | None = "message"
    """Field of an action that has what the policy says. null: the policy says the whole action, as a JSON object."""
    observation_key: str | None = None
    """Field of an observation that the policy is told. null: its only text, or all of it as JSON."""
    reset_key: str | None = None
    """Key of a row that has further arguments for `reset`. The seed follows from the row, so a group begins alike."""
    at_once: Positive = 64
    """Maximum number of episodes, and so of the server's sessions, at the same time."""
    token_env: str | None = None
    """Name of the environment variable that has the server's bearer token."""


class EpisodeConfig(Section):
    """How a response is produced: one turn, or several with tools, an environment or an agent (docs/episodes.md)."""

    kind: str = "single"
    """`single`: one turn. `tools`: a chat with tool calls. `environment`: turns with an environment. `agent`: a program acts.
    Or your own as `package.module:function` or `path/to/file.py:function`."""
    agent: AgentConfig = AgentConfig()
    """The program of `kind: agent`."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tools as a list of `package.module:function`, `path/to/file.py:function`, `sandbox:bash`, `sandbox:python`,
    `sandbox:write_file`, `sandbox:read_file`, or `mcp:NAME`; for an environment, its class."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where `sandbox:` tools and agents run commands."""
    openenv: OpenEnvConfig = OpenEnvConfig()
    """The server of `kind: environment`, in place of a class in `tools`."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers by the NAME that `mcp:NAME` in `tools` uses."""
    max_turns: Positive = 8
    """Maximum number of turns of the policy."""
    tool_timeout_s: Seconds = 10.0
    """Time limit in seconds for one tool call or one step of an environment."""
    tool_max_tokens: Positive = 1024
    """Maximum number of tokens of the text of one tool or environment answer. Longer ones are cut, with a note in the text."""
    turn_cache_bytes: Count = 2**30
    """`rollout.engine: embedded` only: maximum size of the keys and values kept between turns. 0: none. SGLang uses its whole
    cache for them."""


class SpeculativeConfig(Section):
    """Speculative decoding: a draft proposes tokens and the policy verifies several in one pass (docs/speculative.md)."""

    algorithm: Literal["none", "mtp", "ngram", "standalone", "eagle", "eagle3"] = "none"
    """Who drafts: the model's layer for multi-token prediction (`mtp`), a lookup in earlier tokens (`ngram`), a small model
    (`standalone`), or an EAGLE draft of SGLang's (`eagle`, `eagle3`). `none`: off."""
    num_steps: Positive = 3
    """Tokens drafted one after the other before the policy verifies them."""
    topk: Positive = 1
    """Candidates kept after each step; above 1 drafts are trees, which SGLang's engines alone verify."""
    num_draft_tokens: Annotated[int, Field(ge=2, strict=True)] | None = None
    """With `topk` above 1: tokens of the tree that is verified, the last sampled one included."""
    draft_model: str | None = None
    """Folder of the draft of `standalone`, `eagle` and `eagle3`. It is read once and never trained."""


class RolloutDeadlines(Section):
    """How long the driver waits for a running engine."""

    generate_s: Seconds = 1800.0
    """Time limit in seconds for the responses of a step."""
    update_s: Seconds = 300.0
    """Time limit in seconds for a weight update and its check."""


class ServersConfig(Section):
    """SGLang servers: those that megarl starts, or those at `urls` that already run; `model_path` is for `embedded`, too."""

    urls: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """URLs of running SGLang servers, one per engine; needs `weight_transport: folder`. Empty: megarl starts the servers."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    """Port of the first server that megarl starts; the next servers take the next ports. null: free ports."""
    model_path: str | None = None
    """Hugging Face folder that engines start from, such as the model in FP8, MXFP8 or INT4: they are sent weights as it stores
    them. null: `model.path`."""


class RolloutConfig(Section):
    """How responses are sampled."""

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
    speculative: SpeculativeConfig = SpeculativeConfig()
    """Speculative decoding."""
    episode: EpisodeConfig = EpisodeConfig()
    """How a response is produced."""
    deadlines: RolloutDeadlines = RolloutDeadlines()
    """How long the driver waits for a running engine."""

    @property
    def places(self) -> int:
        """Devices that the engines take of this run's; none if they are servers that run already."""
        return 0 if self.weight_transport == "folder" else self.engines * self.tp

    @property
    def groups_per_engine(self) -> int:
        """Groups of a step that an engine gets if all get as many."""
        return -(-(self.prompts_per_step + self.schedule.over_sample) // self.engines)

    @property
    def sampling_limits(self) -> dict[str, Any]:
        """Those of `top_p`, `top_k` and `min_p` that leave out tokens."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {} if self.greedy else {name: getattr(self, name) for name in off if getattr(self, name) != off[name]}

    @property
    def other_weights(self) -> str | None:
        """The field by which the engines start with other weights than the policy's, and are sent these first."""
        return next((f"rollout.servers.{name}" for name in ("model_path", "urls") if getattr(self.servers, name)), None)
