"""Capabilities of each kind of rollout engine: everything outside `rollout/engines` asks this, and never for a name.

The engines themselves are in `rollout/engines`; each of their classes has its entry here as `capabilities`. Importable
without torch, so that a config can be checked, and a run planned, where no engine could run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megarl.config.rollout import RolloutConfig
from megarl.errors import ConfigError
from megarl.system.user_code import load_user_function


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of an engine. The defaults are those of the simplest: one process that answers one call at a time."""

    concurrent: bool = False
    """Answers many requests at once; else one after the other, and so is sent many prompts in each."""
    batch_samples: int = 64
    """Responses that an engine which is not concurrent computes at once."""
    weights: Literal["slices", "tensors", "folder", "nothing"] = "tensors"
    """Is sent the slices that its ranks hold, whole tensors, or a Hugging Face folder; or none are of use to it."""
    sleeps: bool = False
    """Gives up its memory while a trainer on the same GPU works (`Engine.sleep`, `Engine.wake`)."""
    lent: bool = False
    """Sleeps, is woken and goes on with what was cut: it may stand on the trainer's GPUs (`rollout.schedule.lent_engines`)."""
    in_process: bool = True
    """Computes in the engine's own process, so that `rollout.tp` must be 1."""
    over_nodes: bool = False
    """Can be on several nodes, if `rollout.tp` is more than the GPUs of one (`Engine.start_on_node`)."""
    replays: bool = False
    """Gives back the responses in `rollout.replay_from`, step by step."""
    sees: bool = False
    """Answers prompts that show pictures, never with features of theirs that other weights made."""
    sees_videos: bool = False
    """Answers prompts that show videos in the model's own way (`data.video: native`)."""
    routes: bool = False
    """Says which experts each token went to, if it is asked (`SamplingParams.extra`)."""
    indexes: bool = False
    """Says which keys indexers chose for each token, if it is asked."""
    continues: bool = False
    """Cuts responses short when it is told to (`Engine.cut`), and goes on with those that were (`EngineRequest.begun`)."""
    reports: bool = False
    """Says what it holds at once (`Engine.capacity`), and which responses of a request have ended (`Engine.take_ended`)."""
    keeps_turns: bool = False
    """Keeps what it computed of a conversation until its next turn (`EngineRequest.conversation`), at most
    `rollout.episode.turn_cache_bytes` bytes."""
    starts_elsewhere: bool = False
    """May serve a folder of its own (`rollout.servers.model_path`), in which weights are stored otherwise."""
    drafts: tuple[str, ...] = ()
    """Values of `rollout.speculative.algorithm` beside `none`."""
    updates_drafts: bool = False
    """Takes the weights of the policy's layer for multi-token prediction with every update, if it drafts with it."""
    draft_trees: bool = False
    """Verifies drafts that are trees (`rollout.speculative.topk` above 1)."""
    adapters: bool = False
    """Takes the policy's adapters alone, and adds them to the weights of the model's folder (`policy.lora.sync: adapters`)."""
    reads_arguments: bool = False
    """Reads `rollout.engine_args`."""
    set_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Arguments that `rollout.engine_args` cannot have, and what sets them."""


DRAFTS = ("mtp", "ngram", "standalone", "eagle", "eagle3")
_EXACT = "megarl, whose responses are distributed as without drafts"
_SGLANG_SET_ELSEWHERE = {
    "dtype": "model.dtype",
    "tp_size": "rollout.tp",
    "device": "the machine that the run is on",
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "nnodes", "node_rank"), "megarl, which chooses the engines' GPUs"),
    "dist_init_addr": "megarl, which starts an engine's processes on all of its nodes",
    "host": "megarl, whose servers listen on this machine alone",
    "weight_version": "megarl, which counts the weights' versions",
    "skip_tokenizer_init": "megarl, which sends and takes token ids",
    "custom_weight_loader": "megarl, which sends the weights",
    "mm_enable_dp_encoder": "megarl, which sends every rank of an engine the whole vision tower",
    "mm_process_config": "data.min_pixels and data.max_pixels",
    "port": "rollout.servers.port",
    "model_path": "rollout.servers.model_path",
    "enable_return_routed_experts": "policy.routing.replay",
    "speculative_algorithm": "rollout.speculative.algorithm",
    "speculative_num_steps": "rollout.speculative.num_steps",
    "speculative_eagle_topk": "rollout.speculative.topk",
    "speculative_ngram_max_bfs_breadth": "rollout.speculative.topk",
    "speculative_num_draft_tokens": "rollout.speculative.num_draft_tokens",
    "speculative_draft_model_path": "rollout.speculative.draft_model",
    "speculative_accept_threshold_single": _EXACT,
    "speculative_accept_threshold_acc": _EXACT,
}
"""Arguments that are refused whether or not the option is there whose field sets them."""

EMBEDDED = EngineCapabilities(
    lent=True,
    sees=True,
    sees_videos=True,
    routes=True,
    indexes=True,
    continues=True,
    keeps_turns=True,
    starts_elsewhere=True,
    drafts=("mtp", "ngram", "standalone"),
    updates_drafts=True,
    adapters=True,
)
REPLAY = EngineCapabilities(weights="nothing", replays=True, sees=True, sees_videos=True)
SGLANG = EngineCapabilities(
    concurrent=True,
    weights="slices",
    sleeps=True,
    lent=True,
    in_process=False,
    over_nodes=True,
    sees=True,
    sees_videos=True,
    routes=True,
    continues=True,
    reports=True,
    starts_elsewhere=True,
    drafts=DRAFTS,
    updates_drafts=True,
    draft_trees=True,
    adapters=True,
    reads_arguments=True,
    set_elsewhere=_SGLANG_SET_ELSEWHERE,
)
RUNNING_SGLANG = EngineCapabilities(
    concurrent=True,
    weights="folder",
    in_process=False,
    continues=True,
    reports=True,
    reads_arguments=True,
    set_elsewhere=_SGLANG_SET_ELSEWHERE,
)
"""Capabilities of SGLang servers that somebody else started."""
NOT_YET_KNOWN = EngineCapabilities(
    weights="slices",
    lent=True,
    in_process=False,
    sees=True,
    sees_videos=True,
    routes=True,
    indexes=True,
    continues=True,
    keeps_turns=True,
    drafts=DRAFTS,
    draft_trees=True,
    adapters=True,
    reads_arguments=True,
)
"""Stands for the user's own engine while a config is read, which runs nobody's code: it contradicts no field."""


RUNNING = "running SGLang servers"
KINDS = {"sglang": SGLANG, RUNNING: RUNNING_SGLANG, "embedded": EMBEDDED, "replay": REPLAY}
"""The kinds that megarl has, by what `kind_of` calls them."""


def kind_of(rollout: RolloutConfig) -> str:
    """The kind of engines of a run, or the import path of the user's own."""
    return RUNNING if rollout.engine == "sglang" and rollout.weight_transport == "folder" else rollout.engine


def is_users_own(engine: str) -> bool:
    """Return whether `rollout.engine` is the import path of a class and not the name of a kind that megarl has."""
    return ":" in engine


def declared_capabilities(rollout: RolloutConfig) -> EngineCapabilities:
    """The capabilities of the engines of a run as far as they are known without importing the user's own."""
    return NOT_YET_KNOWN if is_users_own(rollout.engine) else KINDS[kind_of(rollout)]


def capabilities_of(rollout: RolloutConfig) -> EngineCapabilities:
    """The capabilities of the engines of a run; imports the user's own engine.

    Raises:
        ConfigError: the engine cannot be imported, or does not say what it is able to do.
    """
    if not is_users_own(rollout.engine):
        return declared_capabilities(rollout)
    capabilities = getattr(load_user_function(rollout.engine, ConfigError), "capabilities", None)
    if not isinstance(capabilities, EngineCapabilities):
        raise ConfigError(
            f"rollout.engine is '{rollout.engine}', which must be a class derived from megarl.rollout.Engine: it has no "
            "EngineCapabilities as 'capabilities'"
        )
    return capabilities
