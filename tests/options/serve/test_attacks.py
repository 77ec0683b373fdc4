"""Attacks of one tenant on another, by HTTP and on the store: what is tried, and what is answered.

Each row is tried by ben on what anna has (`RUN`, `SESSION`). Its answer must be the same as for ids that never were, and
afterwards every byte of anna's is as it was.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import ServedRun
from megarl.options.serve.tenants import Tenant
from megarl.options.serve.values import RequestError
from tests.options.serve.management_server import ManagementServer, quick_hashes, running

SESSION, NEVER = "00000000-aaaa", "99999999-aaaa"
RUN = f"{SESSION}:train:0"
OWN = "00000001-aaaa:train:0"
CHECKPOINTS, OWNED = f"training_runs/{RUN}/checkpoints", f"training_runs/{OWN}/checkpoints"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagementServer]:
    with quick_hashes(), running(tmp_path_factory.mktemp("attacked")) as server:
        yield server


@dataclass(frozen=True)
class Attack:
    """A request below /api/v1 with ben's key (or `key`), the status of its answer, and a part of its sentence."""

    what: str
    method: str
    route: str
    body: object = None
    status: int = 404
    says: str = "does not exist"
    key: Callable[[ManagementServer], str | None] = field(default=lambda server: server.keys["ben"])


def forged_token(server: ManagementServer) -> str:
    head, body, signature = server.tenants.token(Tenant("ben")).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["sub"] = "megarl:tenant:anna"
    return ".".join([head, base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode(), signature])


def unsigned_token(server: ManagementServer) -> str:
    parts = ({"alg": "none"}, {"sub": "megarl:tenant:anna", "exp": 10**11, "kid": ""})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def anna_s_name_with_ben_s_secret(server: ManagementServer) -> str:
    return server.keys["ben"].replace("ben", "anna")


