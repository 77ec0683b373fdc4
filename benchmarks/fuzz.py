"""Fuzzing of what reads input of others (tests/themes/security/fuzz/targets.py) by atheris, guided by coverage.

    pip install atheris==3.0.0
    python benchmarks/fuzz.py --seconds 600 --out benchmarks/results/fuzz.json

Each target has a process of its own. What comes of an input that is no MegarlError is a finding, told once for each kind of
error and line of code, with a shortest input; so is an input of more than 25 s or 4 GiB, after which the target goes on.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LIBRARIES = ("atheris", "aiohttp", "jinja2", "pyarrow", "PyYAML", "safetensors", "torch", "transformers")
INPUT_S, MEMORY_MB, LONGEST_INPUT = 25, 4096, 8192


def fuzz_one(name: str, seconds: int, folder: Path) -> None:
    """In a process of its own, which libFuzzer ends: one target, its findings in `folder`/findings."""
    import atheris

    with atheris.instrument_imports(include=["megarl", "yaml"], enable_loader_override=False):
        from tests.themes.security.fuzz.targets import TARGETS, run_quietly

        target = TARGETS[name]
        for seed in target.seeds:  # imports what is imported late, under instrumentation
            run_quietly(target, seed)
    findings = folder / "findings"
    found: dict[str, int] = {}

    def one(data: bytes) -> None:
        try:
            run_quietly(target, data)
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "/megarl/" in f.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            key = f"{type(error).__name__} at {where}"
            if len(data) < found.get(key, 1 << 60):
                found[key] = len(data)
                told = {"kind": key, "says": str(error)[:300], "input": base64.b64encode(data).decode()}
                (findings / f"{zlib.crc32(key.encode()):08x}.json").write_text(json.dumps(told))

    words = folder / "words"
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words))
    options = [
        f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={LONGEST_INPUT}",
        f"-dict={words}", f"-artifact_prefix={folder}/artifact-", "-print_final_stats=1", "-verbosity=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], one)
    atheris.Fuzz()


def fuzz(name: str, seconds: int, folder: Path) -> dict[str, Any]:
    """What became of a target in `seconds`, with as many processes one after the other as its findings end."""
    from tests.themes.security.fuzz.targets import TARGETS

    for inner in ("corpus", "findings"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds):
        (folder / "corpus" / f"seed{number}").write_bytes(seed)
    began, executions, coverage, features = time.monotonic(), 0, 0, 0
    findings: list[dict[str, Any]] = []
    while (left_s := int(seconds - (time.monotonic() - began))) > 5:
        command = [sys.executable, __file__, "--one", name, "--seconds", str(left_s), "--folder", str(folder)]
        with (folder / "log.txt").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, cwd=ROOT).returncode
        said = (folder / "log.txt").read_text(errors="replace")
        lines = re.findall(r"#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+)", said)
        if lines:
            executions += int(lines[-1][0])
            coverage, features = max(coverage, int(lines[-1][1])), max(features, int(lines[-1][2]))
        artifacts = sorted(folder.glob("artifact-*"))
        if code and not artifacts:
            findings.append({"kind": f"the process ended with {code}", "says": said[-600:], "input": ""})
            break
        for artifact in artifacts:
            kind = artifact.name.removeprefix("artifact-").partition("-")[0]
            content = base64.b64encode(artifact.read_bytes()).decode()
            says = f"an input of more than {INPUT_S} s or {MEMORY_MB} MiB, or a crash"
            findings.append({"kind": kind, "says": says, "input": content})
            artifact.unlink()
    findings += [json.loads(file.read_text()) for file in sorted((folder / "findings").iterdir())]
    return {
        "executions": executions, "covered_blocks": coverage, "features": features,
        "corpus": len(list((folder / "corpus").iterdir())), "seconds": round(time.monotonic() - began), "findings": findings,
    }  # fmt: skip


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    """Fuzz, print a line per target and write the JSON; exit code 1 with findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: 600)")
    parser.add_argument("--targets", nargs="+", default=None, help="only these")
    parser.add_argument("--out", type=Path, default=None, help="file for the result, which keeps what other targets did before")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    if arguments.one:
        fuzz_one(arguments.one, arguments.seconds, arguments.folder)
        return 0
    from benchmarks.measured_code import code_of
    from tests.themes.security.fuzz.targets import TARGETS

    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    report: dict[str, Any] = {"targets": {}}
    if arguments.out is not None and arguments.out.exists():
        report = json.loads(arguments.out.read_text())
    report |= {
        "command": "python benchmarks/fuzz.py " + " ".join(sys.argv[1:]),
        "code": report["code"] if arguments.targets and "code" in report else code_of("fuzz"),  # as old as the oldest figure
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(terse=True), "processor": _processor(), "cores": os.cpu_count()},
    }
    for name in arguments.targets or TARGETS:
        with tempfile.TemporaryDirectory(prefix="megarl-fuzz-") as folder:
            result = fuzz(name, arguments.seconds, Path(folder))
        result["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        report["targets"][name] = result
        found = len(result["findings"])
        print(f"{name}: {result['executions']} executions in {result['seconds']} s, {found} findings", flush=True)
        for finding in result["findings"]:
            print(f"  {finding['kind']}: {finding['says'][:200]}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 1 if any(result["findings"] for result in report["targets"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
