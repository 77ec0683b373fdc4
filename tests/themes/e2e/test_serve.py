"""`megarl serve` as a process, with ranks and SGLang, and the protocol's own client: models that train and answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
import transformers
import yaml
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.public_interfaces.training_client import fetch_training_info

from tests.docs.pages import DOCS, blocks
from tests.options.serve.clients import closed_afterwards
from tests.themes.e2e.processes import outside_ray
from tests.themes.e2e.test_watching import free_port

NAME = "tiny/llama"
ADAM = types.AdamParams(learning_rate=1e-2)


class Server:
    """A `megarl serve` process; `url` is where it answers."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self.log = folder / "serve.log"
        environment = outside_ray() | {"TINKER_TELEMETRY": "0"}
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "megarl", "serve", str(file)]
            self.process = subprocess.Popen(command, env=environment, text=True, stdout=log, stderr=subprocess.STDOUT)
        ends_at = time.monotonic() + 300
        while not (serving := re.search(r"serving .* at (http://\S+):", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < ends_at, self.log.read_text()
            time.sleep(0.2)
        self.url = serving[1]

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key="tml-local")

    def ranks(self) -> list[psutil.Process]:
        """Its training ranks."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "RankProcess" in " ".join(process.cmdline())]

    def engines(self) -> list[psutil.Process]:
        """The processes of its SGLang servers."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "sglang" in " ".join(process.cmdline())]

    def stop(self) -> str:
        """End it as Ctrl-C does; returns what it said."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=120)
        finally:
            self.process.kill()
        return self.log.read_text()


def config_of(model: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"folder": str(folder / "runs"), "name": "served"},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"threads_per_rank": 1, "max_tokens_per_micro_batch": 512},
        "serve": {"models": {NAME: None, str(model): None}, "max_rank": 16, "live_models": 4, "context_tokens": 128, "port": 0},
        "rollout": {"threads": 1},
    } | sections


@contextmanager
def serving(model: Path, folder: Path, **sections: Any) -> Iterator[Server]:
    os.environ["TINKER_TELEMETRY"] = "0"
    server = Server(config_of(model, folder, **sections), folder)
    try:
        with closed_afterwards():
            yield server
    finally:
        server.process.kill()
        server.process.wait(timeout=60)


def datum(tokens: Sequence[int], advantages: Sequence[float], logprobs: Sequence[float], prompt: int) -> types.Datum:
    """A sampled sequence for the losses that compare with the sampler; nothing of its first `prompt` tokens is trained on."""
    before = [0.0] * (prompt - 1)
    inputs = {
        "target_tokens": list(tokens[1:]),
        "logprobs": [*before, *logprobs],
        "advantages": [*before, *advantages],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def spoken(tokens: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    """A sequence for cross-entropy."""
    inputs = {"target_tokens": list(tokens[1:]), "weights": list(weights or [1.0] * (len(tokens) - 1))}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def logprobs_of(training: tinker.TrainingClient, tokens: Sequence[int]) -> list[float]:
    """Of every token but the first."""
    answer = training.forward([spoken(tokens)], loss_fn="cross_entropy").result(timeout=300)
    return [float(value) for value in answer.loss_fn_outputs[0]["logprobs"].tolist()]


@pytest.mark.slow
def test_models_train_and_answer_beside_each_other_and_a_loop_of_a_client_learns(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.encode("12 + 34 = ", add_special_tokens=False)
    with serving(tiny_model, tmp_path) as server:
        client = server.client()
        first = client.create_lora_training_client(base_model=NAME, rank=8, seed=1)
        second = client.create_lora_training_client(base_model=NAME, rank=4, seed=2, train_unembed=False)
        of_base = logprobs_of(second, [*prompt, 3, 4, 5])
        assert logprobs_of(first, [*prompt, 3, 4, 5]) == of_base  # adapters add nothing yet

        shares = [improve(first, prompt, tokenizer) for _ in range(8)]
        assert shares[-1] > shares[0] + 0.2, shares
        assert logprobs_of(second, [*prompt, 3, 4, 5]) == of_base  # bit for bit

        for _ in range(3):
            second.forward_backward([spoken([*prompt, 40, 41, 42, 1])], loss_fn="cross_entropy").result(timeout=120)
            second.optim_step(ADAM).result(timeout=120)
        for training in (first, second):
            sampling = training.save_weights_and_get_sampling_client()
            answer = sampling.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=12, seed=5)).result(
                timeout=120
            )
            for sequence in answer.sequences:
                theirs = logprobs_of(training, [*prompt, *sequence.tokens])[len(prompt) - 1 :]
                assert sequence.logprobs == pytest.approx(theirs, abs=1e-4)

        run_the_page(server, tiny_model)

        path = first.save_state("kept").result(timeout=120).path
        before = logprobs_of(first, [*prompt, 3, 4, 5])
        improve(first, prompt, tokenizer)
        assert logprobs_of(first, [*prompt, 3, 4, 5]) != before
        again = client.create_training_client_from_state_with_optimizer(path)
        assert logprobs_of(again, [*prompt, 3, 4, 5]) == before
        said = server.stop()
        assert server.process.returncode == 0, said
        assert "Traceback" not in said


def run_the_page(server: Server, model: Path) -> None:
    """The loop of docs/serve.md as it stands, but for the model: its loss falls, and it samples from what it trained."""
    block = next(block.text for block in blocks(DOCS / "serve.md") if block.language == "python")
    base = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert block.count(base) == 1
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    command = [sys.executable, "-c", block.replace(base, str(model))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *losses, answers = done.stdout.splitlines()
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0])
    assert answers.count("stop_reason=") == 2


def improve(training: tinker.TrainingClient, prompt: list[int], tokenizer: Any) -> float:
    """A step of GRPO as a client writes it, whose reward is the share of digits; returns the mean reward."""
    sampling = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    answers = sampling.sample(types.ModelInput.from_ints(prompt), 16, params).result(timeout=120).sequences
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    rewards = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]
    mean = sum(rewards) / len(rewards)
    data = [
        datum([*prompt, *answer.tokens], [reward - mean] * len(answer.tokens), answer.logprobs or [], len(prompt))
        for answer, reward in zip(answers, rewards, strict=True)
    ]
    passed = training.forward_backward(data, loss_fn="importance_sampling")
    stepped = training.optim_step(ADAM)
    passed.result(timeout=120)
    stepped.result(timeout=120)
    return mean


@pytest.mark.slow
def test_a_client_whose_rank_is_killed_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    tokens = [3, 4, 5, 6, 7, 8, 1]
    serve = config_of(tiny_model, tmp_path)["serve"] | {"port": free_port()}  # where the client finds it again
    with serving(tiny_model, tmp_path, serve=serve) as server:
        training = server.client().create_lora_training_client(base_model=NAME, rank=8, seed=1)
        for _ in range(2):
            training.forward_backward([spoken(tokens)], loss_fn="cross_entropy").result(timeout=120)
            training.optim_step(ADAM).result(timeout=120)
        before = logprobs_of(training, tokens)
        (rank,) = server.ranks()
        rank.kill()
        assert logprobs_of(training, tokens) == before
        training.forward_backward([spoken(tokens)], loss_fn="cross_entropy").result(timeout=300)
        training.optim_step(ADAM).result(timeout=300)
        assert sum(logprobs_of(training, tokens)) > sum(before)


async def whole_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model of which all weights are trained, for which the client has no method."""
    holder, number = client.holder, client.holder.get_training_client_id()
    asked = types.CreateModelRequest(session_id=holder.get_session_id(), model_seq_id=number, base_model=NAME, lora_config=None)
    with holder.aclient(ClientConnectionPoolType.TRAIN) as http:
        future = await http.models.create(request=asked)
    made = await _APIFuture(types.CreateModelResponse, holder, future, request_start_time=0.0, request_type="CreateModel")
    info = await fetch_training_info(holder, made.model_id)
    return tinker.TrainingClient(holder, model_seq_id=number, model_id=made.model_id, info=info)


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/options/serve/test_sampler.py has such a server lost, without ranks and engines
def test_a_server_of_all_weights_samples_with_what_was_trained_also_when_its_engine_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokens, params = [3, 4, 5, 6], types.SamplingParams(max_tokens=8, temperature=0.0)
    serve = {"models": {NAME: None}, "full_weights": True, "context_tokens": 128, "port": 0}
    with serving(tiny_model, tmp_path, serve=serve) as server:
        client = server.client()
        training = client.holder.run_coroutine_threadsafe(whole_model(client)).result(timeout=120)
        of_base = client.create_sampling_client(base_model=NAME)

        def sampled(sampling: tinker.SamplingClient) -> Any:
            (answer,) = sampling.sample(types.ModelInput.from_ints(tokens), 1, params).result(timeout=300).sequences
            return answer

        begun = sampled(of_base)
        for _ in range(4):
            training.forward_backward([spoken([*tokens, 40, 41, 42, 43])], loss_fn="cross_entropy").result(timeout=120)
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)
        trained = training.save_weights_and_get_sampling_client()
        after = sampled(trained)
        assert after.tokens != begun.tokens
        assert after.logprobs == pytest.approx(logprobs_of(training, [*tokens, *after.tokens])[len(tokens) - 1 :], abs=1e-4)
        assert sampled(of_base).tokens == begun.tokens
        assert sampled(trained).tokens == after.tokens
        for engine in server.engines():
            engine.kill()
        assert sampled(trained).tokens == after.tokens
        assert sampled(of_base).tokens == begun.tokens