NOTHING: dict[str, Any] = {"status": 200, "says": ""}
"""A list or a search is answered, and nothing of anna's is in it."""
CLIMB = {"tinker_path": f"tinker://{OWN}/weights/../../{RUN}/weights/final"}
NO_PATH: dict[str, Any] = {"status": 400, "says": "path must"}
BY_URN = {"owner": {"type": "user", "owner_urns": ["megarl:tenant:anna"]}}
NO_KEY: dict[str, Any] = {"status": 401, "says": "key"}
ATTACKS = [
    Attack("read a training run", "GET", f"training_runs/{RUN}"),
    Attack("read it under the wider scope", "GET", f"training_runs/{RUN}?access_scope=accessible"),
    Attack("list its checkpoints", "GET", CHECKPOINTS),
    Attack("read a session", "GET", f"sessions/{SESSION}"),
    Attack("read a session under the wider scope", "GET", f"sessions/{SESSION}?access_scope=accessible"),
    Attack("read a sampler of the base", "GET", f"samplers/{SESSION}:sample:0"),
    Attack("read a sampler of a checkpoint", "GET", f"samplers/{SESSION}:sample:1"),
    Attack("move a session to a project", "PUT", f"sessions/{SESSION}/project", {"project_id": "mine"}),
    Attack("export a session's trace", "GET", f"sessions/{SESSION}/trace_export"),
    Attack("delete training weights", "DELETE", f"{CHECKPOINTS}/weights/final"),
    Attack("delete sampler weights", "DELETE", f"{CHECKPOINTS}/sampler_weights/final"),
    Attack("delete external weights", "DELETE", f"{CHECKPOINTS}/external_weights/final"),
    Attack("publish a checkpoint", "POST", f"{CHECKPOINTS}/weights/final/publish"),
    Attack("unpublish a checkpoint", "DELETE", f"{CHECKPOINTS}/weights/final/publish"),
    Attack("end a checkpoint in an hour", "PUT", f"{CHECKPOINTS}/weights/final/ttl", {"ttl_seconds": 3_600}),
    Attack("keep a checkpoint for ever", "PUT", f"{CHECKPOINTS}/weights/final/ttl", {"ttl_seconds": None}),
    Attack("ask what a checkpoint is", "POST", "weights_info", {"tinker_path": f"tinker://{RUN}/weights/final"}),
    Attack("have links to a checkpoint's files signed", "GET", f"{CHECKPOINTS}/external_weights/final/external_weights_urls"),
    Attack("have a link to its archive signed", "GET", f"{CHECKPOINTS}/sampler_weights/final/archive"),
    Attack("spell a run as its folder", "GET", "training_runs/00000000-aaaa=train=0"),
    Attack("spell a run as its folder to delete", "DELETE", "training_runs/00000000-aaaa=train=0/checkpoints/weights/final"),
    Attack("spell a run in other letters", "GET", "training_runs/00000000-AAAA:train:0"),
    Attack("spell a run in wide digits", "GET", "training_runs/０0000000-aaaa:train:0"),
    Attack("end an id with a zero byte", "GET", f"training_runs/{RUN}%00"),
    Attack("end an id with a line", "GET", f"sessions/{SESSION}%0a"),
    Attack("climb from a run's folder", "GET", "training_runs/..%2f..%2fsecret", says="Not Found"),
    Attack("climb from an own run", "DELETE", f"{OWNED}/weights/..%2f..%2f{RUN}%2fweights%2ffinal", says="Not Found"),
    Attack("climb by dots encoded twice", "DELETE", f"{OWNED}/weights/%252e%252e", status=400, says="the name of"),
    Attack("climb by a backslash", "DELETE", f"{OWNED}/weights/..%5cfinal", status=400, says="the name of"),
    Attack("climb in a path", "POST", "weights_info", CLIMB, **NO_PATH),
    Attack("use the folder above as a kind", "DELETE", f"{OWNED}/%2e%2e/final", status=400, says="the kind of"),
    Attack("list all checkpoints", "GET", "checkpoints?limit=1000", **NOTHING),
    Attack("list all training runs", "GET", "training_runs?access_scope=accessible&limit=1000", **NOTHING),
    Attack("list all sessions", "GET", "sessions?access_scope=accessible&limit=1000", **NOTHING),
    Attack("search a session by its id", "POST", "sessions/search", {"session_id": SESSION}, **NOTHING),
    Attack("search all sessions", "POST", "sessions/search", {"owner": {"type": "accessible"}}, **NOTHING),
    Attack("search anna's sessions", "POST", "sessions/search", BY_URN, **NOTHING),
    Attack("search sessions by their names", "POST", "sessions/search", {"display_name": "run"}, **NOTHING),
    Attack("delete the key of another", "DELETE", "auth/apikey/me?name=anna", status=403, says="the key of ben"),
    Attack("come without a key", "GET", f"training_runs/{RUN}", key=lambda server: None, **NO_KEY),
    Attack("come with a key in the address", "GET", "sessions?x_api_key=tml-anna.x", key=lambda server: None, **NO_KEY),
    Attack("come with the other's name", "GET", f"training_runs/{RUN}", key=anna_s_name_with_ben_s_secret, **NO_KEY),
    Attack("come with a token that says anna", "GET", f"training_runs/{RUN}", key=forged_token, **NO_KEY),
    Attack("come with a token without signature", "GET", f"training_runs/{RUN}", key=unsigned_token, **NO_KEY),
    Attack("fetch without a link", "GET", f"download/{RUN}/external_weights/final/{CONFIG}", status=403, says="not signed"),
]  # fmt: skip


def bytes_of(server: ManagementServer, identity: str) -> dict[str, str]:
    """Checksums of all files of a tenant's, by its ids."""
    folders = [path for path in server.store.root.rglob("*") if path.is_file() and identity in str(path)]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folders}


def send(server: ManagementServer, attack: Attack, identity: str) -> httpx.Response:
    key = attack.key(server)
    route, body = attack.route.replace(SESSION[:8], identity[:8]), json.dumps(attack.body).replace(SESSION, identity)
    headers = {} if key is None else {"X-API-Key": key}
    content = None if attack.body is None else body.encode()
    return server.plain.request(attack.method, f"{server.url}/api/v1/{route}", content=content, headers=headers)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.what.replace(" ", "_"))
def test_nothing_is_gained_and_nothing_is_lost(server: ManagementServer, attack: Attack) -> None:
    before = bytes_of(server, SESSION)
    answer = send(server, attack, SESSION)
    assert answer.status_code == attack.status
    assert attack.says in (answer.json() if attack.status == 200 else answer.json()["detail"]) or attack.status == 200
    if attack.status == 200:
        assert "anna" not in answer.text
        assert SESSION not in answer.text
    assert before == bytes_of(server, SESSION)
    assert len(before) > 10
    never = send(server, attack, NEVER)
    assert (never.status_code, never.text.replace(NEVER[:8], SESSION[:8])) == (answer.status_code, answer.text)


def changed(link: str, path: str = "", **query: str) -> str:
    """A link with parts of it replaced."""
    parts = urlsplit(link)
    fields = {name: values[0] for name, values in parse_qs(parts.query).items()} | query
    return parts._replace(path=path or parts.path, query=urlencode(fields)).geturl()


