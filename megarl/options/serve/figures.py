"""Figures of a server: requests, and tokens sampled and trained, by tenant; counted around trainer, sampler and application.

A trainer whose ranks are gone ends the server, which starts again; a client meanwhile hears nothing and asks again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.errors import DeadlineError, WorkerError
from megarl.options.serve.values import AdamParams, AdapterChoice, Datum, Loss, Passed, Sampled, Sampler, SampleRequest, Trainer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Value = TypeVar("Value")
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ServerFigures:
    """Counts since the last `take`, and what waits now. Methods may be called by several threads."""

    def __init__(self) -> None:
        self.tenant_of: Callable[[str], str] = lambda model: ""
        """The tenant of a model, as the service knows it; empty: nobody's."""
        self._counts: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1, tenant: str = "") -> None:
        """Add to the figure `name`, and to that of a tenant."""
        with self._lock:
            for key in _names(name, tenant):
                self._counts[key] += number

    def wait(self, name: str, change: int, tenant: str = "") -> None:
        """Add to how many requests of a kind wait or run: 1 when one comes, -1 when it is answered."""
        with self._lock:
            for key in _names(name, tenant):
                self._waiting[key] += change

    def take(self, seconds: float) -> dict[str, float]:
        """Metrics of the last `seconds`; counts begin anew. Empty where nothing happened and nothing waits."""
        with self._lock:
            counts, waiting = dict(self._counts), {name: number for name, number in self._waiting.items() if number}
            self._counts.clear()
        if not counts and not waiting:
            return {}
        tokens = counts.get("serve/tokens_sampled", 0) + counts.get("serve/tokens_trained", 0)
        return {**counts, **waiting, "speed/tokens_per_s": tokens / seconds, "time/step_s": seconds}


def _names(name: str, tenant: str) -> tuple[str, ...]:
    return (f"serve/{name}", f"serve/{name}/{tenant}") if tenant else (f"serve/{name}",)


class CountedApp:
    """An ASGI application that counts requests, and those that failed, before `app` sees them."""

    def __init__(self, app: App, figures: ServerFigures) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def told(message: Scope) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400 and status not in (408, 410):  # else a client asks again, as it must
                    self._figures.count("requests_refused" if status < 500 else "requests_failed")
            await send(message)

        self._figures.count("requests")
        await self._app(scope, receive, told)


class CountedSampler:
    """A sampler that counts requests that wait, and tokens, by tenant."""

    def __init__(self, sampler: Sampler, figures: ServerFigures) -> None:
        self._sampler, self._figures = sampler, figures

    async def add(self, adapter: str, folder: Path) -> None:
        """Have every engine load the PEFT folder under a name."""
        await self._sampler.add(adapter, folder)
        self._figures.count("adapters_sent")

    async def drop(self, adapter: str) -> None:
        """Have engines forget it."""
        await self._sampler.drop(adapter)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Answer a request."""
        self._figures.wait("samples_waiting", 1, request.tenant)
        try:
            sampled = await self._sampler.sample(request)
        finally:
            self._figures.wait("samples_waiting", -1, request.tenant)
        tokens = sum(len(answer.tokens) for answer in sampled.sequences)
        self._figures.count("tokens_sampled", tokens, request.tenant)
        self._figures.count("tokens_prompted", len(request.tokens), request.tenant)
        return sampled


class CountedTrainer:
    """A trainer that counts tokens and steps by tenant, and tells who runs the server when its ranks are gone."""

    def __init__(self, trainer: Trainer, figures: ServerFigures, lost: Callable[[BaseException], None]) -> None:
        """`lost`: told of the error by which ranks did not answer; it returns when the server is down."""
        self._trainer, self._figures, self._lost = trainer, figures, lost

    def create(self, model: str, choice: AdapterChoice | None) -> None:
        """Make a model that computes what the base does."""
        self._call(lambda: self._trainer.create(model, choice))

    def drop(self, model: str) -> None:
        """Forget a model."""
        self._call(lambda: self._trainer.drop(model))

    def run_pass(self, model: str, data: Sequence[Datum], loss: Loss, *, backward: bool) -> Passed:
        """Compute a loss, and gradients."""
        passed = self._call(lambda: self._trainer.run_pass(model, data, loss, backward=backward))
        tokens, name = sum(len(datum.tokens) for datum in data), "tokens_trained" if backward else "tokens_scored"
        self._figures.count(name, tokens, self._figures.tenant_of(model))
        return passed

    def optimizer_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        """Apply the gradients since the last step."""
        metrics = self._call(lambda: self._trainer.optimizer_step(model, adam))
        self._figures.count("optimizer_steps", 1, self._figures.tenant_of(model))
        return metrics

    def forget_gradients(self, model: str) -> None:
        """Drop the gradients since the last step."""
        self._call(lambda: self._trainer.forget_gradients(model))

    def save(self, model: str, folder: Path) -> None:
        """Write what training needs to go on."""
        self._call(lambda: self._trainer.save(model, folder))

    def load(self, model: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a `save` over."""
        self._call(lambda: self._trainer.load(model, folder, with_optimizer=with_optimizer))

    def export(self, model: str, folder: Path) -> None:
        """Write the adapters as a PEFT folder, or all weights as a model folder."""
        self._call(lambda: self._trainer.export(model, folder))

    def _call(self, work: Callable[[], Value]) -> Value:
        try:
            return work()
        except (WorkerError, DeadlineError) as error:
            self._lost(error)
            raise
