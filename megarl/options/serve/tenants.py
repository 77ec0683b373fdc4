"""Tenants of a server: who a key belongs to, and how much each tenant may have.

A file names the tenants, with a scrypt hash of each one's key; keys themselves are written nowhere and never logged.
Without a file there is one tenant, `local`, and the server must listen on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.yaml_tree import read_yaml
from megarl.errors import ConfigError, nearest
from megarl.options.serve.values import RequestError
from megarl.system.atomic_files import write_text_atomically

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
"""Names of tenants: they are in keys and in names of folders."""
KEY = re.compile(r"tml-([a-z0-9][a-z0-9_-]{0,31})\.([A-Za-z0-9_-]{43})")
"""A key: the prefix that the client asks for, the tenant, and 256 bits by chance."""
HASH = re.compile(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([0-9a-f]{32})\$([0-9a-f]{64})")
COST, BLOCK, PARALLEL = 14, 8, 1
"""Parameters of scrypt for new keys: log2 of the cost, 16 MiB and about 50 ms."""
LONGEST_KEY, MOST_WAITING = 4_096, 64
"""Characters of a key, and keys seen for the first time that wait for their check, at most."""
TOKEN_S = 3_600.0
"""Seconds for which a token that stands for a key is good."""
_NO_HASH = f"scrypt${COST}${BLOCK}${PARALLEL}${'0' * 32}${'0' * 64}"


@dataclass(frozen=True)
class Quotas:
    """The most that a tenant may have at once; None: no bound."""

    models: int | None = None
    running_requests: int | None = None
    checkpoint_bytes: int | None = None


@dataclass(frozen=True)
class Tenant:
    """A tenant and its quotas."""

    name: str
    quotas: Quotas = Quotas()
    key_hash: str = ""


LOCAL = Tenant("local")
"""The one tenant of a server without a file of tenants."""


class Tenants:
    """The tenants of a server, read again when their file changes. Methods may be called by several threads."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = print,
    ) -> None:
        """Read `path`. `secret` signs tokens: the same after a restart, or tokens end with the process. `say` gets warnings.

        Raises:
            ConfigError: the file is none of tenants.
        """
        self._path, self._clock, self._say = path, clock, say
        self.secret = secret or secrets.token_bytes(32)
        self._seen: dict[bytes, tuple[str, str]] = {}
        self._checks = ThreadPoolExecutor(1, "keys")
        self._waiting = 0
        self._lock = threading.Lock()
        self._changed = _state(path)
        self._tenants = read_tenants(path) if path else {LOCAL.name: LOCAL}
        self.usage = Usage()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tenants."""
        return tuple(self._current())

    @property
    def are_several(self) -> bool:
        """Tell whether a file says who they are; else all clients are one tenant."""
        return self._path is not None

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name; one that is no longer in the file may have nothing."""
        return self._current().get(name, Tenant(name, Quotas(0, 0, 0)))

    async def tenant_of(self, key: str | None) -> Tenant:
        """`find`, in a thread of its own where the key was not seen before, so that wrong keys slow nobody down.

        Raises:
            RequestError: with status 401, or with 429 where too many new keys wait.
        """
        if self._path is None or self._is_known(key):
            return self.find(key)
        with self._lock:
            if self._waiting >= MOST_WAITING:
                raise RequestError("too many keys wait for their check; ask again later", status=429)
            self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._checks, self.find, key)
        finally:
            with self._lock:
                self._waiting -= 1

    def find(self, key: str | None) -> Tenant:
        """The tenant that a key or a token belongs to. A new key costs one scrypt, also where there is no such tenant.

        Raises:
            RequestError: with status 401; the sentence is the same for every wrong key.
        """
        if not key:
            raise RequestError("the request has no key: set TINKER_API_KEY, which is sent as X-API-Key", status=401)
        tenants = self._current()
        if self._path is None:
            return LOCAL
        name, key_hash = self._seen.get(self._digest(key), ("", ""))
        if name and name in tenants and tenants[name].key_hash == key_hash:
            return tenants[name]
        tenant = self._of_token(key, tenants) if key.startswith("eyJ") else self._of_key(key, tenants)
        if tenant is None:
            raise RequestError("the key is not one of this server's tenants; ask its operator for one", status=401)
        return tenant

    def token(self, tenant: Tenant) -> str:
        """A token (JWT) that stands for the tenant's key for `TOKEN_S`, and tells the client who it is."""
        now = int(self._clock())
        claims = {
            "iss": "passport-megarl",
            "sub": f"megarl:tenant:{tenant.name}",
            "org_id": "megarl",
            "iat": now,
            "exp": now + int(TOKEN_S),
            "kid": _mark(tenant),
        }
        signed = ".".join(_encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        return f"{signed}.{_encode(self._sign(signed))}"

    def _of_key(self, key: str, tenants: Mapping[str, Tenant]) -> Tenant | None:
        shape = KEY.fullmatch(key) if len(key) <= LONGEST_KEY else None
        tenant = tenants.get(shape[1]) if shape else None
        right = _matches(key if shape else "", tenant.key_hash if tenant else _NO_HASH)
        if tenant is None or not right:
            return None
        with self._lock:
            if len(self._seen) > 4 * len(tenants) + 64:  # keys that the file no longer has
                self._seen.clear()
            self._seen[self._digest(key)] = (tenant.name, tenant.key_hash)
        return tenant

    def _of_token(self, token: str, tenants: Mapping[str, Tenant]) -> Tenant | None:
        signed, _, signature = token[:LONGEST_KEY].rpartition(".")
        if not hmac.compare_digest(signature.encode(), _encode(self._sign(signed)).encode()):
            return None
        claims = json.loads(_decode(signed.partition(".")[2]))
        tenant = tenants.get(str(claims["sub"]).rpartition(":")[2])
        good = tenant is not None and claims["kid"] == _mark(tenant) and claims["exp"] > self._clock()
        return tenant if good else None

    def _is_known(self, key: str | None) -> bool:
        return not key or key.startswith("eyJ") or self._digest(key) in self._seen

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self.secret, b"key\0" + key.encode(errors="surrogatepass"), "sha256")

    def _sign(self, text: str) -> bytes:
        return hmac.digest(self.secret, b"token\0" + text.encode(errors="surrogatepass"), "sha256")

    def _current(self) -> Mapping[str, Tenant]:
        if self._path is not None and (state := _state(self._path)) != self._changed:
            with self._lock:
                self._changed = state
                try:
                    self._tenants = read_tenants(self._path)
                except ConfigError as error:
                    self._say(f"the tenants stay as they were: {error}")
        return self._tenants


