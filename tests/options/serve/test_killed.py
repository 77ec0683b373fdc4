"""A process that is killed while it writes: what it had said was written is there, and nothing is there in part."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.options.serve.journal import RequestJournal
from megarl.options.serve.store import CheckpointStore

MODEL = "a:train:0"
WRITER = """
import sys, threading
from pathlib import Path
from megarl.options.serve.journal import RequestJournal
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant

root = Path(sys.argv[1])
store, journal = CheckpointStore(root / "serve"), RequestJournal(root / "journal")
if not journal.models():
    journal.begin("a:train:0", {})

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

def save():
    names = {info.path.name for info in store.listed("anna")}
    for number in range(len(names), 100_000):
        path = CheckpointPath("a:train:0", "weights", f"{number:06d}")
        with store.writing(Tenant("anna"), path, {"base_model": "b", "rank": 1}) as folder:
            for part in range(3):
                (folder / f"{part}.bin").write_bytes(bytes([number % 256]) * 50_000)
        say(f"saved {path.name}")

threading.Thread(target=save, daemon=True).start()
seq = max([journal.replay("a:train:0").seq, *(entry.seq for entry in journal.replay("a:train:0").entries)])
while True:
    seq += 1
    journal.append("a:train:0", seq, "optim_step", bytes([seq % 256]) * 20_000)
    journal.flush()
    say(f"flushed {seq}")
    if seq % 20 == 0:
        journal.snapshot("a:train:0", seq - 5, lambda folder: folder.mkdir())
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_said_was_written(tmp_path: Path) -> None:
    saved, flushed = set[str](), 0
    for lines in (40, 60, 30):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = [writer.stdout.readline().split() for _ in range(lines)]
        time.sleep(0.0005 * lines)
        writer.kill()
        said += [line.split() for line in writer.stdout.read().split("\n")[:-1]]
        writer.wait()
        saved |= {name for verb, name in said if verb == "saved"}
        flushed = max([flushed, *(int(seq) for verb, seq in said if verb == "flushed")])

        store = CheckpointStore(tmp_path / "serve")
        infos = store.listed("anna")
        assert {info.path.name for info in infos} >= saved
        for info in infos:
            with store.reading("anna", info.path) as folder:
                assert sorted(path.name for path in folder.iterdir()) == ["0.bin", "1.bin", "2.bin"]
        journal = RequestJournal(tmp_path / "journal")
        replay = journal.replay(MODEL)
        assert [entry.seq for entry in replay.entries] == list(range(replay.seq + 1, replay.seq + 1 + len(replay.entries)))
        assert replay.seq + len(replay.entries) >= flushed
        assert all(entry.body == bytes([entry.seq % 256]) * 20_000 for entry in replay.entries)
        journal.close()
    assert saved
    assert flushed > 20
