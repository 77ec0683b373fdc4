"""A hub of one's own: a local HTTP server that speaks what huggingface_hub's downloads ask for, from folders of files.

A repository is `root/<models or datasets>/ORG/NAME/<revision>/files`; the commit of a revision is the SHA-1 of its name.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^?]+)(\?.*)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def commit_of(revision: str) -> str:
    """The commit that stands for a branch."""
    return hashlib.sha1(revision.encode()).hexdigest()


def write_repo(root: Path, kind: str, name: str, files: dict[str, bytes], revision: str = "main") -> None:
    """Put a repository on the hub in `root`."""
    for file, content in files.items():
        path = root / kind / name / revision / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class Hub:
    """What was asked of it (`asked`: method and path), and what it refuses (`gated`, names of repositories)."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.gated = root, list[tuple[str, str]](), set[str]()
        self.url = ""

    @property
    def downloads(self) -> list[str]:
        """The files that were sent."""
        return [
            path.split("/resolve/")[1].partition("/")[2]
            for method, path in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    def folder(self, kind: str, name: str, revision: str) -> Path | None:
        """The files of a revision, which is a branch or a commit."""
        repo = self.root / kind / name
        for one in repo.iterdir() if repo.is_dir() else ():
            if revision in (one.name, commit_of(one.name)):
                return one
        return None


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """The hub in `root`, on a port of this machine."""
    hub = Hub(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path))
            if (found := API.fullmatch(self.path)) is not None:
                self._tell(found)
            elif (found := FILE.fullmatch(self.path)) is not None:
                self._give(found)
            else:
                self._refuse(404, "EntryNotFound")

        do_HEAD = do_GET

        def _folder(self, kind: str, name: str, revision: str) -> Path | None:
            if not (hub.root / kind / name).is_dir():
                self._refuse(404, "RepoNotFound")
                return None
            folder = hub.folder(kind, name, revision)
            if folder is None:
                self._refuse(404, "RevisionNotFound")
            return folder

        def _tell(self, found: re.Match[str]) -> None:
            kind, name, what, revision = found[1], found[2], found[3], found[4].replace("%2F", "/")
            folder = self._folder(kind, name, revision)
            if folder is None:
                return
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [str(file.relative_to(folder)) for file in files]
            tree: Any = [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}
                for path, file in zip(names, files, strict=True)
            ]
            info: Any = {"id": name, "sha": commit_of(folder.name), "siblings": [{"rfilename": path} for path in names]}
            body = tree if what == "tree" else info
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _give(self, found: re.Match[str]) -> None:
            kind, name, revision, file = "datasets" if found[1] else "models", found[2], found[3], found[4]
            folder = self._folder(kind, name, revision)
            if folder is None:
                return
            if name in hub.gated:
                self._refuse(403, "GatedRepo")
            elif not (folder / file).is_file():
                self._refuse(404, "EntryNotFound")
            else:
                body = (folder / file).read_bytes()
                etag = hashlib.sha1(body).hexdigest()
                self._send(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": commit_of(folder.name)})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
