"""In a world of several drivers one does what must be done once, and the others wait for it and share its failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from megarl.errors import MegarlError, MirrorError
from megarl.runs.leader_first import leader_first

folder, fails = Path(sys.argv[1]), sys.argv[2] == "fails"

def work():
    assert os.environ["RANK"] == "0"
    while not (folder / "arrived").exists():
        time.sleep(0.01)
    ends_at = time.monotonic() + 1
    while time.monotonic() < ends_at:
        assert not (folder / "passed").exists(), "the other did not wait"
        time.sleep(0.01)
    if fails:
        raise MirrorError("the line is down")

if os.environ["RANK"] == "1":
    (folder / "arrived").touch()
try:
    leader_first(work)
except MegarlError as error:
    sys.exit(f"megarl: {error}")
if os.environ["RANK"] == "1":
    (folder / "passed").touch()
torch.distributed.init_process_group("gloo", init_method="env://")  # the world that comes after it
ranks = [None, None]
torch.distributed.all_gather_object(ranks, os.environ["RANK"])
print(ranks)
"""


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
def test_the_others_wait_for_the_leader_and_share_its_failure(outcome: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), outcome],
            env=os.environ | world | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            said, complained = process.communicate(timeout=240)
            if outcome == "succeeds":
                assert (process.returncode, said) == (0, "['0', '1']\n"), complained
            else:
                assert process.returncode == 1
                assert complained.splitlines()[-1] == "megarl: the line is down"
    finally:
        for process in processes:
            process.kill()
