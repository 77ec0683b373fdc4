"""`megarl report --watch`: the page of runs that go on, served on this machine only, and their new rows as they are written.

It listens on 127.0.0.1, answers no request that names another host (a web page elsewhere could otherwise read it through a
name of its own that leads here), takes nothing but GET, and holds no key.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Event, Lock
from typing import IO, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megarl.errors import DataError
from megarl.observe.page_samples import pack_samples, sample_data
from megarl.observe.report import as_inert_json, build_page
from megarl.observe.run_record import RunRecord, read_run
from megarl.observe.run_status import axes, run_status
from megarl.observe.sample_media import PagePictures
from megarl.system.http_server import Admission, ServerThread, application, json_answer, listen
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
    name = SocketName(server.port, "report --watch", f"{NOTHING}; it answers under the names of this machine alone")
    say(f"http://{HOST}:{server.port}/ (Ctrl-C ends it)")
    try:
        Event().wait()
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.close()
        name.close()


def open_server(folders: Sequence[str | Path], port: int) -> ServerThread:
    """The server, which listens already; DataError if the port is taken or a folder holds no run."""
    app = _application(RunFollower(folders))
    try:
        listening = listen(HOST, port)
    except OSError as error:
        raise DataError(f"--port is {port}, but it cannot be listened on: {error.strerror}; 0 takes a free one") from error
    return ServerThread(Admission(app, token=None, is_open=True, most_bytes=0), listening, "report-watch")


def _application(follower: RunFollower) -> Starlette:
    # One thread makes all rows, or each of many would keep the memory that its largest answer took; pages keep nobody waiting.
    rows_one_by_one, pages_one_by_one = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("rows", "pages"))

    async def answered(made_by: ThreadPoolExecutor, kind: str, write: Callable[[str], object]) -> Response:
        with ExitStack() as until_sent:
            file = until_sent.enter_context(NamedTemporaryFile())
            try:
                await asyncio.get_running_loop().run_in_executor(made_by, write, file.name)
            except DataError as error:
                return json_answer({"error": str(error)}, 503)
            size = os.stat(file.name).st_size
            headers = {"Content-Length": str(size), "Cache-Control": "no-store"}
            return StreamingResponse(_pieces(file, until_sent.pop_all()), headers=headers, media_type=kind)

    async def page(request: Request) -> Response:
        return await answered(pages_one_by_one, "text/html", partial(write_page_apart, follower.folders))

    async def rows(request: Request) -> Response:
        try:
            at = _places(request.query_params.get("at", ""))
        except ValueError:
            return json_answer({"error": "at is ROWS.SAMPLES of each run, with commas between"}, 400)

        def write_rows(file: str) -> None:
            Path(file).write_text(as_inert_json(new_rows(follower.runs(), at)))

        return await answered(rows_one_by_one, "application/json", write_rows)

    return application([Route("/", page), Route("/rows", rows)])


async def _pieces(file: IO[bytes], until_sent: ExitStack) -> AsyncIterator[bytes]:
    """The content of a file, which is gone when it was sent."""
    with until_sent:
        while piece := file.read(1 << 18):
            yield piece


def _places(text: str) -> list[tuple[int, int]]:
    places = []
    for part in text.split(","):
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
