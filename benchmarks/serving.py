"""What a server of the Tinker protocol costs: its steps beside `megarl train`, many clients beside one, and its own seconds.

    python benchmarks/serving.py --out benchmarks/results/serving.json --parts step clients

What `--out` has of parts that are not named stays. Each part begins on its own, and compares in one run:

`step` has GRPO steps by the protocol's own client over HTTP against `megarl serve`, and in turns with them steps of the
built-in loop, `core/loop.py`, in this process: the same model, adapters, prompts, numbers of tokens, micro-batches, one engine
and one rank each, which are idle while the other side works.
`clients` has eight clients with an adapter each against one with eight times the batch, in turns, on one server, with the same
micro-batches. Both also count CPU seconds of all processes of a side, which other work on the machine changes less.
`overhead`, `switching` and `grouped` are in serving_parts.py, `prompts` in serving_rows.py. `--layers` takes the first layers
of SmolLM2-135M alone, for `step` and `clients`: the less a model computes, the more of a step is the server's. `--page` writes
the tables into a page.
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
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil
import tinker
import yaml
from measured_code import code_of
from serving_parts import grouped, overhead, shortened, switching
from serving_rows import common_prompts
from tinker import types
from workload import ROOT, machine, medians, publish, versions, write_prompts

sys.path.insert(0, str(ROOT))

from megarl.config import parse_config
from megarl.data.tokenize import load_tokenizer

PROMPTS, SAMPLES, NEW_TOKENS, RANK, STEPS, WARMUP = 4, 8, 32, 32, 3, 1
"""Of a step: prompts, answers to each, and tokens of an answer; rank of the adapters; steps that count, and those before."""
CLIENTS, DATUMS, DATUM_TOKENS, QUESTIONS, SAMPLED_TOKENS, ROUNDS = 8, 2, 128, 4, 64, 3
"""Clients; datums of a pass of each and their tokens; prompts that each asks for an answer of so many tokens; rounds."""
NAME, KEY = "served/base", "tml-local"
START_S, ANSWER_S = 300.0, 600.0
POLICY: dict[str, Any] = {"threads_per_rank": 1, "max_tokens_per_micro_batch": 2048, "share_prefix": True}
ENGINES: dict[str, Any] = {"engine": "sglang", "engines": 1, "threads": 1}
PARTS = ("step", "clients", "overhead", "switching", "grouped", "prompts")
BEGIN, END = "<!-- serving: begin -->", "<!-- serving: end -->"
TURN_PHASES = ("step", "sync", "generate", "update", "other")
"""Phases of the built-in loop's steps that are kept."""


class Seconds:
    """Seconds since the last call: on the wall, of CPU of this process, of a server's processes, and of its other children."""

    def __init__(self, server: int) -> None:
        self._server, self._before = server, (0.0, 0.0, 0.0, 0.0)
        self()

    def __call__(self) -> dict[str, float]:
        """Look at the clocks; processes that have ended since count nothing."""
        here = psutil.Process()
        of_server = {self._server, *(child.pid for child in psutil.Process(self._server).children(recursive=True))}
        sums = {True: 0.0, False: 0.0}
        for child in here.children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                sums[child.pid in of_server] += times.user + times.system
        now = (time.perf_counter(), time.process_time(), sums[True], sums[False])
        passed = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        return dict(zip(("wall_s", "own_cpu_s", "server_cpu_s", "others_cpu_s"), passed, strict=True))


# a server and its clients ---------------------------------------------------------------------------------------------


class Server:
    """`megarl serve` as a process of its own, which starts when this is made."""

    def __init__(self, work: Path, model: Path, context: int = 1024, **policy: Any) -> None:
        config: dict[str, Any] = {
            "run": {"folder": str(work / "runs"), "name": "served"},
            "model": {"path": str(model), "dtype": "float32"},
            "policy": POLICY | policy,
            "rollout": ENGINES,
            "serve": {"models": {NAME: None}, "max_rank": RANK, "context_tokens": context, "port": 0},
        }
        file, self._log = work / "serve.yaml", work / "serve.log"
        file.write_text(yaml.safe_dump(config))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [sys.executable, "-m", "megarl", "serve", str(file)]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self.seconds = Seconds(self._process.pid)

    def url(self) -> str:
        """Wait until it answers; returns where."""
        ends_at = time.monotonic() + START_S
        while not (found := re.search(r"serving .* at (http://\S+):", self._log.read_text())):
            if self._process.poll() is not None or time.monotonic() > ends_at:
                sys.exit(f"megarl serve did not start:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.2)
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()


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

    def __init__(self, prompts: Sequence[Sequence[int]], tokenizer: Any) -> None:
        self.prompts, self.tokenizer, self.at = prompts, tokenizer, 0
        self.steps: list[dict[str, float]] = []
        self.service: Any = None
        self.training: Any = None

    def connect(self, url: str) -> None:
        """Make a client and its model, unless there are."""
        if self.service is None:
            self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
            self.training = self.service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1)

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


