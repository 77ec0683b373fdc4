"""Time and memory of reshard plans of large models: made, verified and priced, for 64 to 16,384 training ranks.

    python benchmarks/reshard_plan.py --out benchmarks/results/reshard_plan.json

Each plan is made in a process of its own, from `config.json` alone; memory is the most that the process ever held, interpreter
and imports included. The median of several processes. `rank_s` is what one training rank needs to find out what it sends.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.weights.cost import ClusterRates, cost_of
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.verify import verify

MODELS = Path(__file__).resolve().parent.parent / "examples/models"
CASES = {
    "70b": ("llama-3.1-70b", {"tp": 8, "pp": 8}, {"tp": 8}),
    "671b": (
        "deepseek-v3",
        {"tp": 4, "pp": 8, "ep": 32, "first_stage_layers": 7, "last_stage_layers": 6},
        {"tp": 8, "dp": 8, "ep": 64},
    ),
}
"""Model, training layout but for dp, and engine: as many of them as there are GPUs for. SGLang says tp_size 64 for 8 x 8."""
WORLDS = (64, 256, 1024, 4096, 16384)
STAGES = ("plan_s", "verify_s", "cost_s", "rank_s")


def measure(case: str, world: int) -> dict[str, Any]:
    """Make, verify and price one plan in this process; seconds are wall time, `cpu_s` is of plan and proof."""
    model, sizes, engine = CASES[case]
    layout = Layout(**sizes, dp=world // (sizes["tp"] * sizes["pp"]))
    ranks = engine["tp"] * engine.get("dp", 1)
    config = load_hf_config(MODELS / model)
    marks, cpu = [time.perf_counter()], time.process_time()
    plan = plan_reshard(config, layout, EngineTarget(**engine, engines=max(1, world // ranks)))
    marks.append(time.perf_counter())
    proof = verify(plan)
    marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    cost = cost_of(plan, ClusterRates(), colocated=True)
    marks.append(time.perf_counter())
    sends = sum(len(bucket.engines) for bucket in plan.sends(world // 2))
    marks.append(time.perf_counter())
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
    return {
        **{name: after - before for name, before, after in zip(STAGES, marks, marks[1:], strict=False)},
        "cpu_s": cpu,
        "peak_mib": peak,
        "tensors": len(plan.tensors),
        "transfers_per_engine": len(plan.transfers),
        "buckets_per_engine": len(plan.bucket_starts) - 1,
        "engines": plan.target.engines,
        "bucket_sends": proof.bucket_sends,
        "bytes_sent": proof.nbytes,
        "redundancy": cost.redundancy,
        "peak_staging_bytes": cost.peak_staging_bytes,
        "sent_bytes_of_a_rank": cost.sent,
        "received_bytes_of_a_rank": cost.received,
        "predicted_s": cost.seconds,
        "bound": f"{cost.bound.name} {cost.bound.where}",
        "sends_of_one_rank": sends,
    }


def repeated(case: str, world: int, rounds: int) -> dict[str, Any]:
    """The median of `rounds` processes."""
    command = [sys.executable, __file__, "--case", case, "--world", str(world)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)]
    return runs[0] | {name: statistics.median(run[name] for run in runs) for name in (*STAGES, "cpu_s", "peak_mib")}


def main() -> None:
    """Measure all cases and sizes and write the JSON, or one of them with --case and --world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reshard_plan.json"), help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each figure")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments.world)))
        return
    from measured_code import code_of
    from workload import machine

    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("reshard_plan"),
        "versions": {"python": platform.python_version(), "numpy": version("numpy"), "torch": version("torch")},
        "rounds": arguments.rounds,
        "plans": {},
    }
    for case, (_, sizes, _) in CASES.items():
        fewest = sizes["pp"] * max(sizes["tp"], sizes.get("ep", 1))
        for world in WORLDS:
            if world < fewest:
                continue
            found = repeated(case, world, arguments.rounds)
            report["plans"].setdefault(case, {})[str(world)] = found
            shown = " ".join(f"{name} {found[name]:.2f}" for name in (*STAGES, "cpu_s", "peak_mib"))
            print(f"{case} {world:>6} ranks: {shown}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
