"""What two tenants' clients do at the same time on one server, and all that they hear."""

from __future__ import annotations

import io
import random
import tarfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import tinker
from tinker import types

STEPS = 6
TOKENS = range(3, 60)
SAMPLED = {"advantages": (-1, 1), "logprobs": (-5, -3)}


@dataclass(frozen=True)
class Work:
    """What a tenant does: the adapters of its model, its optimizer, its losses in turn, and the seed of its rows."""

    adapters: dict[str, Any]
    adam: types.AdamParams
    losses: tuple[str, ...]
    seed: int


WORK = {
    "anna": Work({"rank": 8, "seed": 3}, types.AdamParams(learning_rate=1e-2), ("cross_entropy", "importance_sampling"), 1),
    "ben": Work(
        {"rank": 3, "seed": 4, "train_unembed": False},
        types.AdamParams(learning_rate=2e-3, weight_decay=0.1, grad_clip_norm=0.5),
        ("ppo", "cross_entropy", "cispo"),
        2,
    ),
}


@dataclass
class Learned:
    """All numbers that a client has heard, and the files of its adapters."""

    losses: list[float] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def rows_of(work: Work, step: int) -> list[types.Datum]:
    """Between one and five rows of different lengths."""
    draw, rows = random.Random(f"{work.seed} {step}"), []
    for _ in range(1 + (step + work.seed) % 5):
        tokens = [draw.choice(TOKENS) for _ in range(draw.randrange(6, 40))]
        if work.losses[step % len(work.losses)] == "cross_entropy":
            inputs: dict[str, Any] = {"weights": [draw.random() for _ in tokens[1:]]}
        else:
            inputs = {name: [draw.uniform(*of) for _ in tokens[1:]] for name, of in SAMPLED.items()}
        inputs["target_tokens"] = tokens[1:]
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def learn(url: str, key: str, base: str, work: Work, begins: threading.Barrier) -> Learned:
    """A client's whole run: passes and steps sent before they are waited for, samples between them, adapters downloaded."""
    client, learned = tinker.ServiceClient(base_url=url, api_key=key), Learned()
    training = client.create_lora_training_client(base_model=base, **work.adapters).result(timeout=300)
    begins.wait(300)
    for step in range(STEPS):
        loss = work.losses[step % len(work.losses)]
        passes = [training.forward_backward(rows_of(work, step + part * STEPS), loss) for part in range(1 + step % 2)]
        stepped = training.optim_step(work.adam)
        for passed in passes:
            answer = passed.result(timeout=300)
            learned.losses.append(answer.metrics["loss:sum"])
            learned.log_probs += [list(output["logprobs"].tolist()) for output in answer.loss_fn_outputs]
        learned.norms.append((stepped.result(timeout=300).metrics or {})["grad_norm"])
        if step % 3 == 1:
            sampler = training.save_weights_and_get_sampling_client().result(timeout=300)
            prompt = types.ModelInput.from_ints([5, 6, 7])
            sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8)).result(timeout=300)
    path = training.save_weights_for_sampler("final").result(timeout=300).path
    learned.files = downloaded(url, key, path)
    return learned


def downloaded(url: str, key: str, path: str) -> dict[str, bytes]:
    """The files of a checkpoint's archive."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    link = httpx.get(f"{url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive", headers={"X-API-Key": key})
    assert link.status_code == 302, link.text
    archive = httpx.get(link.headers["location"])
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        files = {entry.name: tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def learned_by(url: str, base: str, keys: Mapping[str, str], names: Sequence[str]) -> dict[str, Learned]:
    """What tenants learn on a server at the same time."""
    found: dict[str, Learned] = {}
    begins = threading.Barrier(len(names))

    def work(name: str) -> None:
        try:
            found[name] = learn(url, keys[name], base, WORK[name], begins)
        finally:
            begins.abort()  # else the other one waits for it

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


def check_alike(together: Mapping[str, Learned], alone: Mapping[str, Learned]) -> None:
    """Check that each tenant heard the same, bit for bit, and has the same files, which are not those of the other."""
    for name in WORK:
        found, wanted = together[name], alone[name]
        assert len(found.losses) == 9
        assert found.losses == wanted.losses
        assert found.log_probs == wanted.log_probs
        assert found.norms == wanted.norms
        assert found.files == wanted.files
        assert {"adapter_model.safetensors", "adapter_config.json"} <= found.files.keys()
    assert len({together[name].files["adapter_model.safetensors"] for name in WORK}) == len(WORK)
