"""The rollout side of a run as the driver sees it: engines with a known weight version, prompts in, samples out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.data.sample import Prompt, Sample
from megarl.errors import EngineError
from megarl.rollout.checksums import check_model
from megarl.rollout.engine import SamplingParams
from megarl.rollout.engine_slot import Answer, Respond
from megarl.rollout.episodes import Episode, EpisodeContext
from megarl.rollout.ledger import Ledger
from megarl.rollout.respond import episodes, single_turns
from megarl.rollout.scheduler import Groups, Scheduler
from megarl.trainers.roles import Roles
from megarl.trainers.weight_updates import WeightUpdates
from megarl.workers.cluster import Cluster
from megarl.workers.engine_calls import EngineCalls
from megarl.workers.group import wait_for

EMBEDDED_BATCH = 64  # responses that the embedded engine computes at once
CALLS_PER_ENGINE = 512  # under way at once, at most
GRACE_S = 30.0  # an engine that did not start in time says so itself, with the end of its log
NextPrompts = Callable[[int], list[Prompt]]


class Rollouts:
    """All engines of a run. `stale` is set by whoever changes the policy and cleared by `update_weights`.

    `version` is that of the policy whose weights the engines have, or are being given.
    """

    def __init__(
        self, config: Config, cluster: Cluster, tokenizer: Any, episode: tuple[Episode, EpisodeContext] | None = None
    ) -> None:
        """`episode`: None where every response is a single turn."""
        self.config, self.tokenizer, self.episode = config, tokenizer, episode
        rollout = config.rollout
        if rollout.engine == "sglang" and rollout.sync != "disk":
            # now, not when everything else has been loaded
            check_model(config.model.path, rollout.tp, cluster.platform.name)
        self.stale = False
        self.version = 0
        logs = Path(cluster.log_folder)
        logs.mkdir(parents=True, exist_ok=True)
        threads = rollout.threads or max(1, cluster.cores // (1 if rollout.schedule.mode == "sync" else 2))
        options = [self._options(number, threads, logs, cluster.platform.name) for number in range(rollout.engines)]
        model_path = str(Path(config.model.path).resolve())
        self.engines = cluster.start_engines(rollout.engine, model_path, options, threads)
        self.scheduler = self._schedule()
        self._updates: WeightUpdates | None = None
        self._taken: list[Groups] = []
        self._counted = (0, 0)

    def _schedule(self) -> Scheduler:
        rollout, schedule = self.config.rollout, self.config.rollout.schedule
        staleness = {"sync": 0, "one_step": 1, "async": schedule.staleness}[schedule.mode]
        if self._takes_turns:  # a second request keeps such an engine from waiting for the driver
            at_once = max(1, EMBEDDED_BATCH // rollout.samples_per_prompt)
            at_most = 2 * at_once
        else:
            calls = 1 if self.episode is None else rollout.samples_per_prompt
            at_once, at_most = 1, min(self._share_of_a_step, max(1, CALLS_PER_ENGINE // calls))
        return Scheduler(
            [EngineCalls(engine, number) for number, engine in enumerate(self.engines)],
            Ledger(rollout.prompts_per_step, staleness, schedule.over_sample),
            self._respond(greedy=False),
            groups_per_request=at_once,
            groups_per_engine=at_most,
            restart_deadline_s=self.config.resources.deadlines.start_s + GRACE_S,
        )

    def begin_start(self) -> list[Any]:
        """Start every engine; the trainer loads meanwhile. Give the result to `finish_start`."""
        return [engine.start.remote() for engine in self.engines]

    def finish_start(self, starting: list[Any], roles: Roles | None = None) -> None:
        """Wait until the engines answer; `roles` hold the policy that they will be given."""
        names = [f"engine {number}" for number in range(len(starting))]
        deadline_s = self.config.resources.deadlines.start_s + GRACE_S
        wait_for(starting, phase="engine start", deadline_s=deadline_s, whose=names)
        if self.config.rollout.other_weights:
            self.scheduler.empty()
        else:
            self.scheduler.resume(range(len(self.engines)), self.version)
        if roles is not None:
            self._updates = WeightUpdates(self.config, self.scheduler, self.engines, roles)

    def close(self) -> None:
        """Stop whatever is under way; the engines themselves belong to the cluster."""
        self.scheduler.close()

    # training -----------------------------------------------------------------------------------------------------

    def next_batch(self, next_prompts: NextPrompts, groups: int | None = None) -> Groups:
        """A step's groups of responses (None: `prompts_per_step`), trained under `version`; prompts are drawn as needed.

        Unless the mode is `sync`, the engines go on with what the next steps will need.
        """
        self.scheduler.open_step(self.version, next_prompts, groups)
        self._wait()
        self._taken.append(self.scheduler.take())
        return self._taken[-1]

    def finish_step_ahead(self, next_prompts: NextPrompts) -> None:
        """In `one_step` mode, before an update: wait for the next step's responses, so that none spans two versions."""
        if self.config.rollout.schedule.mode == "one_step":
            self.scheduler.open_step(self.version + 1, next_prompts)
            self._wait(version=self.version + 1)
            self.scheduler.stop_all()

    def update_weights(self) -> None:
        """Give every engine the policy under a new version; the engines check every tensor they receive."""
        assert self._updates is not None, "weights come from roles"
        self.version, self.stale = self.version + 1, False
        behind = [slot.number for slot in self.scheduler.slots if slot.restarting is None and slot.version != self.version]
        self._updates.give(behind, self.version)

    def resume_after(self, version: int, groups: dict[str, Any] | None) -> None:
        """Continue where the engines had `version` and `state()` was `groups` (None: nothing was under way).

        The engines have yet to be given the policy's weights.
        """
        self.version, self.stale = version, True
        if groups is not None:
            self.scheduler.load_state_dict(groups)
        self.scheduler.empty()

    def standing(self) -> tuple[int, int]:
        """Groups that are finished of those that are due, and these; another thread may ask."""
        ledger = self.scheduler.ledger
        return min(ledger.count("finished"), ledger.due), ledger.due

    def state(self) -> dict[str, Any]:
        """The prompts that were drawn and have not been trained on, JSON-able: a resumed run repeats and drops none."""
        return self.scheduler.state_dict()

    def figures(self) -> dict[str, float]:
        """Metrics of the batches taken since the last call."""
        ledger, staleness = self.scheduler.ledger, [age for groups in self._taken for age in groups.staleness]
        self._taken = []
        before, self._counted = self._counted, (ledger.requeued, ledger.aborted)
        counts = self.episode[1].take_counts() if self.episode is not None else {}
        return {
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "rollout/weight_version": self.version,
            "rollout/requeued": ledger.requeued - before[0],
            "rollout/aborted": ledger.aborted - before[1],
            "rollout/in_flight": ledger.count("in_flight"),
            **{f"episode/{name}": count for name, count in counts.items()},
        }

    # anything else ------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False) -> list[Sample]:
        """`samples_per_prompt` responses to each prompt, or the single greedy one, grouped by prompt in order."""
        per_request = self.scheduler.groups_per_request * (self.config.rollout.samples_per_prompt if greedy else 1)
        answers = self.scheduler.ask(prompts, self._respond(greedy), per_request)
        self._wait(answers)
        return [sample for answer in answers for group in answer.result() for sample in group]

    def _wait(self, answers: Sequence[Answer] | None = None, version: int | None = None) -> None:
        """Wait for `answers`, or for the batch that is due; engines that come back meanwhile are given the policy."""
        ends_at = time.monotonic() + self.config.rollout.deadlines.generate_s
        while not self.scheduler.wait(ends_at - time.monotonic(), answers):
            engines = self.scheduler.without_weights
            if self._updates is None:
                errors = (self.scheduler.slots[engine].error for engine in engines)
                raise next(filter(None, errors), None) or EngineError(f"engines {engines} have no weights, and nothing trains")
            self._updates.give(engines, self.version if version is None else version)

    def _respond(self, greedy: bool) -> Respond:
        rollout = self.config.rollout
        params = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            greedy=greedy or rollout.greedy,
            ignore_eos=rollout.ignore_eos,
            stop_token_ids=(self.tokenizer.eos_token_id,) if self.tokenizer.eos_token_id is not None else (),
        )
        n, deadline_s = 1 if greedy else rollout.samples_per_prompt, rollout.deadlines.generate_s
        if self.episode is not None:
            return episodes(*self.episode, params, n, deadline_s)
        return single_turns(params, n, deadline_s, self.tokenizer)

    @property
    def _takes_turns(self) -> bool:
        """Whether an engine computes one request after the other, and so gets many prompts in each."""
        return self.config.rollout.engine != "sglang"

    @property
    def _share_of_a_step(self) -> int:
        """Groups of a step that an engine gets if all get as many."""
        rollout = self.config.rollout
        return -(-(rollout.prompts_per_step + rollout.schedule.over_sample) // rollout.engines)

    def _options(self, number: int, threads: int, logs: Path, platform_name: str) -> dict[str, Any]:
        config, rollout = self.config, self.config.rollout
        if rollout.engine == "replay":
            return {"replay_from": rollout.replay_from, "initial_version": 0}
        if rollout.engine == "embedded":  # one seed for all: a response is the same whichever engine samples it
            return {"dtype": config.model.dtype, "seed": config.run.seed, "initial_version": 0}
        if rollout.sync == "disk":
            url, token = rollout.engine_args["urls"][number], os.environ.get("MEGARL_ENGINE_TOKEN")
            return {"url": url, "token": token, "dtype": config.model.dtype, "deadline_s": config.resources.deadlines.start_s}
        tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
        requests = self._share_of_a_step * rollout.samples_per_prompt
        on_cpu = platform_name == "cpu"
        extra = dict(rollout.engine_args)
        port = extra.pop("port", None)
        return {
            "initial_version": None if rollout.other_weights else 0,
            "log_file": logs / f"engine-{number}.log",
            "device": platform_name,
            "dtype": config.model.dtype,
            "tp": rollout.tp,
            "threads": threads,
            "port": port + number if port is not None else None,
            "max_total_tokens": requests * tokens + 1024 if on_cpu else None,
            "max_running_requests": max(requests, 64) if on_cpu else None,
            "extra": extra,
            "start_timeout_s": config.resources.deadlines.start_s,
        }
