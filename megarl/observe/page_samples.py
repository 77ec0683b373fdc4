"""Samples of a run for the report page: columns that filters read, and texts in chunks, parsed when they are needed.

A page holds up to 100,000 samples this way, compressed, and opens without parsing their texts.
"""

from __future__ import annotations

import math
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

from megarl.data.final_answer import read_boxes
from megarl.data.rows import find_value
from megarl.observe.run_record import SERVED, RunRecord, reward_of
from megarl.observe.sample_media import PagePictures, frames_shown, shown_media, told_media

SAMPLES = 100_000
"""Samples of a run in a page at most: whole groups, evenly spread over its steps."""
TEXT_CHARACTERS = 40_000_000
"""Characters of responses of a run in a page at most, which the browser holds; of more, fewer groups."""
PACKED_BYTES = 8_500_000
"""Bytes of the packed samples of a run in a page at most."""
LEAST_SHARE = 1e-4
"""Share of groups of which no fewer are tried."""
TOKENS = 100_000
"""Response tokens whose numbers are in a page at most, those of the newest samples; one makes about 25 bytes."""
COMPRESSION = 6
Chunk = TypeVar("Chunk")
CHUNK = 1000
"""Samples that the browser parses at a time."""
DETAILS = ("pieces", "sampled", "engine", "log_probs", "reference_log_probs", "advantages")
MEDIA = ("media", "boxes", "gold_boxes")
MORE = (*DETAILS, *MEDIA, SERVED)


def listed_samples(run: RunRecord, pictures: PagePictures) -> list[dict[str, Any]]:
    """Samples that the page shows of the run's samples, oldest step first."""
    return list(_page_samples(run, pictures, 1.0))


def packed_samples(run: RunRecord, pictures: PagePictures) -> tuple[dict[str, Any], str, list[str]]:
    """The same as columns, prompts and chunks, packed; of samples that take more than `PACKED_BYTES` fewer groups."""
    share = 1.0
    while True:
        columns, prompts, chunks = pack_samples(_page_samples(run, pictures, share), packed_text)
        told = packed_text(prompts)
        nbytes = len(told) + sum(map(len, chunks))
        if nbytes <= PACKED_BYTES or share < LEAST_SHARE:
            return columns, told, chunks
        share *= 0.9 * PACKED_BYTES / nbytes


def _page_samples(run: RunRecord, pictures: PagePictures, share: float) -> Iterator[dict[str, Any]]:
    places = shown_places(run.samples.groups, run.samples.characters, share)
    room, first_with_numbers = TOKENS, len(places)
    for index in range(len(places) - 1, -1, -1):
        room -= run.samples.tokens[places[index]]
        if room < 0 and first_with_numbers < len(places):
            break
        first_with_numbers = index
    for index, sample in enumerate(run.samples.at(places)):
        yield sample_data(sample, run, pictures, has_numbers=index >= first_with_numbers)


def shown_places(groups: Sequence[int], characters: Sequence[int], share: float = 1.0) -> list[int]:
    """Places of a `share` of all samples, or of as many whole groups as there is room for, evenly spread.

    Given are by sample the number of its group, and the characters of its response.
    """
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    share = min(share, SAMPLES / max(1, len(groups)), TEXT_CHARACTERS / max(1, sum(characters)))
    grouped = list(members.values())
    count = max(1, int(len(grouped) * share)) if grouped else 0
    chosen = grouped if count == len(grouped) else [grouped[index * len(grouped) // count] for index in range(count)]
    return [place for group in chosen for place in group]


def sample_data(sample: Mapping[str, Any], run: RunRecord, pictures: PagePictures, *, has_numbers: bool) -> dict[str, Any]:
    """The part of a sample that the browser shows; `has_numbers`: also the engine's log-probs and what the step made of
    each token."""
    training = sample.get("training") or {}
    media = _sample_media(sample, run, pictures)
    sampled = sample.get("sampled_mask", [])
    advantages = [value for value, is_sampled in zip(training.get("advantages", ()), sampled, strict=False) if is_sampled]
    shown = {
        "step": sample["step"],
        "id": sample["sample_id"],
        "group": sample["group_id"],
        "prompt": sample.get("prompt_text", ""),
        "response": sample.get("response_text", ""),
        "reward": reward_of(sample),
        "advantage": round(sum(advantages) / len(advantages), 6) if advantages else None,
        "rewards": sample.get("rewards", {}),
        "tokens": len(sample.get("response_ids", ())),
        "finish": sample.get("finish_reason", ""),
        "answer": find_value(sample.get("row", {}), run.answer_key),
        **media,
        **({SERVED: sample[SERVED]} if SERVED in sample else {}),
    }
    if has_numbers or media:  # pictures that were told stand among the tokens
        names = ("log_probs", "reference_log_probs", "advantages")
        shown |= {"pieces": training.get("pieces"), "sampled": sampled, "engine": _rounded(sample.get("rollout_log_probs", []))}
        shown |= {name: _rounded(training[name]) for name in names if name in training}
    return shown


def pack_samples(
    samples: Iterable[Mapping[str, Any]], pack: Callable[[list[Any]], Chunk]
) -> tuple[dict[str, Any], list[str], list[Chunk]]:
    """`samples` as columns of numbers, the prompts (each once), and the rest: what `pack` makes of each `CHUNK` samples."""
    prompts: dict[str, int] = {}
    groups: dict[tuple[int, str], int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "reward", "advantage", "prompt", "group")}
    rows: list[Any] = []
    chunks: list[Chunk] = []
    for sample in samples:
        for name in ("step", "reward", "advantage"):
            columns[name].append(sample[name])
        columns["prompt"].append(prompts.setdefault(sample["prompt"], len(prompts)))
        columns["group"].append(groups.setdefault((sample["step"], sample["group"]), len(groups)))
        details = {name: sample[name] for name in MORE if name in sample}
        names = ("id", "group", "response", "rewards", "tokens", "finish", "answer")
        rows.append([*(sample[name] for name in names), details or 0])
        if len(rows) == CHUNK:
            chunks.append(pack(rows))
            rows = []
    return columns, list(prompts), [*chunks, *([pack(rows)] if rows else [])]


def packed_text(values: list[Any]) -> str:
    """The JSON of `values` (null for numbers that it has no word for), compressed by zlib, in base64: no markup."""
    content = to_json(values, inf_nan_mode="null", serialize_unknown=True)
    return b64encode(zlib.compress(content, COMPRESSION)).decode()


def _sample_media(sample: Mapping[str, Any], run: RunRecord, pictures: PagePictures) -> dict[str, Any]:
    """The pictures of a sample by digest, and the boxes of its answer and of the gold one; nothing for a sample of text.

    Those that were told between turns have their place among the response's tokens.
    """
    shown = shown_media(sample)
    for media in shown:
        for digest in frames_shown(media):
            pictures.add(digest, run.media_folder)
    if not shown:
        return {}
    parts = [{"kind": item.kind, "shown": frames_shown(item), "frames": len(item.digests)} for item in shown]
    for number, media in told_media(sample):
        parts[number] |= {"place": media.place, "tokens": media.tokens}
    gold = read_boxes(find_value(sample.get("row", {}), run.answer_key))
    return {"media": parts, "boxes": read_boxes(sample.get("response_text", "")), "gold_boxes": gold}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 8) if math.isfinite(value) else value for value in values]
