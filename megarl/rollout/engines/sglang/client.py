"""HTTP to one SGLang server: requests for responses, and the calls that pause it, name its weights and let it go on.

Knows no weights and starts no server; `engine.py` and `external.py` own one client each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from megarl.data.prefills import NO_PREFILLS, PrefillCounts
from megarl.errors import DeadlineError, EngineError
from megarl.rollout.engines.capacity import EndedResponses, EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams, behind
from megarl.rollout.engines.sglang.answered import AnsweredColumn
from megarl.rollout.engines.sglang.asked_prompt import AskedPrompt
from megarl.rollout.engines.sglang.text_stops import asked
from megarl.system.http_requests import MAX_ANSWER_BYTES, AnswerError, parsed, read_unpacked

MAX_IN_FLIGHT = 512  # requests on the wire at once; the server queues beyond max_running_requests itself
CONTROL_TIMEOUT_S = 300.0
MAX_GENERATION_BYTES = 1 << 30
"""The longest answer to a request for a response: log-probs and columns of each of its tokens."""
DYING_S = 2.0
POLL_S = 0.05
BAD_REQUEST = 400
IDLE_S = 10.0  # how long a server has to end what was aborted


class AskedServer(Protocol):
    """Questions of a client of the process behind its server."""

    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def alive(self) -> bool: ...

    def exit_report(self) -> str:
        """Describe its end, for error messages."""


class SglangClient:
    """One server as an engine asks it. Every method raises EngineError if the server does not answer, or refuses."""

    def __init__(
        self,
        server: AskedServer,
        columns: Sequence[AnsweredColumn] = (),
        media_folder: Path | None = None,
        tokenizer_folder: str | None = None,
    ) -> None:
        """`columns`: those of options that the server answers. `tokenizer_folder`: that of a server that ends responses at stop
        texts (`text_stops.py`); None: it knows no text. `media_folder` has the pictures that prompts show; the
        server must see it, too.
        """
        self.server, self.columns, self.media_folder = server, columns, media_folder
        self._request_ids = (f"{os.getpid():x}-{i:08x}" for i in itertools.count())
        self._under_way: dict[str, str] = {}  # keys of prompts by request
        self.ended = EndedResponses()
        self.tokenizer_folder = tokenizer_folder

    async def generate(self, request: EngineRequest, version: int) -> list[list[Generation]]:
        """`Engine.generate`; `version` is that of tokens for which the server names none."""
        shown = request.media if request.media is not None else [()] * len(request.prompts)
        prompts = [AskedPrompt.seeing(*both, self.media_folder) for both in zip(request.prompts, shown, strict=True)]
        ids = [[next(self._request_ids) for _ in range(request.n)] for _ in prompts]
        begun = request.begun or [[None] * request.n for _ in prompts]
        under_way = {rid: key for key, group in zip(request.keys or (), ids, strict=False) for rid in group}
        self._under_way |= under_way
        async with self._session(None) as session:
            call = GenerateCall(session, request.params, version, has_groups=request.n > 1)
            groups = zip(prompts, ids, begun, strict=True)
            work = asyncio.gather(*(self._group(call, prompt, group, of_group) for prompt, group, of_group in groups))
            try:
                return await asyncio.wait_for(work, request.deadline_s)
            except BaseException as error:
                await asyncio.shield(self._abort(itertools.chain.from_iterable(ids)))
                if isinstance(error, TimeoutError):
                    raise DeadlineError(
                        f"generation was not complete after {request.deadline_s:g} s: {call.answered} of "
                        f"{len(prompts) * request.n} responses had come from {self.server.url}"
                    ) from error
                raise
            finally:
                for rid in under_way:
                    del self._under_way[rid]
                self.ended.forget(under_way.values())

    async def cut(self, keys: Sequence[str]) -> None:
        """`Engine.cut`."""
        chosen = {*keys}
        await self._abort([rid for rid, key in self._under_way.items() if key in chosen])

    async def _group(
        self, call: GenerateCall, prompt: AskedPrompt, ids: Sequence[str], begun: Sequence[Generation | None]
    ) -> list[Generation]:
        """All samples of one prompt. The prompt is prefilled once; the samples find it in the radix cache."""
        begun_by_id = {rid: generation for rid, generation in zip(ids, begun, strict=True) if generation is not None}
        prefill = NO_PREFILLS
        if sum(rid not in begun_by_id or begun_by_id[rid].finish_reason == "abort" for rid in ids) > 1:
            warm_up = {"sampling_params": {"max_new_tokens": 0}, "rid": f"{ids[0]}-prefix"}
            answer = await self._ask(call.session, prompt.body | warm_up)
            prefill = _prefill(answer, prompt)
        samples = await asyncio.gather(*(self._sample(call, prompt, rid, begun_by_id.get(rid)) for rid in ids))
        first = replace(samples[0], prefill=samples[0].prefill + prefill)
        return [first, *samples[1:]]

    async def _sample(self, call: GenerateCall, prompt: AskedPrompt, rid: str, begun: Generation | None) -> Generation:
        if begun is not None and begun.finish_reason != "abort":
            return begun
        generation = await self._response(call, prompt, rid, begun)
        call.answered += 1
        if call.has_groups and rid in self._under_way:
            self.ended.note(self._under_way[rid])
        return generation

    async def _response(
        self, call: GenerateCall, prompt: AskedPrompt, rid: str, begun: Generation | None, most: int | None = None
    ) -> Generation:
        """The response that goes on from `begun`, with at most `most` tokens more (None: as many as there may be)."""
        had = len(begun.response_ids) if begun is not None else 0
        full_prompt = prompt.followed_by(begun.response_ids) if begun is not None else prompt
        room = call.params.max_new_tokens - had
        sampling = call.sampling | {"max_new_tokens": room if most is None else min(most, room)}
        if self.tokenizer_folder is not None:
            sampling |= asked(call.params.looked_for, self.tokenizer_folder, had)
        body = full_prompt.body | {"sampling_params": sampling, "rid": rid, "return_logprob": True}
        columns = [column for column in self.columns if not column.body or column.name in call.params.extra]
        for column in columns:
            body |= column.body
        answer = await self._ask(call.session, body)
        full_prompt.check(answer, self.server.url)
        generation = _generation(answer, call, self.server.url)
        tokens = len(full_prompt.ids) + len(generation.response_ids) - 1
        values = {column.name: column.read(answer, tokens, self.server.url) for column in columns}
        extra = {name: value for name, value in values.items() if value is not None}
        generation = replace(generation, extra=extra, prefill=_prefill(answer, full_prompt))
        return generation if begun is None else behind(begun, generation)

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        return json_object(await self._post(session, "generate", body), f"{self.server.url}/generate")

    async def _abort(self, ids: Any) -> None:
        """Stop the server's work on requests that nobody waits for any more; a dead server has stopped already."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with self._session(10.0) as session:
                await asyncio.gather(*(self._post(session, "abort_request", {"rid": rid}) for rid in ids))

    # control ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop sampling; responses under way wait for `resume`."""
        await self.control("pause_generation", {"mode": "retract"})

    async def take_version(self, version: int) -> None:
        """Drop what was cached under the weights until now, and have tokens carry `version`."""
        await asyncio.gather(self.control("flush_cache", {}), self.name_weights(version))

    async def name_weights(self, version: int) -> None:
        """Have tokens carry `version`."""
        await self.control("update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def capacity(self) -> EngineCapacity:
        """Room of the server, all of its data-parallel ranks together; nothing is said of what it does not tell."""
        async with self._session(CONTROL_TIMEOUT_S) as session:
            facts = await self._request(session, "GET", "server_info", None)
        states = facts.get("internal_states") if isinstance(facts, dict) else None
        ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
        most = [n for state in ranks if isinstance(n := state.get("effective_max_running_requests_per_dp"), int)]
        tokens = facts.get("max_total_num_tokens") if ranks else None
        return EngineCapacity(sum(most) or None, tokens * len(ranks) if isinstance(tokens, int) and tokens else None)

    async def resume(self) -> None:
        """Sample again."""
        await self.control("continue_generation", {})

    async def abort_all(self) -> None:
        """Give up all requests."""
        await self.control("abort_request", {"abort_all": True})

    async def wait_until_idle(self) -> None:
        """Wait until the server has nothing to do; only then it flushes its cache."""
        deadline = asyncio.get_running_loop().time() + IDLE_S
        while True:
            try:
                await self.control("flush_cache", {})
                return
            except EngineError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(POLL_S)

    async def health(self) -> None:
        """Return if the server is able to answer."""
        if not self.server.alive:
            raise EngineError(self.server.exit_report())
        async with self._session(10.0) as session:
            await self._request(session, "GET", "health", None)

    # transport ----------------------------------------------------------------------------------------------------

    def _session(self, timeout_s: float | None) -> aiohttp.ClientSession:
        """A session for one operation: the client may be used from any event loop."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_IN_FLIGHT),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers=self.server.headers,
        )

    async def control(self, endpoint: str, body: dict[str, Any], timeout_s: float | None = CONTROL_TIMEOUT_S) -> Any:
        """The server's answer to one POST that is not a generation, within `timeout_s` seconds (None: whenever it comes)."""
        async with self._session(timeout_s) as session:
            return await self._post(session, endpoint, body)

    async def _post(self, session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Any:
        return await self._request(session, "POST", endpoint, body)

    async def _request(self, session: aiohttp.ClientSession, method: str, endpoint: str, body: dict[str, Any] | None) -> Any:
        url = f"{self.server.url}/{endpoint}"
        try:
            async with session.request(method, url, json=body, allow_redirects=False) as response:
                is_asked_much = endpoint == "generate" and response.status == 200
                answer = await read_unpacked(response, MAX_GENERATION_BYTES if is_asked_much else MAX_ANSWER_BYTES)
            if response.status != 200:
                refused = BadRequest if response.status == BAD_REQUEST else EngineError
                raise refused(f"{url} answered {response.status}: {answer[:1000].decode(errors='replace')}")
            return parsed(answer) if response.content_type == "application/json" else answer.decode(errors="replace")
        except AnswerError as error:
            raise EngineError(f"{url} {error}") from None
        except aiohttp.ClientError as error:
            why = f"; {self.server.exit_report()}" if await self._ended() else ""
            raise EngineError(f"{url} did not answer: {error}{why}") from error
        except TimeoutError as error:
            raise EngineError(f"{url} did not answer in time") from error

    async def _ended(self) -> bool:
        """Return whether the server's process is gone; its connections break a moment before it is."""
        deadline = asyncio.get_running_loop().time() + DYING_S
        while self.server.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        return not self.server.alive


class BadRequest(EngineError):
    """The server would not take a request."""


class GenerateCall:
    """One call of `generate`: what its requests have in common, and how many have been answered."""

    def __init__(self, session: aiohttp.ClientSession, params: SamplingParams, version: int, *, has_groups: bool) -> None:
        """`version` is that of tokens for which the server names none. `has_groups`: a prompt has several responses."""
        self.session, self.sampling, self.version = session, _sampling(params), version
        self.params = params
        self.answered, self.has_groups = 0, has_groups


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """`params` in SGLang's names."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "stop_token_ids": [*params.stop_token_ids, *params.cut_token_ids],
        "ignore_eos": params.ignore_eos,
    }


def json_object(answer: Any, url: str) -> dict[str, Any]:
    """`answer` of `url`, if it is a JSON object."""
    if not isinstance(answer, dict):
        raise EngineError(f"{url} answered something that is no JSON object: {str(answer)[:500]}")
    return answer


def _generation(answer: Mapping[str, Any], call: GenerateCall, url: str) -> Generation:
    """SGLang's answer to one request as a Generation."""
    try:
        info = answer["meta_info"]
        ids = [int(token) for token in answer["output_ids"]]
        log_probs = [float(entry[0]) for entry in info["output_token_logprobs"]][: len(ids)]
        versions = [call.version] * len(ids)
        for span in info.get("weight_versions") or ():
            start, end = int(span["start"]), int(span["end"])
            versions[start:end] = [int(span["version"])] * (min(end, len(ids)) - start)
        reason = info["finish_reason"]["type"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{url}/generate answered something that is no generation: {str(answer)[:500]}") from error
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{url}/generate ended a response with the unknown reason {reason!r}")
    if reason == "abort":  # the pass that ends it samples a last token, which may be an end token that nobody looked at
        ids, log_probs, versions = ids[:-1], log_probs[:-1], versions[:-1]
    is_cut = reason == "stop" and ids[-1:] and ids[-1] in call.params.cut_token_ids
    return Generation(ids, log_probs, versions, "length" if is_cut else reason)


def _prefill(answer: Mapping[str, Any], asked: AskedPrompt) -> PrefillCounts:
    """Count the part of `asked` that the server says it had; nothing of a request that it never began."""
    info = answer.get("meta_info")
    cached = info.get("cached_tokens") if isinstance(info, dict) else None
    return PrefillCounts(len(asked.ids), cached) if isinstance(cached, int) else NO_PREFILLS
