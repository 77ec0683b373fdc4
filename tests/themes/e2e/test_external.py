"""A run on an SGLang server that somebody else started: weights travel as folders, and the server outlives the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.trainers.rl.train import train


@pytest.mark.exhaustive  # tests/rollout/test_external.py gives such a server its weights as folders too, without a run
@pytest.mark.slow
def test_a_run_gives_a_server_that_was_there_before_its_weights_and_leaves_it_running(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServerOptions(str(tiny_model), tmp_path / "server.log", threads=1, max_total_tokens=4096, max_running_requests=16)
    server = SglangServer(options)
    server.start()
    try:
        monkeypatch.setenv("MEGARL_ENGINE_TOKEN", server.token)
        config = tiny_config(
            **{"rollout.engine": "sglang", "rollout.weight_transport": "folder", "rollout.servers": {"urls": [server.url]}},
            **{"run.steps": 3, "data.eval": None, "policy.layout": {"dp": 2}},
        )
        train(config)
        rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3]
        # what it answered with are the trainer's weights of each step
        assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows), [row["mismatch/log_prob_max"] for row in rows]
        assert list((Path(config.run_folder) / "weights").iterdir()) == []
        assert server.token not in (Path(config.run_folder) / "config.yaml").read_text()
        assert server.alive
    finally:
        server.stop()
