"""The engine protocol on an SGLang server: token ids in, token ids, log-probs and weight versions out.

The driver owns the server through this class; the processes that hold weights send them with `sglang_senders`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed import TCPStore

from megarl.config import Config
from megarl.config.engine_kinds import SGLANG
from megarl.errors import ConfigError, EngineError
from megarl.models.adapters import adapter_part
from megarl.models.registry import load_hf_config
from megarl.models.weight_formats import engine_format
from megarl.option_list import functions, part
from megarl.rollout.engines.protocol import EnginePlace, EngineRequest, Generation
from megarl.rollout.engines.sglang.answered import answered_columns
from megarl.rollout.engines.sglang.arguments import check_engine_args
from megarl.rollout.engines.sglang.served import ServedEngine
from megarl.rollout.engines.sglang.server import NodeProcess, OtherNode, ServerOptions, SglangServer, compute_capability
from megarl.rollout.engines.sglang.server_process import host
from megarl.weights.checksums import UNCHECKED, EngineLayout, check_model, compare
from megarl.weights.digests import SentDigests, coverage_by_rank
from megarl.weights.intake import OPEN, Intake
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.payloads import SELECTORS, checking, read_answer, summing, taking
from megarl.weights.rank_plan import SliceKey
from megarl.weights.run_plan import engine_target, sent_adapters
from megarl.weights.sglang_senders import ServerEndpoint, TensorSender, update_request
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.staging import NamedTensors, serialize

MORE_TOKENS = 1024
"""Room in a CPU server's cache beside that for the responses of a step."""
FEWEST_REQUESTS = 64
LOOK_S = 0.2
IDLE_S = 3600.0
"""After so many seconds without a message a rank leaves an update that its owner has not ended."""
OF_WEIGHTS, OF_CACHE = "weights", ["kv_cache", "cuda_graph"]
"""SGLang's names of the memory that a sleeping server gives up, and takes again in this order."""


def _few_bits_served() -> ModuleType:
    return part("few_bits", "sglang", "rollout.servers.model_path")


def _refuse_uncovered(rank: int, uncovered: Sequence[str]) -> None:
    if uncovered:
        raise EngineError(f"weight update failed its check: nothing fills {', '.join(uncovered[:3])} of rank {rank}")


async def _start(server: SglangServer) -> None:
    """Start a server; it is ended if this is cancelled, as the thread in which it is started goes on."""
    starting = asyncio.get_running_loop().run_in_executor(None, server.start)
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(_end_start(server, starting))
        raise


async def _end_start(server: SglangServer, starting: asyncio.Future[None]) -> None:
    while not starting.done():
        await asyncio.to_thread(server.stop)  # has its start fail, unless that has no process so far
        await asyncio.wait([starting], timeout=LOOK_S)
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.to_thread(server.stop)


