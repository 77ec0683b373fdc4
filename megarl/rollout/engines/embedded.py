"""Generation by the Hugging Face model inside this process: the engine for machines without SGLang, and its reference.

Seeded sampling: what a sample draws depends on the engine's seed, its key and its index alone, never on its batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import Config
from megarl.config.engine_kinds import EMBEDDED
from megarl.data.media import Media
from megarl.data.picture_rules import sees
from megarl.data.routes import Routes
from megarl.errors import DeadlineError, EngineError
from megarl.models.hf_folder import HFFolder
from megarl.models.quantised_tensors import Dequantiser
from megarl.models.registry import load_hf_config
from megarl.models.transformers_names import config_in_transformers, hub_tensors
from megarl.rollout.engines.embedded_routes import RouteRecorder
from megarl.rollout.engines.embedded_seeing import SeenPrompt, Sight
from megarl.rollout.engines.protocol import Engine, EnginePlace, FinishReason, Generation, SamplingParams, check_request
from megarl.weight_sync.checksums import compare, digest
from megarl.weight_sync.model_compatibility import ServedModel, check_same_model
from megarl.weight_sync.staging import NamedTensors
from megarl.weight_sync.weight_state import WeightState


@dataclass
class _OpenResponse:
    """One response under way."""

    prompt: list[int]
    generator: torch.Generator
    seen: SeenPrompt | None = None
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    """Of its tokens so far, under the weights that it is sampled by now."""
    finish_reason: FinishReason | None = None


class EmbeddedEngine(Engine):
    """Batched generation with a KV cache, left padding and one prefill per prompt.

    `max_batch_samples` responses are computed at once; the rest wait. `initial_version` declares which version the weights
    in `model_path` are; None: none, weights must be sent first. `media_folder` has the pictures that prompts show.

    With a `served_path` it begins with the weights of that folder, and takes weights as the folder stores them. If that is in
    few bits, it computes with the values that they stand for, in its own dtype: an engine's numbers, but for its kernels.
    """

    capabilities = EMBEDDED

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        # one seed for all: a response is the same whichever engine samples it
        media_folder = config.data.kept_in(config.run_folder)
        served = config.rollout.servers.model_path
        return {"dtype": config.model.dtype, "seed": config.run.seed, "media_folder": media_folder, "served_path": served}

    def __init__(
        self,
        model_path: str | Path,
        *,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch_samples: int = EMBEDDED.batch_samples,
        initial_version: int | None = None,
        media_folder: Path | None = None,
        served_path: str | Path | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind = AutoModelForImageTextToText if sees(model_path) else AutoModelForCausalLM
        try:
            # a folder's own code is never run
            config = config_in_transformers(model_path)
            model = kind.from_pretrained(model_path, config=config, dtype=getattr(torch, dtype), trust_remote_code=False)
            self._model = model.to(device).eval()
        except (OSError, ValueError) as error:
            raise EngineError(f"{model_path} cannot be loaded as a Hugging Face model: {error}") from error
        self._model.requires_grad_(False)
        self._sight = Sight.of(model_path, media_folder)
        self._recorder = RouteRecorder(self._model)
        self._held = hub_tensors(self._model)
        self._serves = ServedModel(load_hf_config(served_path or model_path), dtype)
        self._dequantiser: Dequantiser | None = None
        if served_path is not None:
            self._begin_with(HFFolder(served_path), ServedModel(load_hf_config(model_path), dtype))
        self._seed, self._max_batch_samples = seed, max_batch_samples
        self._weights = WeightState(initial_version)
        self._sent: dict[str, str] = {}
        self._stopped = False
        self._calls = 0
        self._weights_epoch = 0  # caches made in an earlier epoch are stale
        self._wanting_turn = 0
        self._turn = threading.Condition()  # held for each token, and for each change to the weights

    def _begin_with(self, folder: HFFolder, model: ServedModel) -> None:
        """Take over the weights of another folder of the same model."""
        check_same_model(self._serves, model)
        if self._serves.format is not None:
            format, names = self._serves.format, self._serves.quantised
            self._dequantiser = Dequantiser(format, names.__contains__)
        missing = set(self._held)
        for name in folder.names:
            for weight, values in self._arrived(name, folder.get_slice(name)[...]):
                if weight in self._held:  # else what no model reads, as the second copy of tied embeddings
                    self._held[weight].copy_(values)
                    missing.discard(weight)
        if missing:
            raise EngineError(f"{folder.path} has nothing for the model's {min(missing)}")

    def _arrived(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The weight that is complete with a tensor, if there is one."""
        found = (name, tensor) if self._dequantiser is None else self._dequantiser.take(name, tensor)
        if found is not None:
            yield found

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    @property
    def served_model(self) -> ServedModel:
        return self._serves

    # generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        keys: Sequence[str] | None = None,
        deadline_s: float = 1800.0,
        media: Sequence[Sequence[Media]] | None = None,
    ) -> list[list[Generation]]:
        check_request(prompts, n, keys, self.weight_version)
        shown = media if media is not None else [()] * len(prompts)
        if self._sight is None and any(shown):
            raise EngineError("a prompt shows pictures, but the model takes none")
        self._calls += 1
        keys = keys or [f"call-{self._calls}-prompt-{i}" for i in range(len(prompts))]
        rows = [
            _OpenResponse(
                list(prompt),
                torch.Generator().manual_seed(_seed(self._seed, key, index)),
                self._sight.prompt(prompt, of_prompt) if self._sight is not None else None,
            )
            for prompt, key, of_prompt in zip(prompts, keys, shown, strict=True)
            for index in range(n)
        ]
        cancelled = threading.Event()
        deadline = time.monotonic() + deadline_s
        work = asyncio.create_task(asyncio.to_thread(self._run, rows, params, deadline, cancelled))
        try:
            await asyncio.shield(work)
        except BaseException:
            cancelled.set()
            if not work.done():
                await asyncio.wait([work])
            raise
        generations = [_finished(row) for row in rows]
        return [generations[i : i + n] for i in range(0, len(rows), n)]

    def _run(
        self,
        rows: list[_OpenResponse],
        params: SamplingParams,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Complete `rows`, `max_batch_samples` at a time."""
        begun = time.monotonic()
        for start in range(0, len(rows), self._max_batch_samples):
            part = rows[start : start + self._max_batch_samples]
            batch = _DecodeBatch(self._model, part, params, self._sight, self._recorder)
            epoch = -1
            while batch.rows:
                with self._turn:
                    self._wait_for_weights(deadline, cancelled)
                    if cancelled.is_set():
                        return
                    if time.monotonic() > deadline:
                        done = sum(row.finish_reason is not None for row in rows)
                        limit_s = deadline - begun
                        raise DeadlineError(
                            f"generation was not complete after {limit_s:.3g} s: {done} of {len(rows)} responses"
                        )
                    if epoch != self._weights_epoch:
                        epoch = self._weights_epoch
                        batch.prefill()
                    assert self.weight_version is not None  # _wait_for_weights saw to it
                    batch.next_token(self.weight_version)

    def _wait_for_weights(self, deadline: float, cancelled: threading.Event) -> None:
        """Wait while there are no weights, and let whoever wants to change something have its turn; `_turn` is held."""
        while self.weight_version is None or self._wanting_turn:
            if self._stopped:
                raise EngineError("the engine was stopped while it was generating")
            if cancelled.is_set() or time.monotonic() > deadline:
                return
            self._turn.wait(timeout=max(0.001, min(1.0, deadline - time.monotonic())))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the weights and flags between two tokens of whatever is being generated, and wake who waits for them."""
        self._wanting_turn += 1  # a lock alone is not fair: the generating thread would take it again at once
        with self._turn:
            self._wanting_turn -= 1
            yield
            self._turn.notify_all()

    # weights ------------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, base: int | None = None) -> None:
        with self._change():
            self._weights.begin(version, base)
            self._sent = {} if base is None else self._sent  # what is not sent again must still be as it was sent
            if base is None and self._dequantiser is not None:
                self._dequantiser.forget()
            self._weights_epoch += 1

    async def apply_update(self, bucket: NamedTensors) -> None:
        self._weights.receive()
        with self._change():
            for name, weight in (weight for sent in bucket for weight in self._arrived(*sent)):
                held = self._held.get(name)
                if held is None:
                    raise EngineError(f"the model has no parameter {name} of its own")
                if held.shape != weight.shape:
                    raise EngineError(f"{name} was sent as {list(weight.shape)}; the model's is {list(held.shape)}")
                held.copy_(weight.detach())
                self._sent[name] = digest(weight.detach().to(held.dtype))

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._weights.check(version)
        try:
            compare(
                {**self._sent, **(checksums or {})},
                {name: digest(tensor) for name, tensor in self._held.items()},
            )
        except EngineError:
            self._weights.fail()
            raise
        with self._change():
            self._weights.confirm()

    async def abandon_update(self) -> None:
        with self._change():
            self._weights.fail()

    async def sleep(self) -> None:
        with self._change():
            self._weights.sleep()

    async def wake(self) -> None:
        self._weights.wake()

    async def health(self) -> None:
        if self._stopped:
            raise EngineError("the engine was stopped")

    async def stop(self) -> None:
        with self._change():
            self._weights.lose()
            self._stopped = True


class _DecodeBatch:
    """Rows computed together. `prefill` before the first `next_token` and whenever the weights have changed."""

    def __init__(
        self, model: Any, rows: list[_OpenResponse], params: SamplingParams, sight: Sight | None, recorder: RouteRecorder
    ) -> None:
        self.rows, self._sight, self._recorder = list(rows), sight, recorder
        self._model, self._params = model, params
        ends = model.generation_config.eos_token_id
        ends = {*params.stop_token_ids, *([] if ends is None else [ends] if isinstance(ends, int) else ends)}
        self._ends = set() if params.ignore_eos else ends
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Compute the caches of all rows from their tokens; equal token sequences are computed once."""
        device = self._model.device
        sequences: dict[tuple[Any, ...], int] = {}
        media = [row.seen.media if row.seen is not None else () for row in self.rows]
        keys = [(of_row, *row.prompt, *row.response) for row, of_row in zip(self.rows, media, strict=True)]
        where = [sequences.setdefault(key, len(sequences)) for key in keys]
        ids_of = [list(key[1:]) for key in sequences]
        longest = max(map(len, ids_of))
        ids = torch.tensor([[0] * (longest - len(s)) + s for s in ids_of], device=device)
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in ids_of], device=device)
        more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        if self._sight is not None:
            first = [self.rows[where.index(number)] for number in range(len(sequences))]
            prompts = [row.seen for row in first if row.seen is not None]
            given = self._sight.inputs(prompts, [len(row.response) for row in first])
            more = {name: value.to(device) for name, value in given.items()}
        output = self._computed(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **more)
        if (routes := self._recorder.take(len(ids_of))) is not None:
            for row, sequence in zip(self.rows, where, strict=True):
                row.routes = [routes[sequence, longest - len(ids_of[sequence]) :]]
        rows = torch.tensor(where, device=device)
        self._cache = output.past_key_values
        self._cache.reorder_cache(rows)  # batch_select_indices does the same, but not for layers with linear attention
        self._mask, self._logits = mask[rows], output.logits[rows, -1]

    @torch.inference_mode()
    def next_token(self, version: int) -> None:
        """Sample one token for every row, and compute what comes after it."""
        tokens, log_probs = _sample(self._logits.float(), self._params, [row.generator for row in self.rows])
        for row, token, log_prob in zip(self.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.response.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
            if token in self._ends:
                row.finish_reason = "stop"
            elif token in self._params.cut_token_ids or len(row.response) == self._params.max_new_tokens:
                row.finish_reason = "length"
        going_on = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if going_on and len(going_on) < len(self.rows):
            kept = torch.tensor(going_on, device=tokens.device)
            self._cache.reorder_cache(kept)
            self._mask, tokens = self._mask[kept], tokens[kept]
        self.rows = [self.rows[i] for i in going_on]
        if self.rows:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
            output = self._computed(
                input_ids=tokens[:, None],
                attention_mask=self._mask,
                position_ids=self._next_positions(),
                past_key_values=self._cache,
                use_cache=True,
            )
            self._logits = output.logits[:, -1]
            if (routes := self._recorder.take(len(self.rows))) is not None:
                for row, own in zip(self.rows, routes, strict=True):
                    row.routes.append(own)

    def _computed(self, **inputs: Any) -> Any:
        """What the model answers, its choices of experts taken down if they are asked for."""
        self._recorder.is_on = self._params.routes
        try:
            return self._model(**inputs)
        finally:
            self._recorder.is_on = False

    def _next_positions(self) -> torch.Tensor:
        """Those of the tokens that were sampled last: int64 `[B, 1]`, or `[3, B, 1]` of a model that sees."""
        if self._sight is None:
            return self._mask.sum(1, keepdim=True) - 1
        last = [row.seen.positions_with(len(row.response))[:, -1:] for row in self.rows if row.seen is not None]
        return torch.stack(last, dim=1).to(self._mask.device)


def _sample(
    logits: torch.Tensor, params: SamplingParams, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from float32 `logits` [B, V] with one generator per row; returns tokens [B] and their log-probs [B].

    Log-probs are those of the full distribution under the temperature; top-k, top-p and min-p only limit what is drawn.
    """
    if params.greedy:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    full = (logits / params.temperature).log_softmax(-1)
    probs = full.double().exp()
    if params.top_k > 0 or params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        if params.top_k > 0:
            ordered[:, params.top_k :] = 0
        # a token stays if those likelier than it do not reach top_p yet; so the likeliest always stays
        ordered[ordered.cumsum(-1) - ordered >= params.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(1, order, ordered)
    probs[probs < params.min_p * probs.amax(-1, keepdim=True)] = 0
    # inverse of the cumulative distribution: one number per row, so a row's draw does not depend on its batch
    cumulative = probs.cumsum(-1)
    drawn = torch.stack([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])
    drawn = drawn.to(logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, full.gather(1, tokens[:, None])[:, 0]


def _finished(row: _OpenResponse) -> Generation:
    assert row.finish_reason is not None, "a call returns when all of its rows have ended"
    routes = np.concatenate(row.routes) if row.routes else None
    return Generation(row.response, row.log_probs, row.versions, row.finish_reason, routes)


def _seed(seed: int, key: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}/{index}".encode()).digest()[:8], "big") >> 1