class Usage:
    """Running requests by tenant."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def running(self, tenant: Tenant) -> int:
        """Requests of the tenant that run or wait."""
        return self._running[tenant.name]

    def begin(self, tenant: Tenant) -> None:
        """Count a request that starts; whoever calls this calls `end` once.

        Raises:
            RequestError: with status 429, at which the client asks again: the tenant's quota is used up.
        """
        most = tenant.quotas.running_requests
        with self._lock:
            if most is not None and self._running[tenant.name] >= most:
                raise RequestError(f"tenant {tenant.name} has {most} running requests, as many as its quota allows", status=429)
            self._running[tenant.name] += 1

    def end(self, tenant: Tenant) -> None:
        """Count a request out."""
        with self._lock:
            self._running[tenant.name] -= 1

    @contextmanager
    def request(self, tenant: Tenant) -> Iterator[None]:
        """`begin`, the block, `end`."""
        self.begin(tenant)
        try:
            yield
        finally:
            self.end(tenant)


class HeldBytes:
    """Bytes that each tenant has in the server's memory: bodies that are read, and passes that wait."""

    def __init__(self, most: int) -> None:
        """`most`: of one tenant; a single request may have more."""
        self._most = most
        self._held: Counter[str] = Counter()

    def take(self, tenant: Tenant, size: int) -> Callable[[], None]:
        """Count so many bytes until what is returned is called.

        Raises:
            RequestError: with status 429, at which the client asks again: the tenant has too many.
        """
        name = tenant.name
        if self._held[name] and self._held[name] + size > self._most:
            raise RequestError(
                f"requests of {name} with {self._held[name]} bytes wait already, and {self._most} are as many as a tenant may "
                "have; ask again later",
                status=429,
            )
        self._held[name] += size
        return partial(self._free, name, size)

    def _free(self, name: str, size: int) -> None:
        self._held[name] -= size
        if not self._held[name]:
            del self._held[name]


def check_models(tenant: Tenant, live: int) -> None:
    """Refuse one model more where the tenant has `live` of them already.

    Raises:
        RequestError: the quota is used up.
    """
    most = tenant.quotas.models
    if most is not None and live >= most:
        raise RequestError(
            f"tenant {tenant.name} has {live} models, and its quota is {most}; unload one, or ask for a larger quota"
        )


