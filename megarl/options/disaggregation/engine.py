"""An SGLang server that only prefills, or only decodes: which one follows from its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from megarl.config import Config
from megarl.errors import ConfigError, EngineError
from megarl.models.registry import sees
from megarl.options.disaggregation.checks import FIELD
from megarl.options.disaggregation.client import DecodeClient, PrefillClient, PrefillServer
from megarl.options.disaggregation.section import disaggregation_of
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import EnginePlace, EngineRequest, Generation
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import OtherNode, ServerOptions, SglangServer
from megarl.rollout.engines.sglang.server_process import claim_port

MODE, PORT = "disaggregation_mode", "disaggregation_bootstrap_port"
PREFILL, DECODE = "prefill", "decode"
PACKAGES = {"nixl": ("nixl", "pip install 'megarl[rdma]'"), "mooncake": ("mooncake", "pip install mooncake-transfer-engine")}
"""By transport the module that servers import, and how it is had."""
OF_HOST_CACHE = ("enable_hierarchical_cache", "hicache_size")
"""Arguments that servers which decode are started without: prompts are computed by the others, whose cache it is."""


class DisaggregatedEngine(SglangEngine):
    """An engine that prefills, which is given weights and no requests, or one that decodes."""

    @classmethod
    def check(cls, config: Config, platform: str) -> None:
        super().check(config, platform)
        disaggregation = disaggregation_of(config.rollout)
        assert disaggregation is not None, "this class is that of disaggregated engines"
        transport = disaggregation.transport
        if platform == "cpu" and transport != "nixl":
            raise ConfigError.of(f"{FIELD}.transport", transport, "needs GPUs, and this machine has none", allowed="'nixl'")
        module, remedy = PACKAGES[transport]
        if find_spec(module) is None:
            what = f"the Python package {module}, which is not installed"
            raise ConfigError.needs(f"{FIELD}.transport = '{transport}'", what, f"{remedy}, or set {FIELD} to null")
        if sees(config.model.path):
            reason = "has not been tried with models that see, which model.path is one of"
            raise ConfigError.of(FIELD, disaggregation.model_dump(mode="json"), reason, allowed="null", rule=reason)

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        disaggregation = disaggregation_of(config.rollout)
        assert disaggregation is not None, "this class is that of disaggregated engines"
        # a step's responses are those of the engines that decode
        decoding = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engines": disaggregation.decode})})
        options = super().options(decoding, place)
        extra = {**options["extra"], "disaggregation_transfer_backend": disaggregation.transport}
        if place.number < disaggregation.prefill:
            return {**options, "extra": {**extra, MODE: PREFILL}}
        extra = {name: value for name, value in extra.items() if name not in OF_HOST_CACHE}
        extra |= {
            MODE: DECODE,
            "disaggregation_decode_enable_radix_cache": True,  # of a group, and of turns, it is sent each token once
            "disaggregation_decode_retraction_backup": "cpu_tensor",  # else main memory is reserved
        }
        return {**options, "extra": extra}

    @classmethod
    async def start(
        cls, model_path: str, *, initial_version: int | None = None, nodes: Sequence[OtherNode] = (), **options: Any
    ) -> DisaggregatedEngine:
        server = ServerOptions(model_path, **options)
        if server.extra[MODE] == PREFILL:
            server = replace(server, extra={**server.extra, PORT: claim_port()})
        engine = await cls.open(server, initial_version, nodes)
        assert isinstance(engine, DisaggregatedEngine), "`open` makes an engine of its class"
        return engine

    def __init__(self, server: SglangServer, *arguments: Any) -> None:
        """Make the engine of a server, as `SglangEngine` is made."""
        super().__init__(server, *arguments)
        plain = self._client
        of_client = (plain.columns, plain.media_folder, plain.tokenizer_folder)
        self._prefills = server.options.extra[MODE] == PREFILL
        if self._prefills:
            self._client = PrefillClient(server, *of_client)
        else:
            self._client = DecodeClient(server, lambda: self._weights.version, *of_client)

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        if self._prefills:
            raise EngineError(f"the engine at {self.server.url} prefills for others, and answers no requests")
        return await super().generate(request)

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity(responses=0) if self._prefills else await super().capacity()

    async def door(self) -> PrefillServer:
        """The way by which engines that decode reach this one, which prefills.

        Raises:
            EngineError: it has no weights of a known version.
        """
        if self.weight_version is None:
            raise EngineError("the engine has no weights of a known version")
        host, port = urlsplit(self.server.url).hostname or "", self.server.options.extra[PORT]
        return PrefillServer(0, self.weight_version, self.server.url, self.server.token, host, port)

    async def meet(self, servers: Iterable[PrefillServer]) -> None:
        """Have these prefill for this engine, which decodes, from now on."""
        assert isinstance(self._client, DecodeClient), "engines that prefill ask nobody"
        self._client.meet(servers)
