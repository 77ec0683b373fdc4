"""Samples of a server: what its clients were answered is in the run's file, with its tenant and model, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from megarl.config import parse_config
from megarl.errors import RunStopped
from megarl.observe.page_samples import listed_samples
from megarl.observe.run_record import read_run
from megarl.observe.sample_media import PagePictures
from megarl.options.serve.served_samples import ServedSamples, as_record
from megarl.options.serve.server_run import ServerRun
from megarl.options.serve.tenants import add_tenant
from megarl.options.serve.values import Answer, Picture, Sampled, SampleRequest
from tests.options.serve.management_server import quick_hashes
from tests.options.serve.served import BASE, serving


class Letters:
    """A tokenizer that has a letter for each id."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in ids)


def request(tenant: str, **fields: Any) -> SampleRequest:
    return SampleRequest(np.array([1, 2, 3], np.int32), tenant=tenant, **fields)


def answers(number: int) -> Sampled:
    return Sampled([Answer(np.array([4, n], np.int32), np.array([-0.5, -n], np.float32), "stop") for n in range(number)])


def held(samples: ServedSamples) -> list[str]:
    return [answer.id for answer in samples.drain()]


def test_tenants_share_the_samples_of_a_minute() -> None:
    samples = ServedSamples(4)
    samples.take("a1", "m", request("ann"), answers(3))
    samples.take("a2", "m", request("ann"), answers(3))
    samples.take("b1", "m", request("bob"), answers(9))
    samples.take("c1", "m", request("cid"), answers(9))
    assert held(samples) == ["a1:0", "b1:0", "b1:1", "c1:0"]
    assert held(samples) == []
    samples.take("a3", "m", request("ann"), answers(9))
    assert held(samples) == ["a3:0", "a3:1", "a3:2", "a3:3"], "alone a tenant has all places"


def test_no_samples_are_kept_where_none_are_asked_for_and_none_of_questions_for_log_probs() -> None:
    none, some = ServedSamples(0), ServedSamples(4)
    none.take("a", "m", request("ann"), answers(2))
    some.take("a", "m", request("ann", max_tokens=1, prompt_logprobs=True), answers(1))
    some.take("b", "m", request("ann", max_tokens=1), answers(1))
    assert held(none) == []
    assert held(some) == ["b:0"]


def test_a_picture_in_a_prompt_is_told_in_its_place() -> None:
    samples = ServedSamples(1)
    asked = SampleRequest(np.array([1, 0, 0, 2], np.int32), pictures=(Picture(1, 2, "png", b"12345"),))
    samples.take("a", "m", asked, answers(1))
    [answer] = samples.drain()
    assert as_record(answer, Letters())["prompt_text"] == "B[picture 1: png, 5 bytes, 2 tokens]C"


def run_in(folder: Path, **fields: Any) -> ServerRun:
    config = parse_config({"model": {"path": "m"}, "serve": {}, "run": {"folder": str(folder), "name": "run", **fields}})
    run = ServerRun(config, say=lambda line: None)
    run.open_samples(Letters())
    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def test_what_clients_were_answered_is_in_the_runs_file_by_tenant_and_model(tmp_path: Path) -> None:
    with quick_hashes():
        said = {name: add_tenant(tmp_path / "tenants.yaml", name) for name in ("ann", "bob")}
    keys = {name: line.partition("TINKER_API_KEY=")[2].split()[0] for name, line in said.items()}
    run, told = run_in(tmp_path), {}
    prompt, parameters = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=3)
    with serving(tmp_path / "serve", tenants=tmp_path / "tenants.yaml", answered=run.samples.take) as served:
        for name, key in keys.items():
            client = served.client(key)
            model = client.create_lora_training_client(BASE, rank=2)
            saved = model.save_weights_for_sampler("first").result().path
            for path, sampler in {
                BASE: client.create_sampling_client(base_model=BASE),
                saved: client.create_sampling_client(model_path=saved),
                model.get_info().model_id: model.save_weights_and_get_sampling_client(),
            }.items():
                told[name, path] = sampler.sample(prompt, 1, parameters).result().sequences[0]
            sampler.compute_logprobs(prompt).result()
    run.figures.count("requests")
    run.record()
    run.close(RunStopped("the server was told to stop"))
    found = {(line["served"]["tenant"], line["served"]["model"]): line for line in lines(tmp_path)}
    assert len(lines(tmp_path)) == 6
    assert found.keys() == told.keys()
    for key, sequence in told.items():
        line = found[key]
        assert (line["response_ids"], line["prompt_ids"], line["step"]) == (sequence.tokens, [5, 6, 7], 1)
        assert line["rollout_log_probs"] == sequence.logprobs
        assert (line["prompt_text"], line["response_text"]) == ("FGH", Letters().decode(sequence.tokens))
        assert line["finish_reason"] == sequence.stop_reason
        assert "reward" not in line["training"]
    record = read_run(tmp_path / "run")
    shown = listed_samples(record, PagePictures())
    assert {sample["reward"] for sample in shown} == {None}
    assert {(sample["served"]["tenant"], sample["served"]["model"]) for sample in shown} == set(told)


@pytest.mark.parametrize("most", [0, 2])
def test_a_server_that_is_started_again_goes_on_with_the_file(tmp_path: Path, most: int) -> None:
    for start in (1, 2):
        run = run_in(tmp_path, log_samples=most)
        run.samples.take(f"start {start}", "m", request("ann"), answers(3))
        run.figures.count("requests")
        run.close(RunStopped("the server was told to stop"))
        with (tmp_path / "run" / "samples.jsonl").open("a") as file:
            file.write('{"step": 9, "half of a li')  # as a killed process leaves it
    run_in(tmp_path, log_samples=most).close(RunStopped("the server was told to stop"))
    kept = [f"start {start}:{number}" for start in (1, 2) for number in range(most)]
    assert [line["sample_id"] for line in lines(tmp_path)] == kept