def read_tenants(path: Path | str) -> dict[str, Tenant]:
    """Read a file of tenants: by name the field `key` (its hash), and those of `Quotas`.

    Raises:
        ConfigError: it cannot be read, or a field is not what it must be.
    """
    tenants = {}
    for name, entry in read_yaml(path).items():
        field = f"{path}: {name}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError.of(
                f"{path}: the tenant", name, allowed="up to 32 of a-z, 0-9, '_' and '-', the first a letter or a digit"
            )
        if not isinstance(entry, dict):
            raise ConfigError(f"{field} must have fields, of which 'key' is one; `megarl serve --new-key {name}` makes it")
        tenants[name] = _tenant(name, entry, field)
    if not tenants:
        raise ConfigError(f"{path} has no tenants; `megarl serve --new-key NAME` makes one")
    return tenants


def _tenant(name: str, entry: Mapping[str, Any], field: str) -> Tenant:
    quotas = [item.name for item in fields(Quotas)]
    for key, value in entry.items():
        if key not in ("key", *quotas):
            raise ConfigError(
                f"{field} has the unknown field '{key}'; fields are key, {', '.join(quotas)}{nearest(key, quotas)}"
            )
        if key != "key" and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError.of(f"{field}.{key}", value, allowed="a whole number, 0 or more, or null for no bound")
    key_hash = entry.get("key")
    parts = HASH.fullmatch(key_hash) if isinstance(key_hash, str) else None
    if parts is None or not (10 <= int(parts[1]) <= 20 and 1 <= int(parts[2]) <= 32 and 1 <= int(parts[3]) <= 16):
        raise ConfigError(f"{field}.key must be a hash as `megarl serve --new-key {name}` prints it, and no key itself")
    return Tenant(name, Quotas(*(entry.get(quota) for quota in quotas)), str(key_hash))


def new_key(name: str) -> tuple[str, str]:
    """Make a key for a tenant: the key, to be shown once, and the entry for the file of tenants, which has its hash only.

    Raises:
        ConfigError: the name is none.
    """
    if not NAME.fullmatch(name):
        raise ConfigError.of("the tenant", name, allowed="up to 32 of a-z, 0-9, '_' and '-', the first a letter or a digit")
    key = f"tml-{name}.{secrets.token_urlsafe(32)}"
    return key, f"{name}:\n  key: {_hash(key)}\n"


def add_tenant(path: Path, name: str) -> str:
    """Add a tenant to the file at `path`, which is made if there is none; returns what its operator reads, the key in it.

    Raises:
        ConfigError: the file has that tenant already, or is none of tenants.
    """
    text = (
        path.read_text()
        if path.exists()
        else "# Tenants of megarl serve: by name the hash of a key, and quotas (docs/serve.md).\n"
    )
    if path.exists() and text.strip() and name in (read_yaml(path) or {}):
        raise ConfigError(f"{path} has the tenant {name} already; remove its entry first, which ends its key")
    key, entry = new_key(name)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    write_text_atomically(path, f"{text.rstrip()}\n{entry}".lstrip())
    path.chmod(mode)
    read_tenants(path)
    shown = f"The key of {name}, which is shown this once:\n\n  export TINKER_API_KEY={key}\n\n"
    return f"{shown}{path} has its hash; set quotas there."


def kept_secret(path: Path) -> bytes:
    """32 bytes by chance that only this server knows, kept in a file that only its user reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(32))
    secret = path.read_bytes()
    if len(secret) != 32:
        raise ConfigError(
            f"{path} is damaged: it has {len(secret)} bytes and must have 32; remove it, which ends all tokens and links"
        )
    return secret


def _hash(key: str) -> str:
    salt = secrets.token_bytes(16)
    return f"scrypt${COST}${BLOCK}${PARALLEL}${salt.hex()}${_scrypt(key, salt, COST, BLOCK, PARALLEL).hex()}"


def _matches(key: str, key_hash: str) -> bool:
    cost, block, parallel, salt, digest = key_hash.split("$")[1:]
    found = _scrypt(key, bytes.fromhex(salt), int(cost), int(block), int(parallel))
    return hmac.compare_digest(found, bytes.fromhex(digest))


def _scrypt(key: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    memory = 128 * block * (2**cost + parallel + 2) + 2**20
    return hashlib.scrypt(key.encode(), salt=salt, n=2**cost, r=block, p=parallel, dklen=32, maxmem=memory)


def _mark(tenant: Tenant) -> str:
    """Digest of the key's hash: a token ends with the key that it was given for."""
    return hashlib.sha256(tenant.key_hash.encode()).hexdigest()[:16]


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _state(path: Path | None) -> tuple[int, int, int] | None:
    """Inode, size and time of a file, which differ once it was replaced."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found else None
