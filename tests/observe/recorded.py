"""Folders of runs that never took place, with everything in them that a report shows, and text that means harm."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HARM = "</script><script>document.title='taken over'</script><img src=x onerror=\"document.title='taken over'\"><!--"


def write_run(folder: Path, *, seed: int = 0, lr: float = 1e-5, steps: int = 12) -> Path:
    """Write a run: rewards rise by step and differ by seed, every step has four samples, one of them with `HARM` in it."""
    folder.mkdir(parents=True)
    config = (
        f"run: {{name: {folder.name}, seed: {seed}}}\npolicy:\n  optimizer: {{lr: {lr}}}\nnote: '{HARM.replace(chr(39), '')}'\n"
    )
    (folder / "config.yaml").write_text(config)
    rows = [{"step": step, "reward/mean": step / 20 + seed / 10, "policy/loss": -step} for step in range(1, steps + 1)]
    _lines(folder / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.25}, *rows])
    _lines(folder / "samples.jsonl", [_sample(step, place) for step in range(1, steps + 1) for place in range(4)])
    spread = {"low": 0.0, "high": 8.0, "counts": [3, 0, 1]}
    _lines(
        folder / "distributions.jsonl",
        [{"step": s, "response_tokens": spread, "staleness": spread} for s in range(1, steps + 1)],
    )
    _lines(folder / "trace.jsonl", [_trace(step) for step in range(1, steps + 1)])
    _lines(folder / "faults.jsonl", [{"step": 3, "who": "rank 1 of policy", "what": HARM}])
    summary = {
        "eval": {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}},
        "gates": {"kl": 0.0},
        "seconds_per_step": 1.5,
    }
    summary |= {"machine": {"cores": 2}, "versions": {"torch": "2.13.0", "apex": None}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def show_pictures(run: Path, folder: Path | None = None) -> list[str]:
    """Give each sample of a written run one of two noisy pictures of 896x448 pixels, by turns; the digests of the two.

    The second response gives a box, another that is outside, and harm; its gold answer is a box. The last sample has a video.
    """
    media = folder or run / "media"
    media.mkdir(exist_ok=True, parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (2, 448, 896, 3), dtype=np.uint8)
    digests = [hashlib.sha256(pixels.tobytes()).hexdigest()[:32] for pixels in noise]
    for digest, pixels in zip(digests, noise, strict=True):
        Image.fromarray(pixels).save(media / f"{digest}.png")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for place, sample in enumerate(samples):
        picture = {"kind": "image", "digests": [digests[place % 2]], "grid": [1, 32, 64], "place": 3, "tokens": 512}
        sample["media"] = [picture | {"seconds_per_grid": None}]
    boxes = '{"bbox_2d": [90, 45, 180, 100], "label": "' + HARM.replace('"', "'") + '"} {"bbox_2d": [1, 2, 9999, 3]}'
    samples[1] |= {"response_text": boxes, "row": {"answer": [100, 50, 200, 150]}}
    samples[1]["training"]["pieces"] = [boxes, "", ""]
    samples[-1]["media"][0] |= {"kind": "video", "digests": digests * 10, "grid": [10, 32, 64], "seconds_per_grid": 1.0}
    _lines(run / "samples.jsonl", samples)
    return digests


def as_served(run: Path) -> None:
    """Make the samples of a written run those of a server: tenants ann and bob by turns of steps, and no rewards."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        del sample["training"]["reward"], sample["training"]["advantages"]
        tenant = ("ann", "bob")[sample["step"] % 2]
        sample |= {"rewards": {}, "row": {}, "served": {"tenant": tenant, "model": f"tinker://{tenant}/sampler_weights/a"}}
    _lines(run / "samples.jsonl", samples)


def show_between_turns(run: Path, digest: str) -> None:
    """Let the first sample of a written run with pictures be told the picture `digest` as two tokens between two turns."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    told = {"kind": "image", "digests": [digest], "grid": [1, 32, 64], "place": 10 + 1, "tokens": 2, "seconds_per_grid": None}
    samples[0]["media"].append(told)
    parts = [{"type": "text", "text": "see "}, {"type": "image", "image": f"/gone/{digest}.png"}, {"type": "text", "text": "!"}]
    samples[0] |= {"prompt_ids": [*range(10)], "response_ids": [*range(5)], "sampled_mask": [1, 0, 0, 0, 1]}
    samples[0]["turns"] = [
        {"role": "assistant", "content": "look"}, {"role": "user", "content": parts}, {"role": "assistant", "content": "two"}
    ]  # fmt: skip
    samples[0]["rollout_log_probs"] = [-1.0, 0.0, 0.0, 0.0, -2.0]
    samples[0]["training"] = {"pieces": ["look", "<pad>", "<pad>", "!", "two"]}
    _lines(run / "samples.jsonl", samples)


def _sample(step: int, place: int) -> dict[str, Any]:
    harmful = place == 3
    pieces = ["the ", "answer ", HARM if harmful else f"is {step}"]
    return {
        "step": step,
        "sample_id": f"row-{step}@0/{place}",
        "group_id": f"row-{step}@0",
        "row_id": f"row-{step}",
        "prompt_text": f"question {step}",
        "response_text": "".join(pieces),
        "rewards": {"exact_number": place / 4},
        "row": {"answer": str(step)},
        "finish_reason": "stop",
        "prompt_ids": [1],
        "response_ids": [1, 2, 3],
        "sampled_mask": [1, 1, 0],
        "rollout_log_probs": [-0.5, -1.0, float("-inf")],
        "weight_versions": [step] * 3,
        "training": {
            "reward": place / 4,
            "pieces": pieces,
            "log_probs": [-0.5, -1.25, 0.0],
            "advantages": [1.0, -0.5, 0.0],
        },
    }


def _trace(step: int) -> dict[str, Any]:
    at = 1000.0 + 10 * step
    driver = [["generate", at, at + 6], ["update", at + 6, at + 9]]
    ranks = {f"policy {rank}": [["update", at + 6, at + 8 + rank / 2]] for rank in range(2)}
    return {"step": step, "spans": {"driver": driver, **ranks}}


def _lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
