"""A model of the hub is on every node of a real Ray, where the driver has it, before the first process starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
from huggingface_hub import constants
from ray.cluster_utils import Cluster as RayCluster

from megarl.config.layout import Layout
from megarl.errors import ClusterError
from megarl.system.hub import MODEL_FILES, CachedModel, HubRepo
from megarl.workers import node_models
from megarl.workers.cluster import Cluster, GroupRequest
from tests.data.hub_server import serving, write_repo

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.slow
def test_every_node_downloads_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    write_repo(tmp_path / "hub", "models", "Org/tiny", FILES)
    ray.shutdown()
    asked: list[tuple[Any, ...]] = []
    real = node_models.download_on_nodes
    monkeypatch.setattr("megarl.workers.cluster.download_on_nodes", lambda *given: (asked.append(given), real(*given)))
    started = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "object_store_memory": 10**8})
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, num_gpus=0, object_store_memory=10**8)
        with serving(tmp_path / "hub") as hub:
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
            repo = HubRepo("model", "Org/tiny", None)
            folder = repo.download(MODEL_FILES, error=ClusterError, named="x")
            model = CachedModel.at(str(folder))
            assert model is not None
            options: dict[str, Any] = {"engines": 0, "engine_tp": 1, "colocated": True, "ray_address": started.address}
            options |= {"log_folder": str(tmp_path), "start_deadline_s": 60}
            requests = [GroupRequest("policy", Layout(dp=2), 1)]
            shutil.rmtree(cache)  # as on another machine
            with Cluster(requests, **options, models=[model]) as cluster:
                assert len({bundle.node for bundle in cluster.placement.bundles}) == 2
                assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
            assert len(asked) == 1
            shutil.rmtree(cache)
            lost = CachedModel(model.folder, "Org/gone", model.commit, model.cache)
            with pytest.raises(ClusterError, match=r"^node \S+ has no copy of Org/gone at .*; let HF_HOME be on a file system"):
                Cluster(requests, **options, models=[lost]).__enter__()
    finally:
        ray.shutdown()
        started.shutdown()
    assert "HF_ENDPOINT" not in os.environ  # the nodes were told by argument
