"""What a process of a run shares with engines is gone from the machine's memory when the process is ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.themes.e2e.processes import outside_ray

KILLED = """
import os, sys, time
from pathlib import Path
import ray
from megarl.workers.cluster import Cluster

@ray.remote(num_cpus=0)
class Sender:
    def stage(self):
        import torch
        from megarl.weights.rank_plan import SliceKey, WeightSlice
        from megarl.weights.staging import Staging
        self.staging = Staging(name="a")
        self.staging.stage([WeightSlice(SliceKey("w", 0, 4, 0, 0, 4, 4), torch.zeros(4, 4))])
        return os.getpid()

old = set(Path("/dev/shm").iterdir())  # perhaps of another process of this number

def files(pid):
    return set(Path("/dev/shm").glob(f"torch_{pid}_*")) - old

with Cluster([], engines=1, engine_tp=1, colocated=False, ray_address=None, log_folder=sys.argv[1], start_deadline_s=120):
    actor = Sender.remote()
    pid = ray.get(actor.stage.remote())
    print(len(files(pid)))
    ray.kill(actor, no_restart=True)
    ends_at = time.monotonic() + 30
    while files(pid) and time.monotonic() < ends_at:
        time.sleep(0.1)
    print(len(files(pid)))
"""


@pytest.mark.slow
def test_a_sender_that_is_ended_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Ray would kill its children with it, and with them torch's process that removes the files."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, env=outside_ray())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1", "0"]
