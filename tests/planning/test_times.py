"""Seconds of a plan: those of a recorded run once it has calibrated them, and how they follow from sizes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from megarl import cli
from megarl.config import load_config
from megarl.errors import ConfigError
from megarl.planning.calibration import SCALED, read_run
from megarl.planning.efficiencies import Efficiencies
from megarl.planning.gpus import gpu_named
from megarl.planning.lengths import Lengths
from megarl.planning.measured import calibrated
from megarl.planning.plan import lengths_of, make_plan

ROOT = Path(__file__).parents[2]
CPU = gpu_named("cpu")
SHARE = Efficiencies()


def recorded_steps() -> list[dict[str, Any]]:
    """The steps of a run on two CPU cores that benchmarks/step.py timed."""
    return json.loads((ROOT / "benchmarks/results/step.json").read_text())["steps"]


def run_folder(folder: Path, steps: list[dict[str, Any]]) -> Path:
    """A run's folder as `benchmarks/step.py` leaves it, but for a model that is always here."""
    config = (ROOT / "benchmarks/step.yaml").read_text()
    (folder / "model").mkdir()
    small = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "rope_theta": 100000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "model/config.json").write_text(json.dumps(small))
    (folder / "config.yaml").write_text(config.replace("models/SmolLM2-135M-Instruct", str(folder / "model")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_a_calibrated_plan_takes_as_long_as_the_rest_of_the_run_did(tmp_path: Path) -> None:
    steps = recorded_steps()
    folder = run_folder(tmp_path, steps[:4])
    calibration = calibrated(folder, CPU)
    config = load_config(folder / "config.yaml")
    recorded = read_run(folder)
    lengths = lengths_of(config, recorded.prompt_tokens, recorded.response_tokens)
    times = make_plan(config, CPU, lengths=lengths, calibration=calibration).times
    for later in steps[4:]:
        for phase in ("generate", "update"):
            assert times.seconds(phase) == pytest.approx(later[f"time/{phase}_s"], rel=0.15)
        assert times.step_seconds == pytest.approx(later["time/step_s"], rel=0.15)
    assert "3 steps of" in calibration.source


def test_a_fit_is_exact_for_the_run_that_it_is_of(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, recorded_steps())
    recorded, calibration = read_run(folder), calibrated(folder, CPU)
    lengths = lengths_of(recorded.config, recorded.prompt_tokens, recorded.response_tokens)
    times = make_plan(recorded.config, CPU, lengths=lengths, calibration=calibration).times
    for phase in SCALED:
        if recorded.phases.get(phase) and times.seconds(phase):
            assert times.seconds(phase) == pytest.approx(recorded.phases[phase], rel=1e-6)
    assert times.step_seconds == pytest.approx(sum(recorded.phases.values()), rel=1e-3)


def test_a_folder_without_steps_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step with times"):
        calibrated(run_folder(tmp_path, []), CPU)


def seconds(*overrides: str, gpu: str = "h200", **lengths: float) -> dict[str, float]:
    """Seconds by phase of the ready plan of 70B on 128 GPUs, changed."""
    config = load_config(ROOT / "tests/planning/plans/llama-3.1-70b-ppo-128xh200.yaml", overrides)
    plan = make_plan(config, gpu_named(gpu), lengths=lengths_of(config, **lengths))
    return {phase.name: phase.seconds for phase in plan.times.phases} | {"step": plan.times.step_seconds}


def test_seconds_follow_from_what_is_done() -> None:
    base = seconds()
    anew = seconds("model.recompute=full")
    assert seconds("model.recompute=none")["update"] == pytest.approx(anew["update"] * 3 / 4, rel=0.05)
    assert seconds("algorithm.epochs=2")["update"] == pytest.approx(base["update"] * 2, rel=0.05)
    assert seconds("rollout.samples_per_prompt=8")["update"] == pytest.approx(base["update"] * 2, rel=0.05)
    in_loss = ("algorithm.kl.apply_to=loss", "algorithm.mini_batches=1")
    whole, half, none = (
        seconds(*in_loss, *more)["log_probs"]
        for more in (["algorithm.mini_batches=512"], ["algorithm.mini_batches=2"], ["algorithm.epochs=2"])
    )
    assert half - none == pytest.approx((whole - none) / 2, rel=0.01)  # the first update computes those of its own rows
    assert half > none
    assert seconds(gpu="h100")["generate"] > base["generate"]
    assert seconds(response=1024)["generate"] < base["generate"]
    asynchronous = seconds("rollout.schedule.mode=async")
    rest = sum(time for name, time in asynchronous.items() if name not in ("step", "generate"))
    assert asynchronous["step"] == pytest.approx(max(asynchronous["generate"], rest))


def test_training_in_full_micro_batches_is_six_operations_per_parameter_and_token() -> None:
    """The usual estimate, which leaves out attention: the share of the peak that the update reaches is the assumed one."""
    overrides = ["model.recompute=none", "policy.layout={tp: 1, dp: 128}", "algorithm.name=grpo"]
    config = load_config(ROOT / "tests/planning/plans/llama-3.1-70b-ppo-128xh200.yaml", overrides)
    plan = make_plan(config, gpu_named("h200"), lengths=lengths_of(config, 64, 192))
    update = next(phase for phase in plan.times.phases if phase.name == "update")
    operations = 6 * 70.55e9 * 2048 * 256
    assert update.parts["arithmetic"] == pytest.approx(operations / 128 / (989e12 * SHARE.products * SHARE.unequal), rel=0.03)


def test_decoding_one_sequence_reads_the_weights_once_for_every_token() -> None:
    overrides = ["rollout.prompts_per_step=16", "rollout.samples_per_prompt=1", "policy.layout.dp=4", "algorithm.name=ppo"]
    overrides += ["rollout.engines=16", "rollout.tp=8"]
    config = load_config(ROOT / "tests/planning/plans/llama-3.1-70b-ppo-128xh200.yaml", overrides)
    plan = make_plan(config, gpu_named("h200"), lengths=Lengths(16, 100, 100))
    generate = next(phase for phase in plan.times.phases if phase.name == "generate")
    assert generate.parts["memory bandwidth"] == pytest.approx(100 * 141.1e9 / 8 / 4800e9 / SHARE.decoding, rel=0.02)
    assert generate.parts["launches"] == pytest.approx(100 * SHARE.decoding_step_s)
    assert generate.parts["latency"] == pytest.approx(100 * 2 * 80 * SHARE.node_latency_s)


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (900, 1000), (1000, 1000), (1, 1)])
def test_the_spread_of_lengths_has_the_mean_that_was_asked_for(mean: float, longest: int) -> None:
    lengths = Lengths(10, mean, longest).responses
    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert np.all(np.diff(lengths) >= 0)
    assert lengths.max() <= longest


