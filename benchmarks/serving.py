"""What a server of the Tinker protocol costs: its steps beside `megarl train`, many clients beside one, and its own seconds.

    python benchmarks/serving.py --out benchmarks/results/serving.json --parts step clients

What `--out` has of parts that are not named stays. Each part begins on its own, and compares in one run:

`step` has GRPO steps by the protocol's own client over HTTP against `megarl serve`, and in turns with them steps of the
built-in loop, `core/loop.py`, in this process: the same model, adapters, prompts, numbers of tokens, micro-batches, one engine
and one rank each, which are idle while the other side works.
`clients` has eight clients with an adapter each against one with eight times the batch, in turns, on one server.
`overhead`, `switching` and `grouped` are in serving_parts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tinker
import yaml
from measured_code import code_of
from serving_parts import grouped, overhead, switching
from tinker import types
from workload import MODEL, ROOT, machine, medians, publish, versions, write_prompts

sys.path.insert(0, str(ROOT))

from megarl.config import parse_config
from megarl.data.tokenize import load_tokenizer

PROMPTS, SAMPLES, NEW_TOKENS, RANK, STEPS, WARMUP = 4, 8, 32, 32, 4, 1
"""Of a step: prompts, answers to each, and tokens of an answer; rank of the adapters; steps that count, and those before."""
CLIENTS, DATUMS, DATUM_TOKENS, QUESTIONS, SAMPLED_TOKENS, ROUNDS = 8, 16, 128, 8, 32, 3
"""Clients; datums of a pass of each and their tokens; prompts that each asks for an answer of so many tokens; rounds."""
NAME, KEY = "served/base", "tml-local"
START_S, ANSWER_S = 300.0, 600.0
MODELS: dict[str, Any] = {"path": str(MODEL), "dtype": "float32"}
POLICY: dict[str, Any] = {"threads_per_rank": 1, "max_tokens_per_micro_batch": 2048, "share_prefix": True}
ENGINES: dict[str, Any] = {"engine": "sglang", "engines": 1, "threads": 1}
PARTS = ("step", "clients", "overhead", "switching", "grouped")
TURN_PHASES = ("step", "sync", "generate", "update", "other")
"""Phases of the built-in loop's steps that are kept."""


# a server and its clients ---------------------------------------------------------------------------------------------


@contextmanager
def server(work: Path, **sections: Any) -> Iterator[str]:
    """`megarl serve` as a process of its own; yields its address."""
    config: dict[str, Any] = {
        "run": {"folder": str(work / "runs"), "name": "served"},
        "model": MODELS,
        "policy": POLICY,
        "rollout": ENGINES,
        "serve": {"models": {NAME: None}, "max_rank": RANK, "context_tokens": 1024, "port": 0},
    } | sections
    file, log = work / "serve.yaml", work / "serve.log"
    file.write_text(yaml.safe_dump(config))
    with log.open("w") as out:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [sys.executable, "-m", "megarl", "serve", str(file)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        ends_at = time.monotonic() + START_S
        while not (found := re.search(r"serving .* at (http://\S+):", log.read_text())):
            if process.poll() is not None or time.monotonic() > ends_at:
                sys.exit(f"megarl serve did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def datum(tokens: Sequence[int], prompt: int, logprobs: Sequence[float], advantage: float) -> types.Datum:
    """A sampled sequence for `importance_sampling`, whose first `prompt` tokens are not trained on."""
    before, answered = [0.0] * (prompt - 1), len(tokens) - prompt
    inputs = {
        "target_tokens": list(tokens[1:]),
        "logprobs": [*before, *logprobs],
        "advantages": [*before, *([advantage] * answered)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


class ServedSteps:
    """GRPO by the client of the protocol."""

    def __init__(self, url: str, prompts: Sequence[Sequence[int]], tokenizer: Any) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.training = self.service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1)
        self.prompts, self.tokenizer, self.at = prompts, tokenizer, 0
        self.steps: list[dict[str, float]] = []

    def step(self) -> None:
        """Take a step with the next prompts; its seconds are kept."""
        prompts = self.prompts[self.at : self.at + PROMPTS]
        self.at += PROMPTS
        begun = time.perf_counter()
        sampler = self.training.save_weights_and_get_sampling_client()
        synced = time.perf_counter()
        asked = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints(list(prompt)), SAMPLES, asked) for prompt in prompts]
        groups = [future.result(timeout=ANSWER_S).sequences for future in futures]
        sampled = time.perf_counter()
        data = [row for prompt, group in zip(prompts, groups, strict=True) for row in self._rows(prompt, group)]
        passed = self.training.forward_backward(data, "importance_sampling")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-5))
        passed.result(timeout=ANSWER_S)
        stepped.result(timeout=ANSWER_S)
        ended = time.perf_counter()
        self.steps.append(
            {"step_s": ended - begun, "sync_s": synced - begun, "generate_s": sampled - synced, "update_s": ended - sampled}
        )

    def _rows(self, prompt: Sequence[int], group: Sequence[Any]) -> list[types.Datum]:
        """Rewards are characters, as those of the loop beside it; advantages as in GRPO."""
        if any(len(one.tokens) != NEW_TOKENS for one in group):
            sys.exit(f"not every answer has {NEW_TOKENS} tokens, so the work is another")
        rewards = [float(len(self.tokenizer.decode(one.tokens))) for one in group]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
        return [
            datum([*prompt, *one.tokens], len(prompt), one.logprobs, (reward - mean) / (spread + 1e-6))
            for one, reward in zip(group, rewards, strict=True)
        ]


