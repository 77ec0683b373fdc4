"""The rollout side of a run as the driver sees it: engines with a known weight version, prompts in, samples out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.engine_kinds import capabilities_of
from megarl.config.evaluations import EvaluationConfig
from megarl.core.protocols import NextPrompts
from megarl.core.staleness_manager import StalenessManager
from megarl.data.branches import first_branches
from megarl.data.columns import asked_columns, columns
from megarl.data.rows import Origin
from megarl.data.sample import Prompt, RolloutBatch, Sample
from megarl.data.stop_finder import asked_stops
from megarl.data.tokenize import PromptBuilder
from megarl.errors import ConfigError, EngineError, WorkerError
from megarl.experience.inputs import OpenedEpisodes
from megarl.models.registry import architecture_for, load_hf_config
from megarl.observe.run_state import EngineStatus
from megarl.observe.trace import Span
from megarl.planning.turns import bytes_beside_engines, takes_turns
from megarl.rollout.engines.protocol import EnginePlace, SamplingParams
from megarl.rollout.engines.registry import check_engine, engine_path
from megarl.rollout.scheduling.engine_order import CALLS_PER_ENGINE
from megarl.rollout.scheduling.engine_state import GenerateGroups, PendingResult
from megarl.rollout.scheduling.requests import single_turns
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.weights.machines import Machines
from megarl.workers.cluster import Cluster
from megarl.workers.engine_calls import EngineCalls, is_lost, wait_for_actor
from megarl.workers.gpu_sharing import GpuTurns
from megarl.workers.group import wait_for
from megarl.workers.roles import Roles
from megarl.workers.weight_updates import WeightUpdates

SHORT_POLL_S = 0.2  # between two looks whether there are enough engines
GRACE_S = 30.0  # an engine that did not start in time says so itself, with the end of its log


class Rollouts:
    """All engines of a run. `stale` is set by whoever changes the policy and cleared by `update_weights`.

    `version` is that of the policy whose weights the engines have, or are being given.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        tokenizer: Any,
        episodes: OpenedEpisodes | None = None,
        say: Callable[[str], None] | None = None,
        finished: Callable[[list[Sample]], None] = lambda group: None,
    ) -> None:
        """`episodes`: None where every response is a single turn. `say` is told of engines that fail.

        `finished` is given each group of a batch when it is.
        """
        self.config, self.tokenizer, self.episodes = config, tokenizer, episodes
        rollout = config.rollout
        engine = check_engine(config, cluster.platform.name)
        self.stale, self.version = False, 0
        hf_config = load_hf_config(config.model.path)
        vision = architecture_for(hf_config).vision(hf_config)
        # one that is sampled would be taken for a picture by whoever reads the response
        self._placeholders = (vision.image_token, vision.video_token) if vision is not None else ()
        logs = Path(cluster.log_folder)
        logs.mkdir(parents=True, exist_ok=True)
        at = cluster.placement
        beside_each_other = -(-rollout.engines // max(1, len(at.machines)))
        cores = cluster.cores // (1 if rollout.schedule.mode == "sync" else 2)
        self.threads = threads = rollout.threads or max(1, cores // beside_each_other)
        self._machines = Machines.of(at) if len(at.machines) > 1 else None
        platform = cluster.platform.name
        self.lent = range(len(at.engines) - rollout.lent_engines, len(at.engines))
        """Numbers of the engines that the trainer's GPUs are lent to."""
        self.takes_turns = takes_turns(config, platform) or bool(self.lent)
        """Whether engines sleep while the trainer works: all, or those that are lent."""
        beside = bytes_beside_engines(config) if self.takes_turns and platform == "cuda" else 0
        options = []
        for number in range(self.lent.stop):
            gpus, *others = [at.gpus(bundles) for bundles in at.engine_nodes(number)] or [()]
            beside_it = beside if number in self.lent or not self.lent else 0
            place = EnginePlace(number, threads, platform, logs, gpus, beside_it, tuple(others))
            options.append(engine.options(config, place))
        model_path = str(Path(config.model.path).resolve())
        self.engines = cluster.start_engines(engine_path(rollout), model_path, options, threads)
        self._say = say or (lambda line: None)
        self.scheduler = self._schedule(say, finished)
        self.updates: WeightUpdates | None = None
        self._turns: GpuTurns | None = None
        self._taken: list[RolloutBatch] = []
        self._counted = (0, 0, 0, 0)
        self._asked: Sequence[PendingResult] = ()
        self._prompts_asked, self._per_request = 0, 1

    def _schedule(self, say: Callable[[str], None] | None, finished: Callable[[list[Sample]], None]) -> Scheduler:
        rollout, schedule = self.config.rollout, self.config.rollout.schedule
        staleness = {"sync": 0, "one_step_off_policy": 1, "async": schedule.max_staleness}[schedule.mode]
        able = capabilities_of(rollout)
        self._batch_samples = 1 if able.concurrent else able.batch_samples  # of prompts that are asked together
        if not able.concurrent:  # a second request keeps such an engine from waiting for the driver
            at_once = max(1, able.batch_samples // rollout.samples_per_prompt)
            at_most = 2 * at_once
        else:
            at_once, at_most = 1, max(1, CALLS_PER_ENGINE // (1 if self.episodes is None else rollout.samples_per_prompt))
            if not able.reports:  # then its share of all that may be under way is the only bound
                at_most = min(at_most, (1 + staleness) * rollout.groups_per_engine)
        return Scheduler(
            [EngineCalls(engine, number) for number, engine in enumerate(self.engines)],
            StalenessManager(rollout.prompts_per_step, staleness, schedule.over_sample, continues=schedule.continues),
            self._respond(self.params(), rollout.samples_per_prompt),
            groups_per_request=at_once,
            groups_per_engine=at_most,
            samples_per_group=rollout.samples_per_prompt,
            reports=able.reports,
            restart_deadline_s=self.config.resources.deadlines.start_s + GRACE_S,
            cuts=able.continues,
            keeps_turns=able.keeps_turns,
            dispensable=self.lent if rollout.further_engines is None else range(rollout.engines + rollout.further_engines),
            say=say,
            finished=finished,
        )

    def begin_start(self) -> list[Any]:
        """Start every engine; the trainer loads meanwhile. Give the result to `finish_start`."""
        return [self._start(number) for number in range(len(self.engines))]

    def _start(self, number: int) -> Any:
        return self.engines[number].start.remote(None if self.config.other_weights else self.version)

    def finish_start(self, starting: list[Any], roles: Roles | None = None) -> None:
        """Wait until the engines answer; `roles` hold the policy that they will be given.

        An engine whose process was lost meanwhile, which Ray makes anew, is started once more.
        """
        names = [f"engine {number}" for number in range(len(starting))]
        deadline_s = self.config.resources.deadlines.start_s + GRACE_S
        ends_at, again = time.monotonic() + deadline_s, set[int]()
        while True:
            try:
                wait_for(starting, phase="engine start", deadline_s=ends_at - time.monotonic(), whose=names)
                break
            except WorkerError:
                lost = [number for number, start in enumerate(starting) if is_lost(start)]
                if not lost or again.intersection(lost):
                    raise
                again.update(lost)
                for number in lost:
                    self._say(f"engine {number}'s process was lost while it started; it is started again")
                    wait_for_actor(self.engines[number], ends_at)
                    starting[number] = self._start(number)
        self.scheduler.thread.run(self.scheduler.order.ask_capacities())
        if self.config.other_weights:
            self.scheduler.empty()
        else:
            self.scheduler.resume(range(len(self.engines)), self.version)
        if roles is not None:
            self._connect(roles)

    def _connect(self, roles: Roles) -> None:
        self.updates = WeightUpdates(self.config, self.scheduler, self.engines, roles, self._machines)
        self._turns = self.updates.turns

    def close(self) -> None:
        """Stop whatever is under way; the engines themselves belong to the cluster."""
        self.scheduler.close()

    # training -----------------------------------------------------------------------------------------------------

    def next_batch(self, next_prompts: NextPrompts, groups: int | None = None) -> RolloutBatch:
        """A step's groups of responses (None: `prompts_per_step`), trained under `version`; prompts are drawn as needed.

        Unless the mode is `sync`, the engines go on with what the next steps will need.
        """
        self.scheduler.open_step(self.version, next_prompts, groups)
        self._wait()
        self._taken.append(self.scheduler.pop_batch())
        return self._taken[-1]

    def finish_step_ahead(self, next_prompts: NextPrompts) -> None:
        """In mode `one_step_off_policy`, before an update: wait for the next step's responses; none spans two versions."""
        if self.config.rollout.schedule.mode == "one_step_off_policy":
            self.scheduler.open_step(self.version + 1, next_prompts)
            self._wait(version=self.version + 1)
            self.scheduler.stop_all()

    def update_weights(self) -> None:
        """Give every engine the policy under a new version; the engines check every tensor they receive."""
        assert self.updates is not None, "weights come from roles"
        self.version, self.stale = self.version + 1, False
        behind = [engine.number for engine in self.scheduler.engines if engine.is_up and engine.version != self.version]
        self.updates.update_engines(behind, self.version)

    def take_sent_bytes(self) -> int:
        """Bytes sent since the last call, as `WeightUpdates` counts them; none where engines take no weights."""
        return self.updates.take_sent_bytes() if self.updates is not None else 0

    def take_figures_of_turns(self) -> dict[str, float]:
        """Metrics since the last call of the turns that engines take with the trainer; none where they take none."""
        return self._turns.take_figures() if self._turns is not None else {}

    def resume_after(self, version: int, groups: dict[str, Any] | None) -> None:
        """Continue where the engines had `version` and `state()` was `groups` (None: nothing was under way).

        The engines have yet to be given the policy's weights.
        """
        self.version, self.stale = version, True
        if groups is not None:
            self.scheduler.load_state_dict(groups)
        self.scheduler.empty()

    def progress(self) -> tuple[int, int]:
        """Groups that are finished of those that are due, and these; another thread may ask."""
        manager = self.scheduler.manager
        return min(manager.count("finished"), manager.due), manager.due

    def take_spans(self) -> list[list[Span]]:
        """By engine what it did since the last call."""
        return self.scheduler.take_spans()

    def engine_status(self) -> list[EngineStatus]:
        """The activity of every engine; another thread may ask."""
        return [engine.status for engine in self.scheduler.engines if not engine.is_absent]

    def state(self) -> dict[str, Any]:
        """The prompts that were drawn and have not been trained on, JSON-able: a resumed run repeats and drops none."""
        return self.scheduler.state_dict()

    def figures(self) -> dict[str, float]:
        """Metrics of the batches taken since the last call."""
        manager, staleness = self.scheduler.manager, [age for groups in self._taken for age in groups.staleness]
        self._taken = []
        aborted_tokens = self.scheduler.partial.aborted_tokens
        before, self._counted = self._counted, (manager.requeued, manager.aborted, manager.suspended, aborted_tokens)
        counts = self.episodes.take_counts() if self.episodes is not None else {}
        return {
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "rollout/weight_version": self.version,
            "rollout/requeued": manager.requeued - before[0],
            "rollout/dropped_stale": manager.aborted - before[1],
            "rollout/suspended": manager.suspended - before[2],
            "rollout/aborted_tokens": aborted_tokens - before[3],
            "rollout/in_flight": manager.count("in_flight"),
            **{f"episode/{name}": count for name, count in counts.items()},
        }

    # anything else ------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False) -> list[Sample]:
        """`samples_per_prompt` responses to each prompt, or the single greedy one, grouped by prompt in order."""
        return self.ask(prompts, self.params(greedy=greedy), 1 if greedy else self.config.rollout.samples_per_prompt)

    def sample(self, prompts: Sequence[Prompt], settings: EvaluationConfig) -> list[Sample]:
        """The responses that an evaluation set asks for, grouped by prompt in order."""
        params = replace(
            self.params(stop=settings.stop, stop_token_ids=settings.stop_token_ids),
            greedy=not settings.temperature,
            extra=frozenset(),
            temperature=settings.temperature or 1.0,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_new_tokens=settings.max_new_tokens or self.config.rollout.max_new_tokens,
        )
        return self.ask(prompts, params, settings.samples_per_prompt)

    def prompt(self, row: dict[str, Any], name: str) -> Prompt:
        """Make the prompt that `row` has under `data.prompt_key`, a text or chat messages; its row id begins with `name`.

        Raises:
            DataError: it is empty, too long (`data.max_prompt_tokens`), or no prompt.
        """
        (prompt,) = self._builder.build([row], prefix=name, origin=Origin("the prompt", None))
        return prompt

    @cached_property
    def _builder(self) -> PromptBuilder:
        data = self.config.data.model_copy(update={"prompt": None})  # texts are given, not made of columns
        return PromptBuilder(self.tokenizer, data, self.episodes.tool_schemas if self.episodes is not None else ())

    def answer(self, prompts: Sequence[Prompt], n: int, *, greedy: bool = False, **sampling: Any) -> list[Sample]:
        """`n` responses to each prompt; `sampling` are fields of `SamplingParams`; None: as the section `rollout` says."""
        if n < 1:
            raise ConfigError(f"n is {n}; it must be at least 1")
        stops = asked_stops(self.tokenizer, sampling.pop("stop", None), sampling.pop("stop_token_ids", None))
        changed = {name: value for name, value in sampling.items() if value is not None}
        return self.ask(prompts, replace(self.params(greedy=greedy, **stops), **changed), n)

    def answered(self) -> tuple[int, int]:
        """Counts of the prompts that were asked last outside batches: those that are answered, and all."""
        done = sum(answer.done() for answer in self._asked) * self._per_request
        return min(done, self._prompts_asked), self._prompts_asked

    def ask(self, prompts: Sequence[Prompt], params: SamplingParams, n: int) -> list[Sample]:
        """`n` responses to each prompt under `params`, grouped by prompt in order."""
        per_request = max(1, self._batch_samples // n)
        self._asked = answers = self.scheduler.ask(prompts, self._respond(params, n), per_request, n)
        self._prompts_asked, self._per_request = len(prompts), per_request
        self._wait(answers)
        return first_branches([sample for answer in answers for group in answer.result() for sample in group])

    def _wait(self, answers: Sequence[PendingResult] | None = None, version: int | None = None) -> None:
        """Wait for `answers`, or for the batch that is due; engines that come back meanwhile are given the policy."""
        ends_at = time.monotonic() + self.config.rollout.deadlines.generate_s
        if self._turns is not None:
            self._turns.before_wait(self.version if version is None else version, answers)
        while not self.scheduler.wait(ends_at - time.monotonic(), answers):
            engines = self.scheduler.without_weights
            if self.scheduler.is_short:  # engines are waited for as long as it takes
                time.sleep(SHORT_POLL_S)
                ends_at = time.monotonic() + self.config.rollout.deadlines.generate_s
            if self.updates is None:
                errors = (self.scheduler.engines[engine].error for engine in engines)
                raise next(filter(None, errors), None) or EngineError(f"engines {engines} have no weights, and nothing trains")
            self.updates.update_engines(engines, self.version if version is None else version)

    def params(
        self, *, greedy: bool = False, stop: Sequence[str] | None = None, stop_token_ids: Sequence[int] | None = None
    ) -> SamplingParams:
        """Sampling parameters of the section `rollout`, but for the stops that are given."""
        rollout, end = self.config.rollout, self.tokenizer.eos_token_id
        token_ids = rollout.stop_token_ids if stop_token_ids is None else stop_token_ids
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            greedy=greedy or rollout.greedy,
            ignore_eos=rollout.ignore_eos,
            stop=tuple(rollout.stop if stop is None else stop),
            stop_token_ids=(*((end,) if end is not None else ()), *token_ids),
            cut_token_ids=self._placeholders,
            extra=asked_columns(self.config) if not greedy else frozenset(),
        )

    def _respond(self, params: SamplingParams, n: int) -> GenerateGroups:
        deadline_s = self.config.rollout.deadlines.generate_s
        if self.episodes is not None:
            from megarl.rollout.scheduling.episode_requests import episode_groups  # single turns need none of it

            return episode_groups(self.episodes, params, n, deadline_s)
        stored = not any(columns()[name].tokens for name in params.extra)  # token columns travel with their responses
        return single_turns(params, n, deadline_s, self.tokenizer, stored=stored)
