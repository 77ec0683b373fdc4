"""Generation by the Hugging Face model inside this process: the engine for machines without SGLang, and its reference.

Seeded sampling: what a sample draws depends on the engine's seed, its key and its index alone, never on its batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.engine_kinds import EMBEDDED
from megarl.data.columns import concatenated
from megarl.data.media import Media
from megarl.data.stop_finder import ModelTexts, StopFinder
from megarl.errors import DeadlineError, EngineError
from megarl.models.adapters import AdapterSpec, adapter_part
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for, load_hf_config, sees
from megarl.models.transformers_names import config_in_transformers, hub_tensors, loader_of
from megarl.models.vision import Vision, vision_part
from megarl.models.weight_formats import tensors_of
from megarl.models.weight_tensors import gathered
from megarl.option_list import functions, part
from megarl.rollout.engines.drawing import random_numbers
from megarl.rollout.engines.embedded_batch import DecodeBatch, OpenResponse, Sight
from megarl.rollout.engines.embedded_positions import scale_by_position_ids
from megarl.rollout.engines.embedded_turns import TurnCache, refusal
from megarl.rollout.engines.protocol import Engine, EnginePlace, EngineRequest, Generation, SamplingParams, check_version
from megarl.system.hidden_bars import hide_bars
from megarl.weights.checksums import compare, digest
from megarl.weights.model_compatibility import ServedModel, check_same_model
from megarl.weights.plan import LOAD_BYTES
from megarl.weights.run_plan import sent_adapters
from megarl.weights.staging import NamedTensors
from megarl.weights.weight_state import WeightState

DRAFTS = "rollout.speculative.algorithm"


@dataclass(eq=False)
class _Call:
    """One call of `generate`. `cut` are the keys of prompts whose responses are to end with what they have."""

    request: EngineRequest
    rows: list[OpenResponse]
    begun_at: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    cut: set[str] = field(default_factory=set)

    @property
    def deadline(self) -> float:
        return self.begun_at + self.request.deadline_s


class EmbeddedEngine(Engine):
    """Batched generation with a KV cache, left padding and one prefill per prompt.

    `max_batch_samples` responses are computed at once; the rest wait. `initial_version` declares which version the weights
    in `model_path` are; None: none, weights must be sent first. `media_folder` has the pictures that prompts show.
    `turn_cache_bytes`: room for the keys and values of conversations between their turns (0: none are kept); with drafts,
    pictures or layers with linear attention none are kept.
    `updates_draft`: the weights of the layer for multi-token prediction that it drafts with come with every update.
    `lora`: updates are of these adapters alone, which are added to the weights of `model_path`. `changes` are made to the model
    when it has its first weights.

    With a `served_path` it begins with the weights of that folder, and takes weights as the folder stores them. If that is in
    few bits, it computes with the values that they stand for, in its own dtype: an engine's numbers, but for its kernels.
    """

    capabilities = EMBEDDED

    @classmethod
    def check(cls, config: Config, platform: str) -> None:
        for model_change in functions("embedded", "model_change"):
            model_change(config)
        if (drafts := config.rollout.drafts) is not None:
            part("prediction", "embedded", DRAFTS).check_drafts(drafts, config.model.path)
        if config.policy.has_adapters and not config.sends_adapters:
            adapter_part("updates").check_policy(config.policy, config.model.path)

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        # one seed for all: a response is the same whichever engine samples it
        media_folder = config.data.kept_in(config.run_folder)
        return {
            "dtype": config.model.dtype,
            "seed": config.run.seed,
            "media_folder": media_folder,
            "served_path": config.rollout.servers.model_path,
            "speculative": config.rollout.drafts,
            "updates_draft": config.syncs_prediction,
            "turn_cache_bytes": config.rollout.episode.turn_cache_bytes,
            "lora": sent_adapters(config),
            "changes": [of_run for change in functions("embedded", "model_change") if (of_run := change(config)) is not None],
        }

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
        speculative: Any = None,
        updates_draft: bool = False,
        turn_cache_bytes: int = 0,
        lora: AdapterSpec | None = None,
        changes: Sequence[Callable[[Any], None]] = (),
    ) -> None:
        self._model = _load(model_path, dtype, device)
        self._sight = _sight(model_path, media_folder)
        self._speculation: Any = None  # of the option prediction
        self._held = hub_tensors(self._model)
        if speculative is not None:
            drafting = part("prediction", "embedded", DRAFTS).Speculation
            self._speculation = drafting.of(speculative, model_path, self._model, lambda path: _load(path, dtype, device))
            self._held |= self._speculation.held if updates_draft else {}
        keeps_turns = bool(turn_cache_bytes) and self._speculation is None and refusal(self._model.config) is None
        self._turns = TurnCache(turn_cache_bytes) if keeps_turns else None
        self._recorders = [open_recorder(self._model) for open_recorder in functions("embedded", "open_recorder")]
        of_options = functions("embedded", "takes_no_padding")
        self._one_length = sum(takes_no_padding(self._model) for takes_no_padding in of_options) > 0
        self._serves = ServedModel(load_hf_config(served_path or model_path), dtype, predicts=updates_draft, lora=lora)
        self._adapters: Any = None
        if lora is not None:
            self._adapters = adapter_part("embedded").Adapters(self._serves, lora, self._held, self._model)
        if self._adapters is not None:
            self._held = self._adapters.tensors
        self._dequantiser: Any = None
        if served_path is not None:
            self._begin_with(HFFolder(served_path), ServedModel(load_hf_config(model_path), dtype, predicts=updates_draft))
        for change in changes:
            change(self._model)
        self._seed, self._max_batch_samples, self._texts = seed, max_batch_samples, ModelTexts(model_path)
        self._weights = WeightState(initial_version)
        self._sent: dict[str, str] = {}
        self._stopped = False
        self._calls = 0
        self._under_way: list[_Call] = []
        self._weights_epoch = 0  # caches made in an earlier epoch are stale
        self._wanting_turn = 0
        self._turn = threading.Condition()  # held for each token, and for each change to the weights

    def _begin_with(self, folder: HFFolder, model: ServedModel) -> None:
        """Take over the weights of another folder of the same model."""
        check_same_model(self._serves, model)
        if self._serves.format is not None:
            format, names = self._serves.format, self._serves.quantised
            self._dequantiser = tensors_of(format).Dequantiser(format, names.__contains__)
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
        complete = (name, tensor) if self._dequantiser is None else self._dequantiser.take(name, tensor)
        if complete is not None:
            yield complete

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    @property
    def served_model(self) -> ServedModel:
        return self._serves

    # generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        check_version(self.weight_version)
        prompts, n = request.prompts, request.n
        shown = request.media if request.media is not None else [()] * len(prompts)
        if self._sight is None and any(shown):
            raise EngineError("a prompt shows pictures, but the model takes none")
        self._calls += 1
        keys = request.keys or [f"call-{self._calls}-prompt-{i}" for i in range(len(prompts))]
        begun = request.begun if request.begun is not None else [[None] * n] * len(prompts)
        rows = [
            self._open(key, index, prompt, of_prompt, of_group[index])
            for prompt, key, of_prompt, of_group in zip(prompts, keys, shown, begun, strict=True)
            for index in range(n)
        ]
        if len(rows) == 1 and self._turns is not None and not request.params.extra:  # columns of what is kept are not known
            rows[0].conversation = request.conversation
        if texts := request.params.looked_for:
            decode = await asyncio.to_thread(self._texts.decode)
            for row in rows:
                row.finder = StopFinder(texts, decode)
                row.finder.first(row.response)
        call = _Call(request, rows, time.monotonic())
        self._under_way.append(call)
        work = asyncio.create_task(asyncio.to_thread(self._run, call))
        try:
            await asyncio.shield(work)
        except BaseException:
            call.cancelled.set()
            if not work.done():
                await asyncio.wait([work])
            raise
        finally:
            self._under_way.remove(call)
        generations = [_finished(row) for row in rows]
        return [generations[i : i + n] for i in range(0, len(rows), n)]

    def _open(
        self, key: str, index: int, prompt: Sequence[int], shown: Sequence[Media], begun: Generation | None
    ) -> OpenResponse:
        """Sample `index` to the prompt that is called `key`; one that is continued draws what it would have drawn uncut."""
        seen = self._sight.prompt(prompt, shown) if self._sight is not None else None
        had = len(begun.response_ids) if begun is not None else 0
        generator = torch.Generator().manual_seed(_seed(self._seed, key, index))
        if self._speculation is None:
            random_numbers([generator], had)
        elif had:  # how many numbers its passes drew is not known
            generator.manual_seed(_seed(self._seed, f"{key}/{had}", index))
        row = OpenResponse(list(prompt), generator, seen, key)
        if begun is not None:
            row.begin_with(begun)
        return row

    async def cut(self, keys: Sequence[str]) -> None:
        with self._change():
            for call in self._under_way:
                call.cut |= {*keys}

    async def end_conversations(self, names: Sequence[str]) -> None:
        with self._change():
            if self._turns is not None:
                self._turns.end(names)

    def _run(self, call: _Call) -> None:
        """Complete the rows of a call, `max_batch_samples` at a time."""
        rows = [row for row in call.rows if row.finish_reason is None]
        for together in self._parts(rows):
            batch = self._open_batch(together, call.request.params)
            epoch = -1
            while batch.rows:
                with self._turn:
                    self._wait_for_weights(call)
                    if call.cancelled.is_set():
                        return
                    if call.cut:
                        batch.abort(call.cut)
                        if not batch.rows:
                            break
                    if time.monotonic() > call.deadline:
                        done = sum(row.finish_reason is not None for row in call.rows)
                        raise DeadlineError(
                            f"generation was not complete after {call.request.deadline_s:.3g} s: "
                            f"{done} of {len(call.rows)} responses"
                        )
                    if epoch != self._weights_epoch:
                        epoch = self._weights_epoch
                        batch.prefill()
                    assert self.weight_version is not None  # _wait_for_weights saw to it
                    batch.next_tokens(self.weight_version)

    def _parts(self, rows: list[OpenResponse]) -> list[list[OpenResponse]]:
        """Rows that are computed together, in order; of models that take no padding those of one length."""
        groups: dict[int, list[OpenResponse]] = {}
        for row in rows:
            groups.setdefault(len(row.prompt) + len(row.response) if self._one_length else 0, []).append(row)
        size = self._max_batch_samples
        return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]

    def _open_batch(self, rows: list[OpenResponse], params: SamplingParams) -> DecodeBatch:
        if self._speculation is not None:
            batch: DecodeBatch = self._speculation.open_batch(self._model, rows, params, self._recorders)
            return batch
        return DecodeBatch(self._model, rows, params, self._sight, self._recorders, self._turns)

    def _wait_for_weights(self, call: _Call) -> None:
        """Wait while there are no weights, and let whoever wants to change something have its turn; `_turn` is held."""
        while self.weight_version is None or self._wanting_turn:
            if self._stopped:
                raise EngineError("the engine was stopped while it was generating")
            if call.cancelled.is_set() or call.cut or time.monotonic() > call.deadline:
                return
            self._turn.wait(timeout=max(0.001, min(1.0, call.deadline - time.monotonic())))

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
            # what is not sent again must still be as it was sent; adapters always are
            self._sent = {} if base is None or self._adapters is not None else self._sent
            if base is None and self._dequantiser is not None:
                self._dequantiser.forget()
            self._weights_epoch += 1
            self._forget_turns()

    async def apply_update(self, bucket: NamedTensors) -> None:
        self._weights.receive()
        with self._change():
            for name, weight in (weight for sent in bucket for weight in self._arrived(*sent)):
                parameter = self._held.get(name)
                if parameter is None:
                    raise EngineError(f"the model has no parameter {name} of its own")
                if parameter.shape != weight.shape:
                    raise EngineError(f"{name} was sent as {list(weight.shape)}; the model's is {list(parameter.shape)}")
                parameter.copy_(weight.detach())
                self._sent[name] = digest(weight.detach().to(parameter.dtype))

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
            if self._adapters is not None:
                self._adapters.add()
            self._weights.confirm()

    async def give_weights(self, version: int, start: int) -> tuple[int | None, Any]:
        with self._change():
            if self.weight_version != version or self._dequantiser is not None:
                raise EngineError(f"the engine has weights of version {self.weight_version}, and is to give those of {version}")
            tensors = [*self._held.items()][start:]
            load = next(gathered(tensors, LOAD_BYTES["cpu"], lambda named: named[1].nbytes))
            given = [(name, tensor.clone()) for name, tensor in load]
        return (start + len(load) if len(load) < len(tensors) else None), given

    async def abandon_update(self) -> None:
        with self._change():
            self._weights.fail()

    async def sleep(self) -> None:
        with self._change():
            self._weights.sleep()
            self._forget_turns()

    async def wake(self) -> None:
        self._weights.wake()

    async def health(self) -> None:
        if self._stopped:
            raise EngineError("the engine was stopped")

    async def stop(self) -> None:
        with self._change():
            self._weights.lose()
            self._stopped = True
            self._forget_turns()

    def _forget_turns(self) -> None:
        if self._turns is not None:
            self._turns.clear()


def _finished(row: OpenResponse) -> Generation:
    assert row.finish_reason is not None, "a call returns when all of its rows have ended"
    extra = row.extra | {name: concatenated(name, pieces) for name, pieces in row.pieces.items()}
    return Generation(row.response, row.log_probs, row.versions, row.finish_reason, extra, row.prefill)


def _sight(folder: str | Path, media_folder: Path | None) -> Sight | None:
    """The inputs for pictures of the model in `folder`; None: it does not see."""
    vision = _vision(folder)
    return vision_part("embedded").PictureInputs(vision, folder, media_folder) if vision is not None else None


def _vision(folder: str | Path) -> Vision | None:
    config = load_hf_config(folder)
    return architecture_for(config).vision(config)


def _load(folder: str | Path, dtype: str, device: str) -> Any:
    """The transformers model of a folder, whose own code is never run; raises EngineError if it cannot be loaded."""
    hide_bars()
    vision = _vision(folder) if sees(folder) else None
    try:
        config = config_in_transformers(folder)
        model = loader_of(folder)(folder, config=config, dtype=getattr(torch, dtype), trust_remote_code=False)
        scale_by_position_ids(model)
        if vision is not None:
            vision_part("hub_layout").hold_as_on_the_hub(model, vision)
        return model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} cannot be loaded as a Hugging Face model: {error}") from error


def _seed(seed: int, key: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}/{index}".encode()).digest()[:8], "big") >> 1
