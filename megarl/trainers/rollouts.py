"""The rollout side of a run as the driver sees it: engines with a known weight version, prompts in, samples out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.data.sample import Prompt, Sample
from megarl.rollout.checksums import check_model
from megarl.rollout.engine import Generation, SamplingParams
from megarl.trainers.roles import Roles
from megarl.workers.cluster import Cluster
from megarl.workers.group import wait_for


class Rollouts:
    """All engines of a run. `stale` is set by whoever changes the policy and cleared by `update_weights`."""

    def __init__(self, config: Config, cluster: Cluster, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        if config.rollout.engine == "sglang":
            # now, not when everything else has been loaded
            check_model(config.model.path, config.rollout.tp, cluster.platform.name)
        self.stale = False
        self.version = 0
        self.sampled_version = 0
        logs = Path(cluster.log_folder)
        logs.mkdir(parents=True, exist_ok=True)
        threads = config.rollout.threads or cluster.cores
        options = [self._options(number, threads, logs, cluster.platform.name) for number in range(config.rollout.engines)]
        model_path = str(Path(config.model.path).resolve())
        self.engines = cluster.start_engines(config.rollout.engine, model_path, options, threads)
        self._connected = False

    def begin_start(self) -> list[Any]:
        """Start every engine; the trainer loads meanwhile. Give the result to `finish_start`."""
        return [engine.start.remote() for engine in self.engines]

    def finish_start(self, starting: list[Any]) -> None:
        """Wait until the engines answer."""
        wait_for(starting, phase="engine start", deadline_s=self.config.rollout.deadlines.start_s)

    def resume_after(self, version: int) -> None:
        """Continue a run whose engines last had `version`; these engines have yet to be given the policy's weights."""
        self.version, self.stale = version, True

    def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False) -> list[Sample]:
        """`samples_per_prompt` responses to each prompt, or the single greedy one, grouped by prompt in order."""
        config = self.config.rollout
        per_prompt = 1 if greedy else config.samples_per_prompt
        params = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            greedy=greedy or config.greedy,
            ignore_eos=config.ignore_eos,
            stop_token_ids=self._stop_token_ids(),
        )
        shares = [list(prompts[number :: len(self.engines)]) for number in range(len(self.engines))]
        references = [
            engine.call.remote(
                "generate",
                [prompt.prompt_ids for prompt in share],
                params,
                n=per_prompt,
                keys=[prompt.group_id or prompt.row_id for prompt in share],
                deadline_s=config.deadlines.generate_s,
            )
            for engine, share in zip(self.engines, shares, strict=True)
            if share
        ]
        deadline_s = config.deadlines.generate_s + 30
        answers = wait_for(references, phase="generate", deadline_s=deadline_s)
        self.sampled_version = self.version
        by_group: dict[str, list[Sample]] = {}
        for share, groups in zip(shares, answers, strict=False):
            for prompt, group in zip(share, groups, strict=True):
                by_group[prompt.group_id or prompt.row_id] = [
                    self._sample(prompt, number, generation) for number, generation in enumerate(group)
                ]
        return list(itertools.chain.from_iterable(by_group[prompt.group_id or prompt.row_id] for prompt in prompts))

    def update_weights(self, roles: Roles) -> None:
        """Push the policy into every engine under a new version; the engines check every tensor they received."""
        deadline_s = self.config.rollout.deadlines.update_s
        if not self._connected:
            endpoints = wait_for([engine.endpoint.remote() for engine in self.engines], phase="sync", deadline_s=deadline_s)
            targets = [endpoint or engine for endpoint, engine in zip(endpoints, self.engines, strict=True)]
            roles.open_senders(targets, self.config.rollout.sync, deadline_s)
            self._connected = True
        version = self.version + 1
        self._all("begin_update", [(version,)] * len(self.engines))
        checksums = roles.push_weights(deadline_s)
        self._all("end_update", [(version, sums) for sums in checksums])
        self.version, self.stale = version, False

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        references = [engine.call.remote(method, *args) for engine, args in zip(self.engines, arguments, strict=True)]
        wait_for(references, phase="weight sync", deadline_s=self.config.rollout.deadlines.update_s)

    def _sample(self, prompt: Prompt, number: int, generation: Generation) -> Sample:
        group_id = prompt.group_id or prompt.row_id
        return Sample(
            sample_id=f"{group_id}/{number}",
            group_id=group_id,
            row_id=prompt.row_id,
            prompt_ids=prompt.prompt_ids,
            response_ids=generation.response_ids,
            sampled_mask=[1] * len(generation.response_ids),
            rollout_log_probs=generation.log_probs,
            weight_versions=generation.weight_versions,
            finish_reason=generation.finish_reason,
            prompt_text=prompt.prompt_text,
            response_text=self.tokenizer.decode(generation.response_ids, skip_special_tokens=True),
            row=prompt.row,
        )

    def _stop_token_ids(self) -> tuple[int, ...]:
        return (self.tokenizer.eos_token_id,) if self.tokenizer.eos_token_id is not None else ()

    def _options(self, number: int, threads: int, logs: Path, platform_name: str) -> dict[str, Any]:
        config, rollout = self.config, self.config.rollout
        if rollout.engine == "replay":
            return {"replay_from": rollout.replay_from, "initial_version": 0}
        if rollout.engine == "embedded":
            return {"dtype": config.model.dtype, "seed": config.run.seed + number, "initial_version": 0}
        tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
        requests = -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines)
        on_cpu = platform_name == "cpu"
        extra = dict(rollout.engine_args)
        port = extra.pop("port", None)
        return {
            "initial_version": 0,
            "log_file": logs / f"engine-{number}.log",
            "device": platform_name,
            "dtype": config.model.dtype,
            "tp": rollout.tp,
            "threads": threads,
            "port": port + number if port is not None else None,
            "max_total_tokens": requests * tokens + 1024 if on_cpu else None,
            "max_running_requests": max(requests, 64) if on_cpu else None,
            "extra": extra,
            "start_timeout_s": rollout.deadlines.start_s,
        }
