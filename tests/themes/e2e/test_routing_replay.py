"""Whole runs of a mixture of experts whose routing is replayed: the engine's choice, or that of the trainer's own old pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from megarl.config import Config
from megarl.convert.plan import plan_hf
from megarl.convert.run import run_plan
from megarl.convert.sources import open_dist
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.models.check_layouts import check_models
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from tests.rollout.routed import chosen_experts
from tests.themes.e2e.records import curve, tensors

RoutingPart = pytest.importorskip("megarl.options.routing_replay.run").RoutingPart
known = pytest.importorskip("megarl.options.routing_replay.column").known
HERE = Path(__file__).parent
CROOKED = f"{HERE / 'crooked_engine.py'}:CrookedEngine"
CROOKED_RANKS = f"{HERE / 'crooked_ranks.py'}:ARCHITECTURE"
RETRACTING = f"{HERE / 'retracting_engine.py'}:RetractingEngine"


@pytest.fixture
def run(tiny_experts: Path, tiny_config: Callable[..., Config]) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """`run(name, **overrides)`: the metrics of the run's steps and its exported weights."""

    def go(name: str, **overrides: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        more = {"model.path": str(tiny_experts), "data.eval": None, "run.name": name, "run.export": True, "run.steps": 2}
        config = tiny_config(**more | overrides)
        train(config)
        folder = Path(config.run_folder)
        metrics = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
        return metrics, load_file(folder / "model" / "model.safetensors")

    return go


@pytest.mark.slow
def test_an_engine_that_routes_otherwise_is_followed_as_by_ranks_that_route_as_it_does(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    crooked = {
        "rollout.engine": CROOKED, "policy.share_prefix": True, "run.save_every": 1, "run.keep_checkpoints": 0,
        "algorithm.kl": {"coef": 0.0},  # a reference does not replay
    }  # fmt: skip
    replayed, _ = run("replayed", **crooked, **{"policy.routing": {"replay": "engine", "compare_every": 1}})
    for step in replayed:
        assert step["mismatch/log_prob_max"] < 1e-5
        assert step["routing/live_log_prob_abs"] > 0.05
        assert step["routing/differing"] > 0.5
        assert step["routing/missing"] == 0

    [live] = run("live", **crooked | {"run.steps": 1})[0]
    for figure in ("log_prob_abs", "log_prob_max"):  # what is said of routing without replay is what such a run has
        assert live[f"mismatch/{figure}"] == replayed[0][f"routing/live_{figure}"]
    run("alike", **crooked, **{"model.architecture": CROOKED_RANKS})
    checkpoints = [tmp_path / "runs" / name / "checkpoints" / f"step_{step:06d}" / "policy" for name, step in STEPS_OF_RUNS]
    other, first, second, first_alike, second_alike = map(tensors, checkpoints)
    for found, expected in ((first, first_alike), (second, second_alike)):  # moments too: after a step they are its gradient
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    moment = "optimizer.exp_avg.embedding.word_embeddings.weight"
    assert (other[moment] - first[moment]).abs().max() > 0.01 * first[moment].abs().max()


STEPS_OF_RUNS = (("live", 1), ("replayed", 1), ("replayed", 2), ("alike", 1), ("alike", 2))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of all steps, as they were trained on."""
    batches: list[Batch] = []
    figures = RoutingPart.figures

    def kept(of_run: RoutingPart, roles: Any, batch: Batch) -> dict[str, float]:
        batches.append(batch)
        return figures(of_run, roles, batch)

    monkeypatch.setattr(RoutingPart, "figures", kept)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {"rollout.engine": RETRACTING, "rollout.max_new_tokens": 14},
        pytest.param(  # whose servers retract what they are sampling for every update
            {"rollout.engine": "sglang", "rollout.max_new_tokens": 80},
            marks=pytest.mark.exhaustive,  # the other engine stands for it, and options/routing_replay/test_sglang_routes.py
        ),
    ],
    ids=["embedded", "sglang"],
)
def test_no_response_that_was_retracted_has_routes_of_two_versions(
    run: Callable[..., Any], seen: list[Batch], tiny_experts: Path, tmp_path: Path, engine: dict[str, Any]
) -> None:
    steps = 4
    settings = {
        "run.steps": steps, "run.save_every": 1, "run.keep_checkpoints": 0, "rollout.ignore_eos": True,
        "policy.share_prefix": True, "policy.routing.replay": "engine",
        "rollout.schedule": {"mode": "async", "max_staleness": 2},
    }  # fmt: skip
    metrics, _ = run("retracted", **settings, **engine)
    folder = tmp_path / "runs" / "retracted"
    models = {0: transformers.AutoModelForCausalLM.from_pretrained(tiny_experts, dtype=torch.float32)}
    for version in range(1, steps):
        trained = open_dist(folder / "checkpoints" / f"step_{version:06d}" / "policy")
        run_plan(plan_hf("export", trained, None), tmp_path / f"v{version}")
        models[version] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"v{version}", dtype=torch.float32)
    assert len(seen) == steps
    of_two = 0
    for row, batch in zip(metrics, seen, strict=True):
        expected = [expected_routes(sample, models) for sample in batch.samples]
        for sample, wanted in zip(batch.samples, expected, strict=True):
            of_two += len({*sample.weight_versions}) > 1
            found = np.where(known(sample.extra["routes"])[..., None], np.sort(sample.extra["routes"]).astype(int), -1)
            np.testing.assert_array_equal(found, wanted)
        assert row["routing/missing"] == pytest.approx(missing_choices(batch, expected))
        if row["routing/missing"] > 0:
            assert any(len({*sample.weight_versions}) > 1 for sample in batch.samples)
    assert of_two > 0
    assert max(row["routing/missing"] for row in metrics) > 0.1


def expected_routes(sample: Sample, models: dict[int, Any]) -> Any:
    """`[tokens, layers, k]`, -1 where no choice is known: those of the newest weights, but not before tokens of older ones."""
    newest = sample.weight_versions[-1]
    chosen = chosen_experts(models[newest], [*sample.prompt_ids, *sample.response_ids[:-1]])
    for place, version in enumerate(sample.weight_versions):
        if version != newest:
            chosen[len(sample.prompt_ids) + place - 1] = -1
    return np.concatenate([chosen, np.full_like(chosen[:1], -1)])


def missing_choices(batch: Batch, expected: list[Any]) -> float:
    """The share of unknown choices of a batch's prompts, each once with what its responses agree on, and responses."""
    parts, prompts = [], {}
    for sample, routes in zip(batch.samples, expected, strict=True):
        prompts.setdefault(sample.group_id, []).append(routes[: len(sample.prompt_ids)])
        parts.append(routes[len(sample.prompt_ids) : -1, :, 0] >= 0)
    for routes in prompts.values():
        parts.append((routes[0][..., 0] >= 0) & (np.stack(routes) == routes[0]).all((0, 3)))
    return 1 - sum(part.sum() for part in parts) / sum(part.size for part in parts)


@pytest.mark.slow
@pytest.mark.exhaustive  # test_async.py resumes with groups under way, tests/options/routing_replay writes and reads routes
def test_a_resumed_run_replays_the_routes_of_responses_that_waited(run: Callable[..., Any], tmp_path: Path) -> None:
    """The engine is a step ahead and routes otherwise: responses that wait in a checkpoint cannot do without their routes."""
    settings = {
        "run.steps": 4, "run.save_every": 2, "run.keep_checkpoints": 0, "run.resume": "auto", "policy.share_prefix": True,
        "policy.routing": {"replay": "engine", "compare_every": 1}, "rollout.engine": CROOKED,
        "rollout.schedule": {"mode": "one_step_off_policy"}, "policy.layout": {"dp": 2},
    }  # fmt: skip
    run("whole", **settings)
    whole = tmp_path / "runs" / "whole"
    waiting = json.loads((whole / "checkpoints" / "step_000002" / "state.json").read_text())["groups"]["samples"]
    assert waiting
    assert all("routes" in sample for group in waiting for sample in group)
    resumed = tmp_path / "runs" / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    shutil.rmtree(resumed / "model")
    (resumed / "summary.json").unlink()
    run("resumed", **settings)
    curves = [curve(folder) for folder in (resumed, whole)]
    for row in (row for of_run in curves for row in of_run if row["step"]):
        del row["rollout/in_flight"]  # what the engine works on at that moment
    assert curves[0] == curves[1]
    found, expected = (tensors(folder / "checkpoints" / "step_000004" / "policy") for folder in (resumed, whole))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.exhaustive  # the first test, and tests/themes/parallel/test_routing_replay.py
def test_replaying_the_choices_that_the_trainer_would_make_changes_no_bit(run: Callable[..., Any]) -> None:
    metrics, found = run("engine", **{"policy.routing.replay": "engine"})
    assert [(step["routing/differing"], step["routing/missing"]) for step in metrics] == [(0, 0)] * 2
    _, expected = run("live")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.slow
def test_later_updates_go_where_the_old_pass_went(run: Callable[..., Any]) -> None:
    large = {
        "policy.optimizer": {"lr": 0.03},
        "algorithm.mini_batches": 2,
        "policy.layout": {"pp": 3},
        "policy.share_prefix": True,
    }
    metrics, replayed = run("old policy", **large, **{"policy.routing.replay": "old_policy"})
    _, live = run("live", **large)
    assert all(step["routing/missing"] == 0 for step in metrics)
    assert any(step["routing/differing"] > 0 for step in metrics)  # the second update's router would choose otherwise
    assert any(not torch.equal(replayed[name], live[name]) for name in live)


def test_a_model_without_experts_has_nothing_to_replay(tiny_config: Callable[..., Config]) -> None:
    from megarl.errors import ConfigError

    with pytest.raises(ConfigError, match=r"policy.routing.replay is 'engine', which is for mixtures of experts"):
        check_models(tiny_config(**{"policy.routing.replay": "engine"}))
