"""The engine protocol on an SGLang server: token ids in, token ids, log-probs and weight versions out.

The driver owns the server through this class; the processes that hold weights send them with `sglang_senders`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import torch

from megarl.errors import DeadlineError, EngineError
from megarl.reshard.pieces import Held
from megarl.reshard.run_plan import engine_target
from megarl.rollout.checksums import UNCHECKED, EngineLayout, compare
from megarl.rollout.engine import Bucket, Generation, Progress, SamplingParams, check_request
from megarl.rollout.payload import SLICED, serialize, sharing_by_file
from megarl.rollout.sglang_senders import Endpoint, TensorSender
from megarl.rollout.sglang_server import ServerOptions, SglangServer
from megarl.rollout.slice_loader import answer_bytes, checking, read_answer
from megarl.rollout.weight_state import WeightState

MAX_IN_FLIGHT = 512  # requests on the wire at once; the server queues beyond max_running_requests itself
CONTROL_TIMEOUT_S = 300.0
DYING_S = 2.0
POLL_S = 0.05
ABORT_REPEAT_S = 1.0  # an abort that overtook its request is sent again after this
ABORT_GRACE_S = 10.0  # how long a server that samples has to return what an aborted response got so far


class SglangEngine:
    """An SGLang server and its client. Made by `await SglangEngine.start(options)`.

    `initial_version` declares which version the weights in `model_path` are; None: none, weights must be sent first.
    """

    def __init__(self, server: SglangServer, layout: EngineLayout, initial_version: int | None = None) -> None:
        self.server = server
        self.endpoint = Endpoint(server.url, layout, server.token)
        self._weights = WeightState(initial_version)
        self._paused = False
        self._session_open = False
        self._sender = TensorSender(self.endpoint)
        self._rounds: set[_Round] = set()
        self._request_ids = (f"{os.getpid():x}-{i:08x}" for i in itertools.count())

    @classmethod
    async def start(cls, options: ServerOptions, initial_version: int | None = None) -> SglangEngine:
        """Start a server and return its engine; see `EngineLayout.of_model` and `SglangServer.start` for what is raised."""
        target = engine_target(options.tp, options.extra)
        model_path = options.extra.get("model_path", options.model_path)
        layout = EngineLayout.of_model(model_path, options.dtype, options.tp, options.device, target)
        server = SglangServer(options)
        await asyncio.to_thread(server.start)
        try:
            engine = cls(server, layout, initial_version)
            if initial_version is not None:
                async with engine._session(CONTROL_TIMEOUT_S) as session:
                    await engine._set_server_version(session, initial_version)
        except BaseException:
            await asyncio.to_thread(server.stop)
            raise
        return engine

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    # generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        keys: Sequence[str] | None = None,
        on_progress: Progress | None = None,
        deadline_s: float = 1800.0,
    ) -> list[list[Generation]]:
        version = check_request(prompts, n, keys, self.weight_version)
        ids = [[next(self._request_ids) for _ in range(n)] for _ in prompts]
        async with self._session(None) as session:
            round_ = _Round(session, _sampling(params), version, on_progress)
            self._rounds.add(round_)
            work = asyncio.gather(*(self._group(round_, list(p), group) for p, group in zip(prompts, ids, strict=True)))
            try:
                return await asyncio.wait_for(work, deadline_s)
            except BaseException as error:
                await asyncio.shield(self._abort(itertools.chain.from_iterable(ids)))
                if isinstance(error, TimeoutError):
                    raise DeadlineError(
                        f"generation was not complete after {deadline_s:g} s: {round_.samples} of {len(prompts) * n} "
                        f"responses had come from {self.server.url}"
                    ) from error
                raise
            finally:
                self._rounds.discard(round_)

    async def _group(self, round_: _Round, prompt: list[int], ids: Sequence[str]) -> list[Generation]:
        """All samples of one prompt. The prompt is prefilled once; the samples find it in the radix cache."""
        if len(ids) > 1:
            warm_up = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "rid": f"{ids[0]}-prefix"}
            await self._unless_aborted(round_, warm_up)
        return list(await asyncio.gather(*(self._sample(round_, prompt, rid) for rid in ids)))

    async def _sample(self, round_: _Round, prompt: list[int], rid: str) -> Generation:
        body = {"input_ids": prompt, "sampling_params": round_.sampling, "rid": rid, "return_logprob": True}
        answer = await self._unless_aborted(round_, body)
        generation = Generation([], [], [], "abort") if answer is None else _generation(answer, round_.version, self.server.url)
        round_.add(generation)
        return generation

    async def _unless_aborted(self, round_: _Round, body: dict[str, Any]) -> Any:
        """The server's answer; None if the round was aborted and the server has nothing to say about this request.

        An abort that overtakes a request on its way to the server would leave it running, so it is repeated. A paused
        server takes in no requests and so never answers for those it has not yet taken in.
        """
        if round_.aborted.is_set():
            return None
        posting = asyncio.ensure_future(self._post(round_.session, "generate", body))
        aborted = asyncio.ensure_future(round_.aborted.wait())
        try:
            await asyncio.wait({posting, aborted}, return_when=asyncio.FIRST_COMPLETED)
            for grace_s in (ABORT_REPEAT_S, ABORT_GRACE_S - ABORT_REPEAT_S):
                if posting.done():
                    break
                await asyncio.wait({posting}, timeout=grace_s)
                if not posting.done():
                    await self._abort([body["rid"]])
                if self._paused or self.weight_version is None:
                    break
            return posting.result() if posting.done() else None
        finally:
            aborted.cancel()
            posting.cancel()

    async def _abort(self, ids: Any) -> None:
        """Stop the server's work on requests that nobody waits for any more; a dead server has stopped already."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with self._session(10.0) as session:
                await asyncio.gather(*(self._post(session, "abort_request", {"rid": rid}) for rid in ids))

    async def abort_all(self) -> None:
        for round_ in list(self._rounds):
            round_.loop.call_soon_threadsafe(round_.aborted.set)
        await self._control("abort_request", {"abort_all": True})

    async def pause(self) -> None:
        # retract: caches are recomputed, under the weights then current, when sampling continues
        await self._control("pause_generation", {"mode": "retract"})
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        if self.weight_version is not None:  # else the update that gives it one continues
            await self._control("continue_generation", {})

    # weights ------------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._weights.begin(version, base)
        self._sender = TensorSender(self.endpoint)
        with self._failing():
            async with self._session(CONTROL_TIMEOUT_S) as session:
                await self._post(session, "pause_generation", {"mode": "retract"})
                if self._session_open:  # left by an update that failed
                    await self._post(session, "end_weight_update", {})
                await self._post(session, "begin_weight_update", {})
                self._session_open = True

    async def apply_update(self, bucket: Bucket) -> None:
        self._weights.receive()
        await asyncio.to_thread(self._sender.send, bucket)

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._weights.check(version)
        with self._failing():
            sent: dict[Held, str] = {**self._sender.checksums(), **(checksums or {})}
            missing: dict[Held, str] = dict.fromkeys(self.endpoint.layout.missing(sent), UNCHECKED)
            async with self._session(CONTROL_TIMEOUT_S) as session:
                held = dict.fromkeys(sent, UNCHECKED) if missing else await self._held(session, sent)
                compare(sent, held | missing)
                await self._post(session, "end_weight_update", {})
                self._session_open = False
                await self._serve(session, version)

    async def _serve(self, session: aiohttp.ClientSession, version: int) -> None:
        """Answer under the weights of `version` from now on: they are all there."""
        await self._post(session, "flush_cache", {})
        await self._set_server_version(session, version)
        self._weights.confirm()
        if not self._paused:
            await self._post(session, "continue_generation", {})

    async def abandon_update(self) -> None:
        # the server's own session stays open, and sampling paused, until the next update
        self._weights.fail()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever is raised inside leaves the engine without weights of a known version."""
        try:
            yield
        except BaseException:
            self._weights.lose()
            raise

    async def _held(self, session: aiohttp.ClientSession, sent: Mapping[Held, str]) -> dict[Held, str]:
        """The digests of what was sent as the server's ranks read them back from their parameters.

        Where no digest was taken the server is not asked.

        Raises:
            EngineError: a rank has a parameter of which something was not sent.
        """
        held = dict.fromkeys(sent, UNCHECKED)
        ranks = [[box for box, value in sent.items() if value != UNCHECKED and box.engine_rank == rank] for rank in self._ranks]
        if not any(ranks):
            return held
        answers = [torch.zeros(answer_bytes(len(boxes)), dtype=torch.uint8) for boxes in ranks]
        with sharing_by_file():
            for answer in answers:
                answer.share_memory_()
        payloads = [serialize(checking(*of_rank), has_cuda=False) for of_rank in zip(ranks, answers, strict=True)]
        body = {"serialized_named_tensors": payloads, "load_format": SLICED, "flush_cache": False}
        await self._post(session, "update_weights_from_tensor", body)
        for rank, boxes in enumerate(ranks):
            digests, uncovered = read_answer(answers[rank])
            if uncovered:
                raise EngineError(f"weight update failed its check: nothing fills {', '.join(uncovered[:3])} of rank {rank}")
            held |= zip(boxes, digests, strict=True)
        return held

    @property
    def _ranks(self) -> range:
        return range(self.endpoint.layout.target.ranks)

    async def _set_server_version(self, session: aiohttp.ClientSession, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post(session, "update_weight_version", body)

    async def sleep(self) -> None:
        self._weights.sleep()
        await self._control("abort_request", {"abort_all": True})
        await self._idle()  # a server ends if it is asked to give up memory that it works with
        await self._control("release_memory_occupation", {})

    async def wake(self) -> None:
        self._weights.wake()
        await self._control("resume_memory_occupation", {})

    async def _idle(self) -> None:
        """Wait until the server has nothing to do; only then it flushes its cache."""
        deadline = asyncio.get_running_loop().time() + ABORT_GRACE_S
        while True:
            try:
                await self._control("flush_cache", {})
                return
            except EngineError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(POLL_S)

    # the process --------------------------------------------------------------------------------------------------

    async def health(self) -> None:
        if not self.server.alive:
            raise EngineError(self.server.obituary())
        async with self._session(10.0) as session:
            await self._request(session, "GET", "health", None)

    async def restart(self) -> None:
        """Start the server anew on a fresh port; the weights then have no known version."""
        await self.stop()
        await asyncio.to_thread(self.server.start)
        self.__init__(self.server, self.endpoint.layout)  # type: ignore[misc]

    async def stop(self) -> None:
        self._weights.lose()
        await asyncio.to_thread(self.server.stop)

    # transport ----------------------------------------------------------------------------------------------------

    def _session(self, timeout_s: float | None) -> aiohttp.ClientSession:
        """A session of its own for each operation, so that an engine may be used from any event loop."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_IN_FLIGHT),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers=self.server.headers,
        )

    async def _control(self, endpoint: str, body: dict[str, Any]) -> Any:
        async with self._session(CONTROL_TIMEOUT_S) as session:
            return await self._post(session, endpoint, body)

    async def _post(self, session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Any:
        return await self._request(session, "POST", endpoint, body)

    async def _request(self, session: aiohttp.ClientSession, method: str, endpoint: str, body: dict[str, Any] | None) -> Any:
        url = f"{self.server.url}/{endpoint}"
        try:
            async with session.request(method, url, json=body) as response:
                if response.status != 200:
                    raise EngineError(f"{url} answered {response.status}: {(await response.text())[:1000]}")
                if response.content_type == "application/json":
                    return await response.json()
                return await response.text()
        except aiohttp.ClientError as error:
            why = f"; {self.server.obituary()}" if await self._ended() else ""
            raise EngineError(f"{url} did not answer: {error}{why}") from error
        except TimeoutError as error:
            raise EngineError(f"{url} did not answer in time") from error

    async def _ended(self) -> bool:
        """Whether the server's process is gone; its connections break a moment before it is."""
        deadline = asyncio.get_running_loop().time() + DYING_S
        while self.server.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        return not self.server.alive


class _Round:
    """One call of `generate`: what its requests have in common, and how far it is."""

    def __init__(
        self, session: aiohttp.ClientSession, sampling: dict[str, Any], version: int, on_progress: Progress | None
    ) -> None:
        self.session, self.sampling, self.version = session, sampling, version
        self.loop, self.aborted = asyncio.get_running_loop(), asyncio.Event()
        self.samples = self.tokens = 0
        self._on_progress = on_progress

    def add(self, generation: Generation) -> None:
        """Count a finished sample and tell the caller."""
        self.samples += 1
        self.tokens += len(generation.response_ids)
        if self._on_progress is not None:
            self._on_progress(self.samples, self.tokens)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """`params` in SGLang's names."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
    }


def _generation(answer: Mapping[str, Any], version: int, url: str) -> Generation:
    """SGLang's answer to one request as a Generation; `version` is that of the tokens it names none for."""
    try:
        info = answer["meta_info"]
        ids = [int(token) for token in answer["output_ids"]]
        log_probs = [float(entry[0]) for entry in info["output_token_logprobs"]][: len(ids)]
        versions = [version] * len(ids)
        for start, end, name in _version_spans(info.get("weight_versions")):
            versions[start:end] = [int(name)] * (min(end, len(ids)) - start)
        reason = info["finish_reason"]["type"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{url}/generate answered something that is no generation: {str(answer)[:500]}") from error
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{url}/generate ended a response with the unknown reason {reason!r}")
    return Generation(ids, log_probs, versions, reason)


def _version_spans(spans: Any) -> list[tuple[int, int, str]]:
    return [(int(span["start"]), int(span["end"]), span["version"]) for span in spans or []]
