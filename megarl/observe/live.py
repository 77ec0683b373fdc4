"""`megarl report --watch`: the page of runs that go on, served on this machine only, and their new rows as they are written.

It listens on 127.0.0.1, answers no request that names another host (a web page elsewhere could otherwise read it through a
name of its own that leads here), takes nothing but GET, and holds no key.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

from megarl.errors import DataError
from megarl.observe.page_samples import pack_samples, sample_data
from megarl.observe.report import as_inert_json, build_page
from megarl.observe.run_record import RunRecord, read_run
from megarl.observe.run_status import axes, run_status
from megarl.observe.sample_media import PagePictures
from megarl.system.socket_names import NOTHING, SocketName

HOST = "127.0.0.1"
NEW_ROWS, NEW_SAMPLES = 1000, 2000
"""In an answer at most; for more the page is loaded anew, which shows no more rows."""
FOLLOWED = ("metrics", "faults", "reward_errors", "slow_ranks")
"""Files of rows that answers are made of, besides samples; the page has all, but is made apart."""


class RunFollower:
    """Runs as far as they are written, but for most of what is not `FOLLOWED`; when files have changed, what is new is read."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """Read the runs in `folders`; DataError if one holds no run."""
        self.folders = [Path(folder) for folder in folders]
        self._lock = Lock()
        self._seen = [_marks(folder) for folder in self.folders]
        self._runs: list[RunRecord] = [read_run(folder, whole=FOLLOWED) for folder in self.folders]

    def runs(self) -> list[RunRecord]:
        """The runs as they are now. While a file of a run cannot be read, that run is as it was before."""
        with self._lock:
            for index, folder in enumerate(self.folders):
                seen = _marks(folder)
                if seen == self._seen[index]:
                    continue
                try:
                    self._runs[index] = read_run(folder, self._runs[index].files)
                except DataError:
                    continue
                self._seen[index] = seen
            return list(self._runs)


def write_page(folders: Sequence[str | Path], file: str) -> None:
    """Write the page of the runs in `folders`, which asks for new rows; DataError if one holds no run."""
    Path(file).write_text(build_page([read_run(folder) for folder in folders], is_live=True), encoding="utf-8")


def write_page_apart(folders: Sequence[str | Path], file: str) -> None:
    """`write_page` by a process that ends: it takes many times the page's size, of which Python would keep a part."""
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as processes:
        processes.submit(write_page, folders, file).result()


def new_rows(runs: Sequence[RunRecord], at: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Rows that `runs` have beyond the (rows, samples) of `at`; `{"reload": True}` if a run has been put back or has too
    much."""
    if len(at) != len(runs):
        return {"reload": True}
    fresh = []
    for run, (rows, samples) in zip(runs, at, strict=True):
        if not (0 <= len(run.metrics) - rows <= NEW_ROWS and 0 <= len(run.samples) - samples <= NEW_SAMPLES):
            return {"reload": True}
        late = run.samples[samples:]
        if any(sample.get("media") for sample in late):
            return {"reload": True}
        shown = [sample_data(entry, run, PagePictures(), has_numbers=True) for entry in late]
        columns, prompts, chunks = pack_samples(shown, list)
        fresh.append(
            {
                "status": run_status(run),
                "summary": {"eval": run.summary.get("eval")},
                "rows": [dict(row) for row in run.metrics[rows:]],
                "axes": {name: values[rows:] for name, values in axes(run.metrics).items()},
                "samples": {"columns": columns, "prompts": prompts, "rows": [row for chunk in chunks for row in chunk]},
                "samples_written": len(late),
            }
        )
    return {"runs": fresh}


def serve(folders: Sequence[str | Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the page of the runs in `folders` until Ctrl-C; `say` is told the address. `port` 0 takes a free one."""
    server = open_server(folders, port)
    port = server.server_address[1]
    name = SocketName(port, "report --watch", f"{NOTHING}; it answers under the names of this machine alone")
    say(f"http://{HOST}:{port}/ (Ctrl-C ends it)")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.server_close()
        name.close()


def open_server(folders: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """The server, which listens already; DataError if the port is taken or a folder holds no run."""
    follower = RunFollower(folders)
    # One thread makes all answers, or each of many would keep the memory that its largest answer took.
    answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(follower, answers))
    except OSError as error:
        raise DataError(f"--port is {port}, but it cannot be listened on: {error.strerror}; 0 takes a free one") from error
    server.daemon_threads = True
    return server


def _handler(follower: RunFollower, answers: ThreadPoolExecutor) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            port = self.server.server_address[1]  # type: ignore[index]
            parts = urlsplit(self.path)
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                self._answer(403, "text/plain", f"only as {HOST}:{port} or localhost:{port}\n")
            elif parts.path in ("/", "/rows"):
                try:
                    with NamedTemporaryFile() as file:
                        kind = answers.submit(self._write, parts.path, parts.query, file.name).result()
                        self._send(200, kind, file)
                except ValueError:
                    self._answer(400, "text/plain", "at is ROWS.SAMPLES of each run, with commas between\n")
                except DataError as error:
                    self._answer(503, "text/plain", f"{error}\n")
            else:
                self._answer(404, "text/plain", "there is / and /rows\n")

        def _write(self, path: str, query: str, file: str) -> str:
            if path == "/":
                write_page_apart(follower.folders, file)
                return "text/html"
            at = _places(parse_qs(query))
            Path(file).write_text(as_inert_json(new_rows(follower.runs(), at)))
            return "application/json"

        def _answer(self, status: int, kind: str, text: str) -> None:
            self._send(status, kind, BytesIO(text.encode()))

        def _send(self, status: int, kind: str, body: IO[bytes]) -> None:
            size = body.seek(0, os.SEEK_END)
            body.seek(0)
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(size))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            shutil.copyfileobj(body, self.wfile)

        def log_message(self, format: str, *args: Any) -> None:
            """A request every two seconds is nothing to tell."""

    return Handler


def _places(query: Mapping[str, list[str]]) -> list[tuple[int, int]]:
    places = []
    for part in query.get("at", [""])[0].split(","):
        rows, samples = (int(number) for number in part.split("."))
        if rows < 0 or samples < 0:
            raise ValueError(part)
        places.append((rows, samples))
    return places


def _marks(folder: Path) -> list[tuple[int, int] | None]:
    """Marks that change when a run writes."""
    lines = ("metrics.jsonl", "samples.jsonl", "faults.jsonl")
    return [_mark(folder / name) for name in (*lines, "summary.json", "machine.json", "end.json")]


def _mark(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