class SglangEngine(ServedEngine):
    """An SGLang server of this run's own and its client. Made by `await SglangEngine.start(...)`, or `open`."""

    capabilities = SGLANG

    @classmethod
    def check(cls, config: Config, platform: str) -> None:
        check_engine_args(config.rollout.engine_args)
        check_model(config.model.path, config.rollout.tp, platform)
        if config.rollout.delta_every and (served := config.rollout.servers.model_path) is not None:
            format = engine_format(load_hf_config(served))
            if format is not None:
                _few_bits_served().check_delta(format, config.rollout)
        for check_servers in functions("sglang", "check_servers"):
            check_servers(config, platform)
        if (lora := sent_adapters(config)) is not None:
            adapter_part("sglang").check_adapters(config, lora, platform)
        if config.rollout.weight_transport == "rdma":
            part("transports", "checks", "rollout.weight_transport").check_nixl()
        by_group = config.rollout.weight_transport == "process_group"
        if platform == "cuda" and by_group and config.resources.placement == "colocated":
            reason = "NCCL cannot use between two processes on one GPU (resources.placement is 'colocated')"
            raise ConfigError.of("rollout.weight_transport", "process_group", reason, allowed="'shared_memory'")

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        """The fields of `ServerOptions`. A CPU server's cache is made for the responses that the engine gets of a step."""
        rollout = config.rollout
        port, served = rollout.servers.port, rollout.servers.model_path
        requests = rollout.groups_per_engine * rollout.samples_per_prompt
        tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
        on_cpu, threads = place.platform == "cpu", max(1, place.threads // rollout.tp)
        extra: dict[str, Any] = {}
        for server_arguments in functions("sglang", "server_arguments"):
            extra |= server_arguments(config, served or str(Path(config.model.path).resolve()))
        extra |= rollout.engine_args if served is None else {**rollout.engine_args, "model_path": served}
        return {
            "log_file": place.log_folder / f"engine-{place.number}.log",
            "device": place.platform,
            "dtype": config.model.dtype,
            "tp": rollout.tp,
            "gpus": place.gpus,
            "other_nodes": place.other_nodes,
            "beside_bytes": place.beside_bytes,
            "threads": threads,
            "first_core": place.number * rollout.tp * threads,
            "port": port + place.number if port is not None else None,
            "max_total_tokens": requests * tokens + MORE_TOKENS if on_cpu else None,
            "max_running_requests": max(requests, FEWEST_REQUESTS) if on_cpu else None,
            "extra": extra,
            "start_timeout_s": config.resources.deadlines.start_s,
            "media_folder": config.data.kept_in(config.run_folder),
            "updates_draft": config.syncs_prediction,
            "lora": sent_adapters(config),
        }

    @classmethod
    async def start(
        cls, model_path: str, *, initial_version: int | None = None, nodes: Sequence[OtherNode] = (), **options: Any
    ) -> SglangEngine:
        return await cls.open(ServerOptions(model_path, **options), initial_version, nodes)

    @classmethod
    def start_on_node(cls, options: ServerOptions) -> NodeProcess:
        return NodeProcess(options)

    @classmethod
    async def open(
        cls, options: ServerOptions, initial_version: int | None = None, nodes: Sequence[OtherNode] = ()
    ) -> SglangEngine:
        """Start a server and return its engine; see `EngineLayout.of_model` and `SglangServer.start` for what is raised."""
        target = engine_target(options.tp, options.extra)
        model_path = options.extra.get("model_path", options.model_path)
        layout = EngineLayout.of_model(
            model_path, options.dtype, options.tp, options.device, target, predicts=options.updates_draft, lora=options.lora
        )
        of_adapters: Mapping[str, Any] = {}
        if options.lora is not None:
            of_adapters = adapter_part("sglang").adapter_arguments(options.lora, model_path, options.device)
        if options.device == "cuda" and (format := layout.model.format) is not None:
            here = compute_capability()
            _few_bits_served().check_weight_layout(format, options.extra, here, has_experts=layout.model.has_experts)
        server = SglangServer(replace(options, extra={**layout.server_arguments, **of_adapters, **options.extra}), nodes)
        await _start(server)
        try:
            # the engine's ranks and its senders may be on other machines
            engine = cls(server, layout, initial_version, TCPStore(host(), 0, is_master=True, wait_for_workers=False))
            if options.lora is not None:
                body = adapter_part("adapter_place").making_place(options.lora, layout.target.ranks, serialize({}))
                await adapter_part("sglang_client").load_adapters(engine._client, body)
            if initial_version is not None:
                await engine._client.name_weights(initial_version)
        except BaseException:
            await asyncio.to_thread(server.stop)
            raise
        return engine

    def __init__(
        self,
        server: SglangServer,
        layout: EngineLayout,
        initial_version: int | None = None,
        store: TCPStore | None = None,
    ) -> None:
        """`store` is where the server's ranks leave digests and meet their senders; None: no server takes part."""
        options = server.options
        model_path = options.extra.get("model_path", options.model_path)
        columns = answered_columns(model_path, options.extra)
        super().__init__(
            server,
            initial_version,
            options.media_folder,
            columns,
            adds_adapters=options.lora is not None,
            tokenizer_folder=str(Path(options.model_path).resolve()),
        )
        self.server = server
        self._store = store
        where = (host(), store.port if store is not None else 0)
        self._endpoint = ServerEndpoint(server.url, layout, server.token, where)
        self._update_open = self._cache_is_away = False
        self._waking = asyncio.Lock()
        self._in_doubt: Collection[int] | None = None
        """The ranks whose boxes are looked at one by one (None: all)."""
        self._coverage: dict[bool, dict[int, int]] = {}
        self._sender = TensorSender(self.endpoint)
        self._intakes = 0
        self._intake: Intake | None = None
        self._taking: asyncio.Task[None] | None = None
        if store is not None:
            store.set(OPEN, "")

    @property
    def served_model(self) -> ServedModel:
        return self.endpoint.layout.model

    @property
    def endpoint(self) -> ServerEndpoint:
        return self._endpoint

    # weights ------------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._weights.begin(version, base)
        self._sender = TensorSender(self.endpoint)
        with self._losing_weights_on_error():
            await self._client.pause()
            if self._update_open:  # left by an update that failed
                self._close_intake()
                await self._client.control("end_weight_update", {})
            await self._client.control("begin_weight_update", {"selector": self._selector})
            self._update_open, self._in_doubt = True, None
            self._open_intake()

    async def apply_update(self, bucket: NamedTensors) -> None:
        self._weights.receive()
        await asyncio.to_thread(self._sender.send, bucket)

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._weights.check(version)
        with self._losing_weights_on_error():
            await self._end_intake()
            sent: dict[SliceKey, str] = {**self._sender.checksums(), **(checksums or {})}
            boxes = self.endpoint.layout.missing(sent, adapters_alone=self._adapters_alone, of_ranks=self._in_doubt)
            missing: dict[SliceKey, str] = dict.fromkeys(boxes, UNCHECKED)
            read_back = dict.fromkeys(sent, UNCHECKED) if missing else await self._held(sent)
            compare(sent, read_back | missing)
            await self._serve_update(version)

    async def end_update_by_sums(self, version: int, sent: SentDigests) -> Sequence[int]:
        self._weights.check(version)
        with self._losing_weights_on_error():
            await self._end_intake()
            self._in_doubt = await self._differing(sent)
            if self._in_doubt:
                self._weights.doubt()
                return [*self._in_doubt]
            await self._serve_update(version)
            return ()

    async def _serve_update(self, version: int) -> None:
        await self._client.control("end_weight_update", {})
        self._update_open = False
        await self._serve(version)

    @property
    def _adapters_alone(self) -> bool:
        """Return whether this update is of adapters alone: the engine has the weights which they are trained beside."""
        return self.served_model.lora is not None and self._weights.base is not None

    async def _differing(self, sent: SentDigests) -> Collection[int]:
        """The ranks that do not hold what was sent, or were not sent all, as far as sums tell.

        Raises:
            EngineError: a rank has a parameter of which something was not sent.
        """
        alone = self._adapters_alone
        if alone not in self._coverage:  # it takes a while, and is always the same
            self._coverage[alone] = coverage_by_rank(self.endpoint.layout.expected(adapters_alone=alone))
        covered, expected = sent.coverage, self._coverage[alone]
        incomplete = [rank for rank in sorted(covered.keys() | expected.keys()) if covered.get(rank) != expected.get(rank)]
        if incomplete or not sent.sums:
            return incomplete
        if self.served_model.lora is not None and not alone:  # the weights did not come, and are checked
            return [EVERY_RANK, *self._ranks]
        since_base = self._weights.base is not None and self.served_model.lora is None
        where, keys = self.endpoint.store, self._answer_keys
        asked = {rank: summing(where, key, since_base=since_base) for rank, key in keys.items()}
        answers = await self._ask(asked)
        nothing = (0, 0, 0)
        if differing := [rank for rank, (sums, _) in answers.items() if tuple(sums) != sent.sums.get(rank, nothing)]:
            return differing
        for rank, (_, uncovered) in answers.items():
            _refuse_uncovered(rank, uncovered)
        return ()

    async def abandon_update(self) -> None:
        await super().abandon_update()
        self._close_intake()

    def _open_intake(self) -> None:
        """Have the server's ranks take what senders put before them, from here on until the intake is closed."""
        if self._store is None:
            return
        self._intakes += 1
        endpoint = self.endpoint
        self._intake = Intake(self._intakes, endpoint.store, endpoint.token, IDLE_S)
        payloads = [serialize(taking(self._intake, rank)) for rank in self._ranks]
        self._store.set(OPEN, str(self._intakes))
        self._taking = asyncio.create_task(self._take(self._intake, *update_request(endpoint.layout, payloads)))

    async def _take(self, intake: Intake, what: str, body: dict[str, Any]) -> None:
        """Wait for the server's answer; senders hear that nothing more is taken, and why."""
        assert self._store is not None, "an intake is open"
        try:
            await self._client.control(what, body, timeout_s=None)  # it comes when the intake is closed, or the server ends
        except EngineError as error:
            self._store.set(intake.failed, f"{error}")
            raise
        self._store.set(intake.failed, f"the weight update of {self.endpoint.url} has ended")

    def _close_intake(self) -> None:
        """Have the server's ranks leave when they have taken what was put before them so far."""
        if self._store is None or self._intake is None:
            return
        intake, self._intake = self._intake, None
        self._store.set(OPEN, "")
        for rank in self._ranks:
            intake.put(self._store, rank, b"")
        if self._taking is not None:
            self._taking.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else may ask for it

    async def _end_intake(self) -> None:
        """Wait until the server's ranks have taken everything; raises EngineError if one could not."""
        intake = self._intake
        self._close_intake()
        if intake is None or self._taking is None:
            return
        await self._taking
        assert self._store is not None, "an intake was open"
        for rank in self._ranks:
            if why := self._store.get(intake.left(rank)).decode():
                raise EngineError(f"rank {rank} of {self.endpoint.url} could not take the weights: {why}")

    async def _held(self, sent: Mapping[SliceKey, str]) -> dict[SliceKey, str]:
        """The digests of what was sent as the server's ranks read them back from their parameters.

        Where no digest was taken the server is not asked.

        Raises:
            EngineError: a rank has a parameter of which something was not sent.
        """
        read_back = dict.fromkeys(sent, UNCHECKED)
        checked = [box for box, value in sent.items() if value != UNCHECKED]
        boxes = {rank: [box for box in checked if box.engine_rank == rank] for rank in self._ranks}
        if not any(boxes.values()):
            return read_back
        where, layout = self.endpoint.store, self.endpoint.layout
        asked = {
            rank: checking([(box, layout.sent_dtype(box.tensor)) for box in boxes[rank]], where, key)
            for rank, key in self._answer_keys.items()
            if self._in_doubt is None or rank in self._in_doubt
        }
        for rank, (digests, uncovered) in (await self._ask(asked)).items():
            _refuse_uncovered(rank, uncovered)
            read_back |= zip(boxes[rank], digests, strict=True)
        return read_back

    async def _ask(self, asked: Mapping[int, Any]) -> dict[int, tuple[list[Any], list[str]]]:
        """The answers of these ranks to payloads that ask for digests."""
        payloads = [serialize(asked.get(rank, [])) for rank in self._ranks]
        await self._client.control(*update_request(self.endpoint.layout, payloads))
        assert self._store is not None, "a server that answers was started with one"
        return {rank: read_answer(self._store.get(self._answer_keys[rank])) for rank in asked}

    @property
    def _answer_keys(self) -> dict[int, str]:
        """The names by which the ranks answer in the store."""
        return {rank: f"digests/{rank}" for rank in self._ranks}

    @property
    def _selector(self) -> str:
        return SELECTORS[self.served_model.predicts]

    @property
    def _ranks(self) -> range:
        return range(self.endpoint.layout.target.ranks)

    async def sleep(self) -> None:
        self._weights.sleep()
        await self._client.abort_all()
        await self._client.wait_until_idle()  # a server ends if it is asked to give up memory that it works with
        held = [OF_WEIGHTS] if self._cache_is_away else [OF_WEIGHTS, *OF_CACHE]
        await self._client.control("release_memory_occupation", {"tags": held})
        self._cache_is_away = True

    async def wake(self) -> None:
        self._weights.wake()
        await self._client.control("resume_memory_occupation", {"tags": [OF_WEIGHTS]})

    async def wake_cache(self) -> None:
        async with self._waking:
            if not self._cache_is_away:
                return
            try:
                await self._client.control("resume_memory_occupation", {"tags": OF_CACHE})
            except BaseException:  # nobody knows what the server holds
                await self.stop()
                raise
            self._cache_is_away = False

    async def health(self) -> None:
        if not self._cache_is_away:  # the server samples a token for its answer
            await super().health()
        elif not self.server.alive:
            raise EngineError(self.server.exit_report())

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        if self._weights.version is not None:  # a server ends if it computes without its cache
            await self.wake_cache()
        return await super().generate(request)

    # the process --------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        self._weights.lose()
        await asyncio.to_thread(self.server.stop)