LINKS: dict[str, Callable[[str, str], str]] = {
    "another_file": lambda anna, ben: changed(anna, urlsplit(anna).path.replace(CONFIG, "adapter_model.safetensors")),
    "a_later_end": lambda anna, ben: changed(anna, expires="9999999999"),
    "an_end_that_is_no_number": lambda anna, ben: changed(anna, expires="inf"),
    "the_other_tenant": lambda anna, ben: changed(anna, tenant="ben"),
    "ben_s_signature_for_anna_s_file": lambda anna, ben: changed(ben, urlsplit(anna).path),
    "ben_s_link_with_anna_as_tenant": lambda anna, ben: changed(ben, urlsplit(anna).path, tenant="anna"),
    "no_signature": lambda anna, ben: changed(anna, signature=""),
    "a_signature_of_other_letters": lambda anna, ben: changed(anna, signature="ä" * 64),
    "a_climb_behind_a_file": lambda anna, ben: changed(ben, urlsplit(ben).path.replace(CONFIG, "..%2f..%2fmanifest.json")),
    "the_archive_by_a_file_s_link": lambda anna, ben: changed(anna, urlsplit(anna).path.replace(CONFIG, "checkpoint.tar")),
}


@pytest.mark.parametrize("change", LINKS.values(), ids=LINKS)
def test_a_link_is_good_for_its_own_file_alone(server: ManagementServer, change: Callable[[str, str], str]) -> None:
    links = {}
    for name, run in (("anna", RUN), ("ben", OWN)):
        route = f"{server.url}/api/v1/training_runs/{run}/checkpoints/external_weights/final/external_weights_urls"
        links[name] = server.plain.get(route, headers={"X-API-Key": server.keys[name]}).json()["urls"][CONFIG]
    assert server.plain.get(links["anna"]).status_code == 200
    answer = server.plain.get(change(links["anna"], links["ben"]))
    assert answer.status_code == 403
    assert "is not signed by this server" in answer.json()["detail"]


ON_THE_STORE: dict[str, Callable[[ManagementServer, Path], object]] = {
    "load_training_weights": lambda server, path: server.store.reading(
        "ben", CheckpointPath(RUN, "weights", "final")
    ).__enter__(),
    "sample_from_its_weights": lambda server, path: server.store.pin("ben", CheckpointPath(RUN, "sampler_weights", "final")),
    "copy_its_weights": lambda server, path: server.store.copy(
        Tenant("ben"), CheckpointPath(RUN, "weights", "final"), CheckpointPath(OWN, "weights", "copy")
    ),
    "save_into_its_run": lambda server, path: server.store.writing(
        Tenant("ben"), CheckpointPath(RUN, "weights", "planted"), {}
    ).__enter__(),
    "save_over_its_weights": lambda server, path: server.store.writing(
        Tenant("ben"), CheckpointPath(RUN, "weights", "final"), {}, overwrite=True
    ).__enter__(),
    "change_its_session": lambda server, path: server.store.registry.sessions.change("ben", SESSION, display_name="mine"),
    "keep_its_session_alive": lambda server, path: server.store.registry.sessions.touch("ben", SESSION, 1.0),
    "mark_its_run_as_corrupted": lambda server, path: server.store.registry.runs.change("ben", RUN, corrupted=True),
}


@pytest.mark.parametrize("attempt", ON_THE_STORE.values(), ids=ON_THE_STORE)
def test_the_store_itself_keeps_tenants_apart(
    server: ManagementServer, tmp_path: Path, attempt: Callable[[ManagementServer, Path], object]
) -> None:
    before = bytes_of(server, SESSION)
    with pytest.raises(RequestError, match="does not exist") as raised:
        attempt(server, tmp_path)
    assert raised.value.status == 404
    assert before == bytes_of(server, SESSION)


def test_an_id_is_given_once(server: ManagementServer) -> None:
    with pytest.raises(RequestError, match="exists already"):
        server.store.registry.runs.add(ServedRun(RUN, "ben", 0.0, SESSION, "base"))
    assert server.store.registry.runs.owner(RUN) == "anna"


def test_keys_are_in_no_warning_and_on_no_disk(server: ManagementServer) -> None:
    texts = [*server.log, *(path.read_text(errors="replace") for path in server.store.root.parent.rglob("*") if path.is_file())]
    assert len(texts) > 20
    for key in server.keys.values():
        assert not any(key.partition(".")[2] in text for text in texts)
