"""A GRPO step of megarl in figures: seconds per phase, weight sync, driver overhead, generation against the bare server.

    python benchmarks/step.py --out benchmarks/results/step.json [key=value …]

`key=value` overrides fields of benchmarks/step.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from measured_code import code_of
from transformers import AutoTokenizer
from workload import MODEL, NEW_TOKENS, PROMPTS, SAMPLES, machine, medians, run_megarl, write_prompts

from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer

PHASES = ("step", "sync", "generate", "reward", "log_probs", "advantages", "update", "other")


def generation_against_bare_server(prompts_file: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Generated tokens per second through megarl's engine and by one plain request to the same server, in turns.

    Every round has fresh prompts, so that neither side finds the other's in the server's cache.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line) for line in prompts_file.read_text().splitlines()]
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]
    batches = [ids[start : start + PROMPTS] for start in range(0, len(ids), PROMPTS)]

    async def through_the_engine(engine: SglangEngine, batch: list[list[int]]) -> None:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        answer = await engine.generate(EngineRequest(batch, params, n=SAMPLES))
        assert all(len(one.response_ids) == NEW_TOKENS for group in answer for one in group)

    def bare(server: SglangServer, batch: list[list[int]]) -> None:
        sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0, "n": SAMPLES}
        body = json.dumps({"input_ids": batch, "sampling_params": sampling, "return_logprob": True}).encode()
        request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json", **server.headers})
        with urllib.request.urlopen(request) as answer:
            assert all(len(one["output_ids"]) == NEW_TOKENS for one in json.load(answer))

    async def measure() -> dict[str, Any]:
        options = ServerOptions(
            model_path=str(MODEL), log_file=work / "engine.log", max_total_tokens=16384, max_running_requests=PROMPTS * SAMPLES
        )
        engine = await SglangEngine.open(options, initial_version=0)
        seconds: dict[str, list[float]] = {"megarl": [], "bare": []}
        try:
            for number, batch in enumerate(batches[: 2 * (rounds + 1)]):
                side = "megarl" if number % 2 else "bare"
                started = time.perf_counter()
                if side == "megarl":
                    await through_the_engine(engine, batch)
                else:
                    await asyncio.to_thread(bare, engine.server, batch)
                seconds[side].append(time.perf_counter() - started)
        finally:
            await engine.stop()
        tokens = PROMPTS * SAMPLES * NEW_TOKENS
        rates = {side: tokens / statistics.median(spent[1:]) for side, spent in seconds.items()}
        return {"tokens_per_s": rates, "megarl_over_bare": rates["megarl"] / rates["bare"], "seconds": seconds}

    return asyncio.run(measure())


def main() -> None:
    """Measure, write the JSON file and print the figures that matter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of benchmarks/step.yaml")
    parser.add_argument("--out", type=Path, default=Path("step.json"), help="JSON file to write")
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps before them that do not; the first has no sync")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of generation on each side; 0: leave it out")
    arguments = parser.parse_args()
    steps = arguments.warmup_steps + arguments.steps
    result: dict[str, Any] = {"machine": machine(), "code": code_of("step"), "overrides": arguments.overrides}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, PROMPTS * max(steps, 2 * (arguments.rounds + 1)))
        figures = run_megarl(steps, prompts, Path(folder), arguments.overrides)
        median = medians(figures["steps"][arguments.warmup_steps :], [f"time/{phase}_s" for phase in PHASES])
        result["median"] = median
        result["samples_per_s"] = PROMPTS * SAMPLES / median["time/step_s"]
        result["driver_overhead"] = median["time/other_s"] / median["time/step_s"]
        result |= figures
        if arguments.rounds:
            result["generation"] = generation_against_bare_server(prompts, Path(folder), arguments.rounds)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    times = ", ".join(f"{name.removeprefix('time/')} {value:.2f}" for name, value in median.items())
    print(f"{result['samples_per_s']:.2f} samples/s ({times}); driver's overhead {result['driver_overhead']:.2%}")
    if arguments.rounds:
        rates = result["generation"]["tokens_per_s"]
        print(f"generation: {rates['megarl']:.0f} tokens/s, bare server {rates['bare']:.0f}")


if __name__ == "__main__":
    main()
