"""An OpenEnv server of the tests: guess a number. Run with a port and `package` (openenv-core's own server) or `protocol`.

`protocol` speaks the messages of openenv-core 0.3 by aiohttp alone, for machines without the package.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any


class Guessing:
    """The game; as both servers run it."""

    def begin(self, seed: int, high: int) -> str:
        self.number = seed % high
        return f"Guess a number below {high}."

    def answer(self, message: str) -> tuple[str, float | None, bool]:
        if message == "boom":
            raise RuntimeError("it broke")
        if int(message) == self.number:
            return "yes", 1.0, True
        return ("higher" if int(message) < self.number else "lower"), None, False


def serve_package(port: int) -> None:
    """By the package."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        message: str

    class Hint(Observation):
        text: str = ""

    class GuessEnvironment(Environment[Guess, Hint, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Guessing()

        def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 10, **_: Any) -> Hint:
            return Hint(text=self.game.begin(seed or 0, high))

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
            text, reward, done = self.game.answer(action.message)
            return Hint(text=text, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def serve_protocol(port: int) -> None:
    """By the protocol."""
    from aiohttp import web

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket, game = web.WebSocketResponse(), Guessing()
        await socket.prepare(request)
        async for message in socket:
            asked = message.json()
            if asked["type"] == "close":
                break
            try:
                if asked["type"] == "reset":
                    found: tuple[str, float | None, bool] = (
                        game.begin(asked["data"].get("seed", 0), asked["data"].get("high", 10)), None, False
                    )  # fmt: skip
                elif set(asked["data"]) != {"message"}:
                    await socket.send_json({"type": "error", "data": {"message": "no message", "code": "VALIDATION_ERROR"}})
                    continue
                else:
                    found = game.answer(asked["data"]["message"])
            except RuntimeError as error:
                await socket.send_json({"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}})
                continue
            observed = {"observation": {"text": found[0]}, "reward": found[1], "done": found[2]}
            await socket.send_json({"type": "observation", "data": observed})
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=port, print=None, loop=asyncio.new_event_loop())


if __name__ == "__main__":
    {"package": serve_package, "protocol": serve_protocol}[sys.argv[2]](int(sys.argv[1]))