# the parts ------------------------------------------------------------------------------------------------------------


def looped(work: Path, rows: Path, steps: int, between: Callable[[], None]) -> list[dict[str, Any]]:
    """Take `steps` steps of the built-in loop, calling `between` after each; returns their metrics."""
    from megarl.core import loop
    from megarl.trainers.rl.train import open_run

    tree = {
        "run": {"folder": str(work), "name": "looped", "steps": steps, "log_samples": 0},
        "model": MODELS,
        "policy": POLICY | {"optimizer": {"lr": 1e-5}, "lora": {"rank": RANK, "targets": ["all-linear", "lm_head"]}},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "data": {"train": {"source": "jsonl", "path": str(rows)}, "prompt_key": "prompt", "max_prompt_tokens": 96},
        "rollout": ENGINES
        | {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "rewards": [{"name": f"{ROOT}/benchmarks/workload.py:response_length"}],
        "resources": {"placement": "separate"},
    }
    run = open_run(parse_config(tree))
    save = run.save_if_due

    def save_and_wait() -> None:
        save()
        between()

    run.save_if_due = save_and_wait  # type: ignore[method-assign]
    loop.train(run)
    lines = map(json.loads, (work / "looped" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step_s" in line]


def step(work: Path) -> dict[str, Any]:
    """A GRPO step by the API, as a multiple of the same step of the built-in loop."""
    tokenizer, rows, total = load_tokenizer(str(MODEL)), work / "prompts.jsonl", WARMUP + STEPS
    write_prompts(rows, PROMPTS * total)
    asked = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    with server(work) as url:
        served = ServedSteps(url, prompts, tokenizer)
        lines = looped(work, rows, total, served.step)
        close(served.service)
    own, names = served.steps[WARMUP:], [f"time/{phase}_s" for phase in TURN_PHASES]
    of_api, of_loop = medians(own, [*own[0]]), medians(lines[WARMUP:], names)
    ratios = [api["step_s"] / line["time/step_s"] for api, line in zip(own, lines[WARMUP:], strict=True)]
    return {
        "setup": {
            "prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW_TOKENS, "rank": RANK, "steps": STEPS, "warmup": WARMUP,
            "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        },
        "by_api": of_api,
        "by_train": of_loop,
        "steps_by_api": [row["step_s"] for row in own],
        "steps_by_train": [line["time/step_s"] for line in lines[WARMUP:]],
        "over_train": of_api["step_s"] / of_loop["time/step_s"],
        "over_train_by_pair": ratios,
    }  # fmt: skip


def close(service: Any) -> None:
    """End a client's connections, which would ask a server that is gone for a sign of life."""
    holder = service.holder
    if holder._begin_close():
        holder.run_coroutine_threadsafe(holder._async_cleanup()).result(30)


def clients(work: Path) -> dict[str, Any]:
    """Tokens per second of many clients, as a multiple of those of one with as many rows as all of them."""
    rows = [[(7 * row + 3 * place) % 4000 + 20 for place in range(DATUM_TOKENS + 1)] for row in range(CLIENTS * DATUMS)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * DATUM_TOKENS},
        )
        for tokens in rows
    ]
    seconds: dict[str, list[float]] = {"train, one": [], "train, many": [], "sample, one": [], "sample, many": []}
    with server(work) as url, ThreadPoolExecutor(CLIENTS) as threads:
        services = [tinker.ServiceClient(base_url=url, api_key=KEY) for _ in range(CLIENTS)]
        models = [one.create_lora_training_client(base_model=NAME, rank=RANK, seed=n) for n, one in enumerate(services)]
        samplers = [model.save_weights_and_get_sampling_client() for model in models]
        train, sample = partial(trained, threads, models, data), partial(sampled, threads, samplers)
        for number in range(ROUNDS + 1):
            for name, work_of in (("train", train), ("sample", sample)):
                for many in (False, True) if number % 2 else (True, False):
                    begun = time.perf_counter()
                    work_of(number, many=many)
                    if number:  # the first round warms both sides up
                        seconds[f"{name}, {'many' if many else 'one'}"].append(time.perf_counter() - begun)
        for one in services:
            close(one)
    tokens = {"train": CLIENTS * DATUMS * DATUM_TOKENS, "sample": CLIENTS * QUESTIONS * SAMPLED_TOKENS}
    return {
        "setup": {
            "clients": CLIENTS, "datums": DATUMS, "tokens": DATUM_TOKENS, "prompts": QUESTIONS, "new_tokens": SAMPLED_TOKENS,
            "rank": RANK, "rounds": ROUNDS,
        },
        "seconds": seconds,
        "tokens_per_s": {name: tokens[name.partition(",")[0]] / statistics.median(took) for name, took in seconds.items()},
        **{
            f"many_over_one_{name}": statistics.median(seconds[f"{name}, one"]) / statistics.median(seconds[f"{name}, many"])
            for name in tokens
        },
    }  # fmt: skip


def trained(threads: ThreadPoolExecutor, models: Sequence[Any], data: Sequence[Any], number: int, *, many: bool) -> None:
    """A pass and a step: of one model on all data, or of each model on its part."""

    def one(model: Any, part: Sequence[Any]) -> None:
        passed = model.forward_backward(list(part), "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-5)).result(timeout=ANSWER_S)
        passed.result(timeout=ANSWER_S)

    parts = [data[n * DATUMS : (n + 1) * DATUMS] for n in range(CLIENTS)] if many else [data]
    list(threads.map(one, models[: len(parts)], parts))


def sampled(threads: ThreadPoolExecutor, samplers: Sequence[Any], number: int, *, many: bool) -> None:
    """An answer to each of all prompts: by one client's model, or by each client's to its part. No two rounds ask the same."""
    asked = types.SamplingParams(max_tokens=SAMPLED_TOKENS, stop=[])
    prompts = [[100 + 50 * number + 10 * many, *range(200 + place, 230 + place)] for place in range(CLIENTS * QUESTIONS)]

    def one(sampler: Any, part: Sequence[list[int]]) -> None:
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, asked) for prompt in part]
        answers = [future.result(timeout=ANSWER_S) for future in futures]
        assert all(len(answer.sequences[0].tokens) == SAMPLED_TOKENS for answer in answers)

    parts = [prompts[n * QUESTIONS : (n + 1) * QUESTIONS] for n in range(CLIENTS)] if many else [prompts]
    list(threads.map(one, samplers[: len(parts)], parts))


def main() -> None:
    """Measure the parts, and write each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    work_of: Mapping[str, Callable[[Path], dict[str, Any]]] = {
        "step": step, "clients": clients, "overhead": overhead, "switching": switching, "grouped": grouped,
    }  # fmt: skip
    out = options.out
    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    found |= {"command": "python benchmarks/serving.py", "machine": machine(), "code": code_of("serving")}
    found |= {"versions": versions() | {"tinker": version("tinker")}}
    for name in options.parts:
        with tempfile.TemporaryDirectory() as work:
            measured = work_of[name](Path(work))
        found[name] = {"date": date.today().isoformat(), "load": os.getloadavg()[0], **measured}
        publish(found, out)


if __name__ == "__main__":
    main()
