"""Keys and quotas of tenants: who a key belongs to, and that nothing tells one wrong key from another."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path

import pytest
import yaml
from tinker.lib._jwt_auth import jwt_claims

from megarl.errors import ConfigError
from megarl.options.serve import tenants as module
from megarl.options.serve.tenants import LOCAL, Tenants, add_tenant, check_models, kept_secret, new_key, read_tenants
from megarl.options.serve.values import RequestError


@pytest.fixture(autouse=True)
def _quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COST", 10)
    monkeypatch.setattr(module, "_NO_HASH", module._NO_HASH.replace("scrypt$14", "scrypt$10"))


def key_in(text: str) -> str:
    return text.partition("TINKER_API_KEY=")[2].split()[0]


def file_of(tmp_path: Path, *names: str) -> tuple[Path, dict[str, str]]:
    path = tmp_path / "tenants.yaml"
    return path, {name: key_in(add_tenant(path, name)) for name in names}


def refused(tenants: Tenants, key: str | None) -> str:
    with pytest.raises(RequestError) as raised:
        tenants.find(key)
    assert raised.value.status == 401
    return str(raised.value)


def test_each_key_belongs_to_its_tenant_and_the_file_has_hashes_only(tmp_path: Path) -> None:
    path, keys = file_of(tmp_path, "anna", "ben")
    tenants = Tenants(path)
    for _ in range(2):  # the second time from memory
        assert {name: tenants.find(key).name for name, key in keys.items()} == {"anna": "anna", "ben": "ben"}
    text = path.read_text()
    assert not any(key in text or key.partition(".")[2] in text for key in keys.values())
    assert not any(key in repr(vars(tenants)) for key in keys.values())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_hash_is_that_of_scrypt() -> None:
    key, entry = new_key("anna")
    cost, block, parallel, salt, digest = yaml.safe_load(entry)["anna"]["key"].split("$")[1:]
    known = hashlib.scrypt(key.encode(), salt=bytes.fromhex(salt), n=2 ** int(cost), r=int(block), p=int(parallel), dklen=32)
    assert known.hex() == digest


def test_every_wrong_key_gets_the_same_answer_after_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, keys = file_of(tmp_path, "anna", "ben")
    tenants, work = Tenants(path), []
    plain = module._scrypt
    monkeypatch.setattr(module, "_scrypt", lambda *given: work.append(given) or plain(*given))
    random = keys["anna"].partition(".")[2]
    wrong = [
        keys["anna"][:-1],
        keys["anna"] + "A",
        f"tml-ben.{random}",
        f"tml-carl.{random}",
        "tml-",
        "x" * 10_000,
        "tml-änna.x",
    ]
    assert len({refused(tenants, key) for key in wrong}) == 1
    assert len(work) == len(wrong)
    assert "no key" in refused(tenants, None)


def test_a_token_stands_for_the_key_until_it_ends_or_the_key_does(tmp_path: Path) -> None:
    path, keys = file_of(tmp_path, "anna", "ben")
    now = [1_000_000.0]
    tenants = Tenants(path, secret=b"s" * 32, clock=lambda: now[0])
    anna = tenants.find(keys["anna"])
    token = tenants.token(anna)
    claims = jwt_claims(token)
    assert (claims["sub"], claims["exp"] - claims["iat"]) == ("megarl:tenant:anna", 3_600)
    assert tenants.find(token) == anna
    assert Tenants(path, secret=b"s" * 32, clock=lambda: now[0]).find(token) == anna  # after a restart
    refused(Tenants(path, secret=b"t" * 32, clock=lambda: now[0]), token)
    head, body, signature = token.split(".")
    other = tenants.token(tenants.find(keys["ben"])).split(".")
    for forged in (
        f"{head}.{other[1]}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        "eyJ",
        f"eyJhbGciOiJub25lIn0.{body}.",
    ):
        refused(tenants, forged)
    now[0] += 3_601
    refused(tenants, token)
    now[0] -= 3_601
    entry = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({"anna": yaml.safe_load(new_key("anna")[1])["anna"], "ben": entry["ben"]}))
    refused(tenants, token)
    refused(tenants, keys["anna"])


def test_a_key_ends_when_its_tenant_leaves_the_file(tmp_path: Path) -> None:
    path, keys = file_of(tmp_path, "anna", "ben")
    said: list[str] = []
    tenants = Tenants(path, say=said.append)
    tenants.find(keys["anna"])
    entries = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({"ben": entries["ben"] | {"models": 3}}))
    refused(tenants, keys["anna"])
    assert tenants.find(keys["ben"]).quotas.models == 3
    assert tenants.tenant("anna").quotas.models == 0
    path.write_text("ben: [")
    assert tenants.find(keys["ben"]).quotas.models == 3
    assert len(said) == 1
    assert "stay as they were" in said[0]


def test_a_flood_of_wrong_keys_takes_one_thread_and_ends_in_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, keys = file_of(tmp_path, "anna")
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    tenants = Tenants(path)
    tenants.find(keys["anna"])

    async def flood() -> tuple[list[int], str]:
        wrong = [tenants.tenant_of(f"tml-anna.{index:043d}") for index in range(20)]
        known = tenants.tenant_of(keys["anna"])
        *answers, found = await asyncio.gather(*wrong, known, return_exceptions=True)
        return [answer.status for answer in answers if isinstance(answer, RequestError)], found.name  # type: ignore[union-attr]

    statuses, name = asyncio.run(flood())
    assert sorted(statuses) == [401] * 5 + [429] * 15
    assert name == "anna"


def test_without_a_file_there_is_one_tenant_on_loopback() -> None:
    tenants = Tenants()
    assert tenants.find("tml-anything") is LOCAL
    assert tenants.names == ("local",)
    assert "no key" in refused(tenants, "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "has no tenants"),
        ("anna: 3", "anna must have fields"),
        ("Anna: {key: x}", "the tenant is 'Anna'"),
        ("../anna: {key: x}", r"the tenant is '\.\./anna'"),
        ("anna: {}", r"anna\.key must be a hash"),
        ("anna: {key: tml-anna.plain}", r"anna\.key must be a hash as .* and no key itself"),
        ("anna: {key: KEY, models: -1}", r"anna\.models is -1"),
        ("anna: {key: KEY, models: true}", r"anna\.models is True|anna\.models is true"),
        ("anna: {key: KEY, checkpoint_bytes: 1.5}", r"anna\.checkpoint_bytes is 1\.5"),
        ("anna: {key: KEY, model: 1}", "unknown field 'model'.*models"),
        ("anna: {key: KEY}\nanna: {key: KEY}", "given twice"),
        ("anna: {key: scrypt$30$8$1$" + "0" * 32 + "$" + "0" * 64 + "}", r"anna\.key must be a hash"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    known = yaml.safe_load(new_key("anna")[1])["anna"]["key"]
    (tmp_path / "tenants.yaml").write_text(text.replace("KEY", known))
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_tenants(tmp_path / "tenants.yaml")
    assert known not in str(raised.value)
    assert "tml-anna.plain" not in str(raised.value)


def test_a_new_tenant_is_added_behind_the_others_and_never_twice(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    _, entry = new_key("ben")
    path.write_text(f"# ours\n{entry}  models: 2  # two")
    add_tenant(path, "anna")
    assert path.read_text().startswith(f"# ours\n{entry}  models: 2  # two\nanna:")
    assert read_tenants(path)["ben"].quotas.models == 2
    with pytest.raises(ConfigError, match="has the tenant anna already"):
        add_tenant(path, "anna")
    with pytest.raises(ConfigError, match="the tenant is 'a b'"):
        add_tenant(path, "a b")


def test_quotas_are_kept(tmp_path: Path) -> None:
    path, keys = file_of(tmp_path, "anna", "ben")
    entries = yaml.safe_load(path.read_text())
    entries["anna"] |= {"models": 2, "running_requests": 2}
    path.write_text(yaml.safe_dump(entries))
    tenants = Tenants(path)
    anna, ben = (tenants.find(keys[name]) for name in ("anna", "ben"))
    check_models(anna, 1)
    with pytest.raises(RequestError, match="anna has 2 models, and its quota is 2"):
        check_models(anna, 2)
    check_models(ben, 1_000)
    with tenants.usage.request(anna), tenants.usage.request(anna):
        with pytest.raises(RequestError, match="2 running requests") as raised, tenants.usage.request(anna):
            pass
        assert raised.value.status == 429
        with tenants.usage.request(ben):
            assert tenants.usage.running(ben) == 1
    assert tenants.usage.running(anna) == 0


def test_the_secret_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "serve" / "secret"
    assert kept_secret(path) == kept_secret(path)
    assert len(kept_secret(path)) == 32
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="is damaged: it has 5 bytes"):
        kept_secret(path)