def looped(work: Path, model: Path, rows: Path, steps: int, between: Callable[[], None]) -> list[dict[str, Any]]:
    """Take `steps` steps of the built-in loop, calling `between` after each; returns their metrics."""
    from megarl.core import loop
    from megarl.trainers.rl.train import open_run

    tree = {
        "run": {"folder": str(work), "name": "looped", "steps": steps, "log_samples": 0},
        "model": {"path": str(model), "dtype": "float32"},
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


def step(work: Path, layers: int | None) -> dict[str, Any]:
    """A GRPO step by the API, as a multiple of the same step of the built-in loop."""
    model, rows, total = shortened(work, layers), work / "prompts.jsonl", WARMUP + STEPS
    tokenizer = load_tokenizer(str(model))
    write_prompts(rows, PROMPTS * total)
    asked = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    cpu: dict[str, list[float]] = {"api": [], "loop": []}
    with Server(work, model) as server:  # it starts while the other side does
        served = ServedSteps(prompts, tokenizer)

        def in_turn() -> None:
            served.connect(server.url())
            of_loop = server.seconds()
            cpu["loop"].append(of_loop["own_cpu_s"] + of_loop["others_cpu_s"])
            served.step()
            of_api = server.seconds()
            cpu["api"].append(of_api["own_cpu_s"] + of_api["server_cpu_s"])

        lines = looped(work, model, rows, total, in_turn)[WARMUP:]
        close(served.service)
    own = served.steps[WARMUP:]
    pairs = [api["step_s"] / line["time/step_s"] for api, line in zip(own, lines, strict=True)]
    of_cpu = [api / loop for api, loop in zip(cpu["api"][WARMUP:], cpu["loop"][WARMUP:], strict=True)]
    return {
        "setup": {
            "layers": layers or "all", "prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW_TOKENS, "rank": RANK,
            "steps": STEPS, "warmup": WARMUP, "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        },
        "by_api": medians(own, [*own[0]]),
        "by_loop": medians(lines, [f"time/{phase}_s" for phase in TURN_PHASES]),
        "steps_by_api": own,
        "steps_by_loop": [line["time/step_s"] for line in lines],
        "cpu_s": {name: took[WARMUP:] for name, took in cpu.items()},
        "over_loop": statistics.median(pairs),
        "cpu_over_loop": statistics.median(of_cpu),
    }  # fmt: skip


def close(service: Any) -> None:
    """End a client's connections, which would ask a server that is gone for a sign of life."""
    holder = service.holder
    if holder._begin_close():
        holder.run_coroutine_threadsafe(holder._async_cleanup()).result(30)


def clients(work: Path, layers: int | None) -> dict[str, Any]:
    """Tokens per second of many clients, as a multiple of those of one with as many rows as all of them."""
    rows = [[(7 * row + 3 * place) % 4000 + 20 for place in range(DATUM_TOKENS + 1)] for row in range(CLIENTS * DATUMS)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * DATUM_TOKENS},
        )
        for tokens in rows
    ]
    took: dict[str, list[dict[str, float]]] = {f"{what}, {who}": [] for what in ("train", "sample") for who in ("one", "many")}
    same = {"max_tokens_per_micro_batch": DATUMS * DATUM_TOKENS, "context": DATUMS * DATUM_TOKENS}
    with Server(work, shortened(work, layers), **same) as server, ThreadPoolExecutor(CLIENTS) as threads:
        url, seconds = server.url(), server.seconds
        services = [tinker.ServiceClient(base_url=url, api_key=KEY) for _ in range(CLIENTS)]
        models = [one.create_lora_training_client(base_model=NAME, rank=RANK, seed=n) for n, one in enumerate(services)]
        samplers = [model.save_weights_and_get_sampling_client() for model in models]
        train, sample = partial(trained, threads, models, data), partial(sampled, threads, samplers)
        for number in range(ROUNDS + 1):
            for name, work_of in (("train", train), ("sample", sample)):
                for many in (False, True) if number % 2 else (True, False):
                    seconds()
                    work_of(number, many=many)
                    passed = seconds()
                    if number:  # the first round warms both sides up
                        cpu_s = passed["own_cpu_s"] + passed["server_cpu_s"]
                        took[f"{name}, {'many' if many else 'one'}"].append({"wall_s": passed["wall_s"], "cpu_s": cpu_s})
        for one in services:
            close(one)
    tokens = {"train": CLIENTS * DATUMS * DATUM_TOKENS, "sample": CLIENTS * QUESTIONS * SAMPLED_TOKENS}
    middle = {name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in took.items()}
    return {
        "setup": {
            "layers": layers or "all", "clients": CLIENTS, "datums": DATUMS, "tokens": DATUM_TOKENS, "prompts": QUESTIONS,
            "new_tokens": SAMPLED_TOKENS, "rank": RANK, "rounds": ROUNDS,
        },
        "rounds": took,
        "tokens_per_s": {name: tokens[name.partition(",")[0]] / found["wall_s"] for name, found in middle.items()},
        **{
            f"{name}_{key.partition('_')[0]}": middle[f"{name}, one"][key] / middle[f"{name}, many"][key]
            for name in tokens
            for key in ("wall_s", "cpu_s")
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


# the page -------------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> str:
    """The figures as they stand on a page; those of parts that were not measured are left out."""
    rows = [("compared", "goal", "on the wall", "by CPU seconds"), ("---",) * 4]
    if (of_step := found.get("step")) is not None:
        rows.append(
            ("a GRPO step by the API, over one of the loop", "at most 1.15", *_both(of_step, "over_loop", "cpu_over_loop"))
        )
    if (alone := found.get("overhead")) is not None:
        both = _both(alone["update"], "over_loop", "cpu_over_loop")
        rows.append(("the update of a GRPO step by the API, over that of the loop", "", *both))
    if (many := found.get("clients")) is not None:
        for name, what in (("train", "training"), ("sample", "sampling")):
            compared = f"{many['setup']['clients']} clients' tokens/s, {what}, over those of one"
            rows.append((compared, "at least 0.9", *_both(many, f"{name}_wall", f"{name}_cpu")))
    if (asked := found.get("prompts")) is not None:
        rows.append(
            ("a pass whose common prompts go through the head each time, over once", "", "", f"{asked['each_over_once']:.2f}")
        )
    switched = found.get("switching")
    for key, where, goal in (("switch", "in memory", "below 5 %"), ("switch_by_disk", "on the disk", "")):
        if switched is not None:
            share = switched[f"{key}_of_a_step"]
            rows.append((f"switching to a model {where}, of a step", goal, *(f"{100 * one:.1f} %" for one in share.values())))
    if alone is not None:
        per_million = alone["per_million_tokens"]
        shown = f"{per_million['wall_s']:.2f} s", f"{per_million['server_cpu_s']:.2f} s"
        rows.append(("the server outside the rank, per million tokens", "", *shown))
        if switched is not None:
            of_all = per_million["server_cpu_s"] + switched["rank_cpu_s_per_million_tokens"]
            share_of_all = f"{100 * per_million['server_cpu_s'] / of_all:.3f} %"
            rows.append(("the same, of a pass of SmolLM2-135M on a core of this CPU", "below 5 %", "", share_of_all))
        below = f"{alone['tokens_per_s_below_the_goal']:,.0f} tokens/s"
        rows.append(("rate of the ranks up to which the server outside them stays below 5 % of a pass", "", "", below))
    if (products := found.get("grouped")) is not None:
        rows += [(), ("layer", "tokens of each model", "one model after the other, over grouped"), ("---",) * 3]
        rows += [(case["layer"], str(case["tokens"]), f"{case['one_by_one_over_grouped']:.2f}") for case in products["cases"]]
    return "\n".join(_row(*cells) if cells else "" for cells in rows)


def _row(*cells: str) -> str:
    return "|---" * len(cells) + "|" if cells[0] == "---" else f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _both(found: Mapping[str, Any], *names: str) -> Iterator[str]:
    return (f"{found[name]:.2f}" for name in names)


def write_tables(page: Path, found: dict[str, Any]) -> None:
    """Put the tables between their marks on a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{tables(found)}\n{END}{after}")


def main() -> None:
    """Measure the parts, and write each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--layers", type=int, help="first layers of the model that `step` and `clients` have (default: all)")
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    work_of: Mapping[str, Callable[[Path], dict[str, Any]]] = {
        "step": partial(step, layers=options.layers), "clients": partial(clients, layers=options.layers),
        "overhead": overhead, "switching": switching, "grouped": grouped, "prompts": common_prompts,
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
    if options.page is not None:
        write_tables(options.page, found)


if __name__ == "__main__":
    main()
