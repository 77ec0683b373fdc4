"""The REST routes, by the client's own RestClient and AdminClient over HTTP on loopback."""

from __future__ import annotations

import asyncio
import io
import tarfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from megarl.options.serve import management
from megarl.options.serve.downloads import ARCHIVE, DownloadLinks
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.tenants import Tenant
from tests.options.serve.management_server import ADAPTERS, CLOCK_START, ManagementServer, make_app, quick_hashes, running

RUN = "00000000-aaaa:train:0"
FINAL = f"tinker://{RUN}/weights/final"
EXTERNAL = f"tinker://{RUN}/external_weights/final"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManagementServer]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with quick_hashes(), running(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagementServer]:
    """A server for tests that change nothing."""
    with quick_hashes(), running(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture
def client(server: ManagementServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.keys["anna"])


def test_training_runs_and_checkpoints_are_listed_by_pages(server: ManagementServer, client: tinker.RestClient) -> None:
    store = server.store
    for number in range(5):
        server.clock.now += 1
        with store.writing(Tenant("anna"), CheckpointPath(RUN, "weights", f"{number:06d}"), {"base_model": "b"}) as folder:
            (folder / "x").write_bytes(b"1")
    runs = client.list_training_runs().result()
    assert (runs.cursor.total_count, [run.training_run_id for run in runs.training_runs]) == (1, [RUN])
    run = client.get_training_run(RUN).result()
    assert run == runs.training_runs[0] == client.get_training_run_by_tinker_path(FINAL).result()
    assert (run.base_model, run.model_owner, run.is_lora, run.lora_rank, run.corrupted) == (
        "Qwen/Qwen3-0.6B",
        "anna",
        True,
        32,
        False,
    )
    assert run.user_metadata == {"team": "anna", "steps": "5"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/000004"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == f"tinker://{RUN}/sampler_weights/final"
    listed = client.list_checkpoints(RUN).result()
    assert [found.checkpoint_id for found in listed.checkpoints[:5]] == [f"weights/{number:06d}" for number in (4, 3, 2, 1, 0)]
    assert listed.cursor is None
    pages = [client.list_user_checkpoints(limit=3, offset=offset).result() for offset in (0, 3, 6, 9)]
    assert [len(page.checkpoints) for page in pages] == [3, 3, 2, 0]
    assert [found for page in pages for found in page.checkpoints] == listed.checkpoints
    assert pages[1].cursor == types.Cursor(offset=3, limit=3, total_count=8)
    (saved,) = [found for found in listed.checkpoints if found.tinker_path == FINAL]
    assert (saved.checkpoint_type, saved.size_bytes, saved.public, saved.expires_at) == ("training", 7, False, None)
    assert saved.time == datetime.fromtimestamp(CLOCK_START, UTC)
    assert saved.user_metadata == {"kind": "weights"}
    assert {found.checkpoint_type for found in listed.checkpoints} == {"training", "sampler", "external"}


def test_a_checkpoint_is_given_a_lifetime_and_none_again(server: ManagementServer, client: tinker.RestClient) -> None:
    client.set_checkpoint_ttl_from_tinker_path(FINAL, 7_200).result()
    (found,) = [one for one in client.list_checkpoints(RUN).result().checkpoints if one.tinker_path == FINAL]
    assert found.expires_at == datetime.fromtimestamp(CLOCK_START + 7_200, UTC)
    client.set_checkpoint_ttl_from_tinker_path(FINAL, None).result()
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds is 60; it must be a whole number from 3600"):
        client.set_checkpoint_ttl_from_tinker_path(FINAL, 60).result()
    client.set_checkpoint_ttl_from_tinker_path(FINAL, 3_600).result()
    server.clock.now += 3_600
    with pytest.raises(tinker.NotFoundError, match="does not exist, or has expired"):
        client.get_weights_info_by_tinker_path(FINAL).result()


def test_a_checkpoint_is_deleted(client: tinker.RestClient) -> None:
    client.delete_checkpoint_from_tinker_path(FINAL).result()
    client.delete_checkpoint(RUN, "sampler_weights/final").result()
    assert [found.tinker_path for found in client.list_checkpoints(RUN).result().checkpoints] == [EXTERNAL]
    with pytest.raises(tinker.NotFoundError, match="does not exist, or has expired"):
        client.delete_checkpoint_from_tinker_path(FINAL).result()


def test_a_published_checkpoint_may_be_read_by_others(server: ManagementServer, client: tinker.RestClient) -> None:
    other = tinker.RestClient(base_url=server.url, api_key=server.keys["ben"])
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(FINAL).result()
    client.publish_checkpoint_from_tinker_path(FINAL).result()
    with pytest.raises(tinker.BadRequestError, match="is published already"):
        client.publish_checkpoint_from_tinker_path(FINAL).result()
    info = other.get_weights_info_by_tinker_path(FINAL).result()
    assert info == client.get_weights_info_by_tinker_path(FINAL).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("Qwen/Qwen3-0.6B", True, 32)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)
    assert info.optimizer_config == types.AdamOptimizerConfig()
    client.unpublish_checkpoint_from_tinker_path(FINAL).result()
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(FINAL).result()


def test_files_of_external_weights_are_downloaded_by_their_links(server: ManagementServer, client: tinker.RestClient) -> None:
    response = client.get_external_weights_urls(EXTERNAL).result()
    assert response.expires == datetime.fromtimestamp(CLOCK_START + 1_800, UTC)
    for name, content in ADAPTERS.items():
        with urllib.request.urlopen(response.urls[name]) as answer:
            assert int(answer.headers["Content-Length"]) == len(content)
            assert answer.read() == content
    assert response.urls.keys() == ADAPTERS.keys()
    server.clock.now += 1_800
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(response.urls["adapter_config.json"])


def test_the_client_s_download_command_gets_every_file(
    server: ManagementServer, client: tinker.RestClient, tmp_path: Path
) -> None:
    from tinker.cli.commands.checkpoint import _download_external_weights

    server.clock.now = datetime.now(UTC).timestamp()
    target = tmp_path / "download"
    target.mkdir()
    size = _download_external_weights(client, EXTERNAL, target, show_progress=False, format="json", renew_ttl_seconds=3_600)
    assert size == sum(map(len, ADAPTERS.values()))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == ADAPTERS


def test_adapters_are_downloaded_as_a_tar_file(server: ManagementServer) -> None:
    url = f"{server.url}/api/v1/training_runs/{RUN}/checkpoints/sampler_weights/final/archive"
    answer = server.plain.get(url, headers={"X-API-Key": server.keys["anna"]})
    assert answer.status_code == 302
    archive = server.plain.get(answer.headers["location"])
    assert int(archive.headers["content-length"]) == len(archive.content)
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        found = {entry.name: tar.extractfile(entry) for entry in tar.getmembers()}
        assert {name: file.read() for name, file in found.items() if file is not None} == ADAPTERS
    refused = server.plain.get(url.replace("sampler_weights", "weights"), headers={"X-API-Key": server.keys["anna"]})
    assert refused.status_code == 400
    assert "has no adapters to download; save them with save_weights_external" in refused.json()["detail"]


def downloaded(server: ManagementServer, path: CheckpointPath, file: str, **headers: str) -> int:
    """The status of a download that has ended on the server's side too."""
    link = DownloadLinks(server.tenants.secret, server.clock).link(server.url, "anna", path, file, int(server.clock()) + 60)
    app = httpx.ASGITransport(make_app(server.store, server.tenants), raise_app_exceptions=False)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=app) as plain:
            return (await plain.get(link, headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("asked", "status"), [("bytes=0-9", 206), ("bytes=76800-", 416), ("bytes=5-3", 400), ("items=0-1", 400)]
)
def test_a_checkpoint_is_kept_for_no_download_that_has_ended(server: ManagementServer, asked: str, status: int) -> None:
    path = CheckpointPath.parse(EXTERNAL)
    assert downloaded(server, path, "adapter_model.safetensors", Range=asked) == status
    server.store.delete("anna", path)
    assert not [*server.store.root.glob("checkpoints/00000000*/external_weights/final")]


def test_a_checkpoint_is_kept_for_no_archive_that_broke_off(server: ManagementServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(files: object, created: object) -> Iterator[bytes]:
        yield b"x" * 512
        raise OSError("the disk is gone")

    monkeypatch.setattr(management, "tar_of", broken)
    path = CheckpointPath(RUN, "sampler_weights", "final")
    assert downloaded(server, path, ARCHIVE) == 200
    server.store.delete("anna", path)
    assert not [*server.store.root.glob("checkpoints/00000000*/sampler_weights/final")]


def test_a_damaged_checkpoint_gets_no_link(server: ManagementServer, client: tinker.RestClient) -> None:
    (file,) = server.store.root.glob("checkpoints/00000000*/external_weights/final/content/data/adapter_config.json")
    file.write_bytes(b'{"r": 33}')
    with pytest.raises(tinker.BadRequestError, match=r"'data/adapter_config\.json' is damaged"):
        client.get_external_weights_urls(EXTERNAL).result()


def test_sessions_and_samplers_are_found(server: ManagementServer, client: tinker.RestClient) -> None:
    assert client.list_sessions().result().sessions == ["00000000-aaaa"]
    session = client.get_session("00000000-aaaa").result()
    assert session.training_run_ids == [RUN]
    assert sorted(session.sampler_ids) == ["00000000-aaaa:sample:0", "00000000-aaaa:sample:1"]
    assert session.user_metadata == {"team": "anna", "steps": "5"}
    assert session.display_name == "Nightly run 0"
    sampler = client.get_sampler("00000000-aaaa:sample:1").result()
    assert (sampler.base_model, sampler.model_path) == ("Qwen/Qwen3-0.6B", f"tinker://{RUN}/sampler_weights/final")
    assert client.get_sampler("00000000-aaaa:sample:0").result().model_path is None
    client.assign_session_project("00000000-aaaa", "proj-1").result()
    assert client.list_training_runs(project_id="proj-1").result().cursor.total_count == 1
    assert client.list_training_runs(project_id="proj-2").result().cursor.total_count == 0


def test_sessions_are_searched(server: ManagementServer, client: tinker.RestClient) -> None:
    sessions = server.store.registry.sessions
    first = sessions.get("anna", "00000000-aaaa")
    for number in range(1, 6):
        record = type(first)(
            f"{number:08d}-bbbb", "anna", first.created + number // 2, display_name=f"Day {number}", user_metadata={"n": number}
        )
        sessions.add(record)
    sessions.change("anna", "00000001-bbbb", status={"type": "client_finished", "reason": {"type": "errored"}})

    def found(**fields: object) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            page = client.search_sessions(types.SessionSearchRequest.model_validate(fields)).result()
            ids = [session.session_id for session in page.sessions]
            while page.next_cursor is not None:
                page = client.search_sessions(
                    types.SessionSearchRequest.model_validate({**fields, "cursor": page.next_cursor})
                ).result()
                ids += [session.session_id for session in page.sessions]
        return [identity[:8].lstrip("0") or "0" for identity in ids]

    newest_first = ["4", "5", "2", "3", "0", "1"]
    assert found() == newest_first
    assert found(limit=1) == found(limit=2) == found(limit=4) == newest_first
    assert found(display_name="NIGHT run") == ["0"]
    assert found(display_name="day", session_id="00000000-aaaa") == newest_first
    assert found(session_id="00000003-bbbb") == ["3"]
    assert found(user_metadata={"n": "4"}) == ["4"]
    assert found(statuses=[{"type": "active"}]) == ["0"]
    assert found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == ["1"]
    assert found(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    assert found(owner={"type": "accessible"}) == newest_first
    assert found(owner={"type": "user", "owner_urns": ["megarl:tenant:anna"]}) == newest_first
    assert found(owner={"type": "user", "owner_urns": ["megarl:tenant:ben"]}) == []
    assert found(project_ids=["none"]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (summary,) = client.search_sessions(types.SessionSearchRequest(session_id="00000000-aaaa")).result().sessions
    assert (summary.owner, summary.checkpoints_count) == ("anna", 3)
    assert summary.checkpoint_storage_bytes == 7 + 2 * sum(map(len, ADAPTERS.values()))
    assert summary.status == types.SessionActive()


def test_the_client_hears_who_it_is(client: tinker.RestClient) -> None:
    found = client.whoami().result()
    assert (found.user_urn, found.org_urn, found.email) == ("megarl:tenant:anna", "tml:organization:megarl", None)


def test_a_key_is_verified_as_the_client_s_login_does(server: ManagementServer) -> None:
    from tinker.cli.auth_api import AuthApiError, TinkerAuthApi

    with httpx.Client() as plain:
        api = TinkerAuthApi(plain, base_url=server.url)
        assert api.get_self_api_key(server.keys["anna"]).name == "anna"
        with pytest.raises(AuthApiError, match="not one of this server's tenants"):
            api.get_self_api_key("tml-wrong")
        with pytest.raises(AuthApiError, match="only its operator removes it"):
            api.delete_self_api_key(server.keys["anna"])


def test_what_only_the_hosted_service_has_is_named_at_once(server: ManagementServer, client: tinker.RestClient) -> None:
    admin = tinker.AdminClient(base_url=server.url, api_key=server.keys["anna"])
    with pytest.raises(tinker.NotFoundError, match="megarl serve, has no audit"):
        admin.get_audit_log().result()
    with pytest.raises(tinker.NotFoundError, match="has no billing/usage/events"):
        admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
    with pytest.raises(tinker.NotFoundError, match="has no billing/usage/checkpoints/current"):
        admin.get_current_checkpoint_storage_usage().result()
    with pytest.raises(tinker.NotFoundError, match="has no trace_export"):
        client.export_session_trace("00000000-aaaa").result()


@pytest.mark.parametrize(
    ("method", "route", "body", "sentence"),
    [
        ("GET", "checkpoints?limit=-1", None, "limit is -1; it must be 0 to 1000"),
        ("GET", "checkpoints?limit=1001", None, "limit is 1001"),
        ("GET", "checkpoints?limit=many", None, "limit is 'many'; it must be a whole number"),
        ("GET", "training_runs?offset=-1", None, "offset is -1; it must be 0 or more"),
        ("GET", "training_runs?access_scope=all", None, "access_scope is 'all'; it must be 'owned' or 'accessible'"),
        ("POST", "weights_info", b"{", "the body must be a JSON object"),
        ("POST", "weights_info", b"[1]", "the body must be a JSON object"),
        ("POST", "weights_info", b"[" * 100_000, "the body must be a JSON object"),
        ("POST", "weights_info", b"{}", "tinker_path must be a text"),
        ("POST", "weights_info", b'{"tinker_path": "tinker://a"}', "a checkpoint's path must be tinker://RUN/KIND/NAME"),
        ("POST", "weights_info", b'{"path": "x"}', "unknown field 'path'; fields are tinker_path"),
        ("POST", "weights_info", b" " * 300_000, "more than 262144 bytes"),
        ("POST", "sessions/search", b'{"limit": 0}', "limit: Input should be greater than or equal to 1"),
        ("PUT", "sessions/00000000-aaaa/project", b'{"project_id": 3}', "project_id must be a text"),
        ("PUT", f"training_runs/{RUN}/checkpoints/weights/final/ttl", b'{"ttl_seconds": "1h"}', "ttl_seconds is '1h'"),
        ("DELETE", f"training_runs/{RUN}/checkpoints/models/final", None, "the kind of a checkpoint must be one of weights"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_in_one_sentence(
    shared: ManagementServer, method: str, route: str, body: bytes | None, sentence: str
) -> None:
    answer = shared.plain.request(
        method, f"{shared.url}/api/v1/{route}", content=body, headers={"X-API-Key": shared.keys["anna"]}
    )
    assert answer.status_code in (400, 413)
    assert sentence in answer.json()["detail"]
