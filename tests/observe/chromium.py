"""Headless Chromium, driven over its DevTools protocol: opens a page, runs scripts in it, notes what it complains of."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-port=0"
)


KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "+": 187}
"""Codes of the keys that `press` knows, as Windows has them."""


class Chromium:
    """One browser with one page. `complaints`: console errors, exceptions and refused loads since the page was opened."""

    def __init__(self, profile: Path) -> None:
        """`profile` is an empty folder for this browser."""
        assert BINARY is not None, "no Chromium is installed"
        self.complaints: list[str] = []
        self._asked = 0
        self._process = subprocess.Popen(
            [BINARY, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._runner = asyncio.Runner()
        self._runner.run(self._connect(profile / "DevToolsActivePort"))

    async def _connect(self, port_file: Path) -> None:
        ends_at = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < ends_at, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            self._note(message)
            if message.get("id") == self._asked:
                assert "error" not in message, message["error"]
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(parameters["args"])[:500])
        elif message.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])

    def open(self, file: Path, width: int = 1400) -> None:
        """Load the page in `file` and wait until its scripts have run."""
        self.open_address(file.resolve().as_uri(), width)

    def open_address(self, url: str, width: int = 1400) -> None:
        """Load the page at `url` and wait until its scripts have run."""
        self.complaints.clear()
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self._runner.run(self._call("Emulation.setDeviceMetricsOverride", **size))
        self._runner.run(self._call("Page.navigate", url=url))
        address = json.dumps(url)
        ends_at = time.monotonic() + 60
        while not self.run(f"document.readyState === 'complete' && location.href === {address}"):
            assert time.monotonic() < ends_at, "the page did not load"
            time.sleep(0.02)
        self.run("typeof opened === 'undefined' ? 1 : opened.then(() => 1)")  # texts of samples are unpacked

    def prefers(self, scheme: str) -> None:
        """Let pages believe that the system is `light` or `dark`, also the one that is open."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._runner.run(self._call("Emulation.setEmulatedMedia", features=features))

    def run(self, script: str) -> Any:
        """The value of the JavaScript expression `script` in the page."""
        answer = self._runner.run(self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True))
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def fill(self, selector: str, value: str) -> None:
        """Put `value` into an input, as typing it would."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{node}.value = {json.dumps(value)}; {node}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def press(self, key: str) -> None:
        """Press and let go of one of `KEYS`, as a keyboard does, on what has the focus."""
        text = {"Enter": "\r", " ": " ", "+": "+"}.get(key)
        what = {"key": key, "windowsVirtualKeyCode": KEYS[key]} | ({"text": text} if text else {})
        for kind in ("keyDown", "keyUp"):
            self._runner.run(self._call("Input.dispatchKeyEvent", type=kind, **what))

    def screenshot(self, file: Path, selector: str = "body") -> None:
        """Write a PNG of the element."""
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        scrolled = self.run("scrollY")
        clip = {"x": box["x"], "y": box["y"] + scrolled, "width": box["width"], "height": box["height"], "scale": 1}
        picture = self._runner.run(self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True))
        file.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """End the browser and all of its processes."""
        self._runner.run(self._session.close())
        self._runner.close()
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(timeout=20)