@pytest.mark.parametrize(("mean", "longest", "samples"), [(398, 3946, 2048), (795, 3946, 2048), (1000, 8192, 512)])
def test_the_longest_response_of_a_step_reaches_the_limit(mean: float, longest: int, samples: int) -> None:
    """Against responses drawn at random from a log-normal distribution of the same spread."""
    lengths = Lengths(10, mean, longest, samples=samples)
    assert lengths.shares.sum() == pytest.approx(1)
    assert lengths.shares @ lengths.responses == pytest.approx(mean, rel=1e-3)
    assert lengths.responses[-1] == pytest.approx(longest, rel=0.02)
    normal = NormalDist()
    spread = np.log(lengths.responses[96] / lengths.responses[32]) / (normal.inv_cdf(96.5 / 128) - normal.inv_cdf(32.5 / 128))
    drawn = np.exp(spread * np.random.default_rng(0).standard_normal((200, samples)))
    assert np.median(drawn.max(axis=1)) * mean / drawn.mean() == pytest.approx(longest, rel=0.3)


def test_the_command_calibrates_by_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, recorded_steps())
    arguments = ["--gpu", "cpu", "--calibrate", str(folder), "--json"]
    assert cli.main(["plan", str(folder / "config.yaml"), *arguments, "--response-tokens", "16"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["calibration"].startswith(f"6 steps of {folder}, against the assumptions: ")
    assert plan["times"]["step_s"] == pytest.approx(16.5, rel=0.15)
    assert cli.main(["plan", str(folder / "config.yaml"), "--gpu", "cpu"]) == 0
    assert "Seconds are estimates, by constants fitted to runs on H100" in capsys.readouterr().out
