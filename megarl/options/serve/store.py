"""Checkpoints of a server on disk: written once, whole or not at all, with a lifetime; read by their tenant, or by all.

Below the root, `checkpoints/RUN/KIND/NAME/` has `terms.json` (published, expires) and `content/`: a manifest with checksums,
and in `data/` what the trainer wrote. One process owns the root.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.observe.record_lines import object_line
from megarl.options.serve.journal import sync_file
from megarl.options.serve.places import KINDS, CheckpointPath, folder_of, name_of
from megarl.options.serve.registry import ServerRecords, check_metadata
from megarl.options.serve.tenants import Tenant
from megarl.options.serve.values import RequestError
from megarl.runs.manifest import MANIFEST, FileRecord, check, files_of, parse, seal, sync_folder
from megarl.system.atomic_files import write_text_atomically

SHORTEST_TTL_S, LONGEST_TTL_S = 3_600, 10 * 365 * 86_400
TERMS = "terms.json"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint; times are seconds since 1970, `expires` None: never.

    `made` is what its writer said of it: `base_model`, `rank` (None: all weights), `train_attn` and others.
    """

    path: CheckpointPath
    tenant: str
    created: float
    bytes: int
    made: Mapping[str, Any] = field(default_factory=dict)
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False
    expires: float | None = None
    damage: str = ""
    """Why it cannot be read, where that was seen at start."""


class CheckpointStore:
    """The checkpoints below a root. Methods may be called by several threads."""

    def __init__(
        self,
        root: Path,
        *,
        most_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = print,
    ) -> None:
        """Read what is in `root`, which is made, and remove what a crash left in part.

        `most_bytes` is a bound of all tenants' checkpoints together; `say` gets warnings.
        """
        self.root, self.clock, self._say, self._most_bytes = root, clock, say, most_bytes
        self.registry = ServerRecords(root, say)
        self._lock = threading.RLock()
        self._infos: dict[CheckpointPath, CheckpointInfo] = {}
        self._pins: Counter[CheckpointPath] = Counter()
        self._going: dict[CheckpointPath, CheckpointInfo] = {}
        self._writing: set[CheckpointPath] = set()
        self._reserved: Counter[str] = Counter()
        (root / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._read_all()

    # reading ------------------------------------------------------------------------------------------------------

    def find(self, tenant: str, path: CheckpointPath, *, to_change: bool = False) -> CheckpointInfo:
        """The checkpoint at `path`, if the tenant may read it, or may change it.

        Raises:
            RequestError: with status 404, the same for one that never was, has expired, was deleted or is another tenant's.
        """
        info = self._infos.get(path)
        visible = info is not None and (info.tenant == tenant or (info.public and not to_change))
        if info is None or not visible or self._is_over(info):
            raise RequestError(f"{path} does not exist, or has expired", status=404)
        return info

    def is_there(self, tenant: str, path: CheckpointPath) -> bool:
        """Return whether `find` finds it."""
        try:
            self.find(tenant, path)
        except RequestError:
            return False
        return True

    def listed(self, tenant: str, run: str | None = None) -> list[CheckpointInfo]:
        """The tenant's own checkpoints, of one training run or of all, the newest first."""
        with self._lock:
            infos = list(self._infos.values())
        own = (info for info in infos if info.tenant == tenant and run in (None, info.path.run) and not self._is_over(info))
        return sorted(own, key=lambda info: (-info.created, info.path))

    def runs(self) -> set[str]:
        """Training runs that have checkpoints, also such as are being written or removed."""
        with self._lock:
            return {path.run for path in (*self._infos, *self._going, *self._writing)}

    def forget_run(self, run: str) -> None:
        """Remove the folders of a training run without checkpoints."""
        folder = self.root / "checkpoints" / folder_of(run)
        with suppress(OSError):  # there is none, or something is in it
            for path in (*folder.glob("*"), folder):
                path.rmdir()

    def used_bytes(self, tenant: str | None = None) -> int:
        """Bytes of checkpoints of a tenant (None: of all), with those that are being written."""
        with self._lock:
            infos = [*self._infos.values(), *self._going.values()]
            there = sum(info.bytes for info in infos if tenant in (None, info.tenant))
            return there + (self._reserved.total() if tenant is None else self._reserved[tenant])

    def pin(self, tenant: str, path: CheckpointPath) -> Path:
        """The folder with what was written, which stays until `unpin`, whatever is deleted or expires meanwhile.

        Raises:
            RequestError: as `find`.
        """
        with self._lock:
            self.find(tenant, path)
            self._pins[path] += 1
        return self._data(path)

    def unpin(self, path: CheckpointPath) -> None:
        """End one `pin`; removes the checkpoint if it was deleted meanwhile."""
        with self._lock:
            self._pins[path] -= 1
            if self._pins[path] <= 0:
                del self._pins[path]
                if path in self._going:
                    self._remove(path)

    @contextmanager
    def reading(self, tenant: str, path: CheckpointPath) -> Iterator[Path]:
        """The folder with what was written, every byte of it checked, pinned for the block.

        Raises:
            RequestError: as `find`; or the checkpoint is damaged, and in which file.
        """
        folder = self.pin(tenant, path)
        try:
            self._check_whole(path)
            if damage := self.find(tenant, path).damage:
                raise RequestError(f"{path} is damaged: {damage}")
            yield folder
        finally:
            self.unpin(path)

    def files(self, path: CheckpointPath) -> dict[str, int]:
        """Names, from the data folder, and bytes of a checkpoint's files, as its manifest has them.

        Raises:
            RequestError: the manifest is damaged.
        """
        return {name[len("data/") :]: record.bytes for name, record in self._manifest(path).items()}

    # writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(
        self,
        tenant: Tenant,
        path: CheckpointPath,
        made: Mapping[str, Any],
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> Iterator[Path]:
        """An empty folder to fill, which is the checkpoint once the block succeeds, durable, and nothing if it raises.

        Raises:
            RequestError: the name is taken, the lifetime or the metadata are not what they may be, or the quota is used up.
        """
        expires = self._expiry(ttl_seconds)
        check_metadata(user_metadata)
        with self._reserving(tenant, path, overwrite=overwrite), _part(self._folder(path)) as part:
            data = part / "content" / "data"
            data.mkdir(parents=True)
            yield data
            size = _bytes_without_links(data)
            origin = {
                "tenant": tenant.name,
                "created": self.clock(),
                "user_metadata": dict(user_metadata or {}),
                "made": dict(made),
            }
            info = _info(path, origin, size, expires=expires)
            with self._within_quota(tenant, path, size):
                seal(part / "content", origin)
                _write_terms(part, info)
                sync_folder(part)
                self._put(part, info)
        for folder in (*self._folder(path).parents,)[:3]:  # new ones among them
            sync_folder(folder)

    def copy(
        self, tenant: Tenant, source: CheckpointPath, target: CheckpointPath, *, ttl_seconds: int | None = None
    ) -> CheckpointInfo:
        """Make a checkpoint of another's files, which share their bytes on disk; it counts whole for the quota.

        Raises:
            RequestError: as `reading` of the source and `writing` of the target.
        """
        with self.reading(tenant.name, source) as folder:
            info = self.find(tenant.name, source)
            made = {**info.made, "copy_of": source.text}
            with self.writing(tenant, target, made, ttl_seconds=ttl_seconds, user_metadata=info.user_metadata) as data:
                shutil.copytree(folder, data, dirs_exist_ok=True, copy_function=_link)
        return self.find(tenant.name, target)

    def delete(self, tenant: str, path: CheckpointPath) -> None:
        """Forget a checkpoint; its bytes go when nobody reads it any more.

        Raises:
            RequestError: with status 404, as `find`.
        """
        with self._lock:
            self._forget(self.find(tenant, path, to_change=True))

    def publish(self, tenant: str, path: CheckpointPath, *, public: bool) -> None:
        """Let all tenants read a checkpoint, or none but its own.

        Raises:
            RequestError: as `find`; or it is so already.
        """
        with self._lock:
            info = self.find(tenant, path, to_change=True)
            if info.public is public:
                raise RequestError(f"{path} is {'published' if public else 'private'} already", status=400)
            self._change(replace(info, public=public))

    def set_ttl(self, tenant: str, path: CheckpointPath, ttl_seconds: int | None) -> None:
        """Have a checkpoint expire so many seconds from now; None: never.

        Raises:
            RequestError: as `find`; or the lifetime is none that is allowed.
        """
        expires = self._expiry(ttl_seconds)
        with self._lock:
            self._change(replace(self.find(tenant, path, to_change=True), expires=expires))

    def sweep(self) -> list[CheckpointPath]:
        """Remove what has expired, and write when sessions and runs were last seen; returns the paths that are gone."""
        with self._lock:
            over = [info for info in self._infos.values() if self._is_over(info)]
            for info in over:
                self._forget(info)
        self.registry.write_touched()
        return [info.path for info in over]

    # the inside ---------------------------------------------------------------------------------------------------

    def _folder(self, path: CheckpointPath) -> Path:
        return self.root / "checkpoints" / folder_of(path.run) / path.kind / path.name

    def _data(self, path: CheckpointPath) -> Path:
        return self._folder(path) / "content" / "data"

    def _is_over(self, info: CheckpointInfo) -> bool:
        return info.expires is not None and info.expires <= self.clock()

    def _expiry(self, ttl_seconds: int | None) -> float | None:
        if ttl_seconds is None:
            return None
        if (
            not isinstance(ttl_seconds, int)
            or isinstance(ttl_seconds, bool)
            or not SHORTEST_TTL_S <= ttl_seconds <= LONGEST_TTL_S
        ):
            raise RequestError(
                f"ttl_seconds is {ttl_seconds!r:.40}; it must be a whole number from {SHORTEST_TTL_S} (an hour) to"
                f" {LONGEST_TTL_S} (ten years), or none for no end"
            )
        return self.clock() + ttl_seconds

    @contextmanager
    def _reserving(self, tenant: Tenant, path: CheckpointPath, *, overwrite: bool) -> Iterator[None]:
        """Keep the path for one writer, and refuse what cannot be written before anything is computed."""
        if self.registry.runs.owner(path.run) not in (None, tenant.name):
            raise RequestError(f"training run {path.run} does not exist", status=404)
        with self._lock:
            old = self._infos.get(path)
            if old is not None and self._is_over(old):
                self._forget(old)
                old = None
            owned = old is not None and old.tenant == tenant.name
            is_taken = path in self._writing or path in self._going or self._folder(path).exists()
            if is_taken and not (overwrite and owned and path not in self._writing):
                raise RequestError(f"{path} exists already, and checkpoints do not change; choose another name")
            self._check_quota(tenant, path, 1 - (old.bytes if old else 0))
            self._writing.add(path)
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard(path)

    @contextmanager
    def _within_quota(self, tenant: Tenant, path: CheckpointPath, size: int) -> Iterator[None]:
        """Reserve `size` bytes of the quota for the block."""
        with self._lock:
            old = self._infos.get(path)
            self._check_quota(tenant, path, size - (old.bytes if old else 0))
            self._reserved[tenant.name] += size
        try:
            yield
        finally:
            with self._lock:
                self._reserved[tenant.name] -= size

    def _check_quota(self, tenant: Tenant, path: CheckpointPath, more: int) -> None:
        most, used = tenant.quotas.checkpoint_bytes, self.used_bytes(tenant.name)
        if most is not None and used + more > most:
            raise RequestError(
                f"{path} does not fit: tenant {tenant.name} has {used} bytes of checkpoints, and its quota is {most};"
                " delete some, or give them a ttl"
            )
        if self._most_bytes is not None and self.used_bytes() + more > self._most_bytes:
            raise RequestError(f"{path} does not fit: this server keeps {self._most_bytes} bytes of checkpoints; delete some")

    def _put(self, part: Path, info: CheckpointInfo) -> None:
        """Give a whole checkpoint its name, in place of an old one if there is one."""
        folder = self._folder(info.path)
        with self._lock:
            if self._pins[info.path]:
                raise RequestError(f"{info.path} is being read, and cannot be overwritten now; choose another name")
            old = folder.with_name(f"{_REPLACED}{folder.name}") if folder.exists() else None
            if old is not None:
                folder.rename(old)
            part.rename(folder)
            self._infos[info.path] = info
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _change(self, info: CheckpointInfo) -> None:
        _write_terms(self._folder(info.path), info)
        self._infos[info.path] = info

    def _forget(self, info: CheckpointInfo) -> None:
        del self._infos[info.path]
        self._going[info.path] = info
        if self._pins[info.path]:
            _write_terms(self._folder(info.path), info, deleted=True)
        else:
            self._remove(info.path)

    def _remove(self, path: CheckpointPath) -> None:
        folder = self._folder(path)
        going = folder.with_name(f".deleted-{secrets.token_hex(8)}")
        if folder.exists():
            folder.rename(going)
        del self._going[path]
        shutil.rmtree(going, ignore_errors=True)

    def _manifest(self, path: CheckpointPath) -> dict[str, FileRecord]:
        file = self._folder(path) / "content" / MANIFEST
        try:
            return files_of(parse(file.read_text(), MANIFEST))
        except (OSError, UnicodeDecodeError):
            raise RequestError(f"{path} is damaged: its {MANIFEST} cannot be read") from None
        except CheckpointError as error:
            raise RequestError(f"{path} is damaged: {error}") from None

    def _check_whole(self, path: CheckpointPath) -> None:
        content = self._folder(path) / "content"
        try:
            _bytes_without_links(content)
            check(content)
        except CheckpointError as error:
            raise RequestError(f"{path} is damaged: {without_folder(str(error), content, path.name)}") from None
        except OSError as error:
            raise RequestError(f"{path} is damaged: a file of it cannot be read ({error.strerror})") from None

    # at start -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        for kind in sorted(self.root.glob("checkpoints/*/*")):
            if kind.name not in KINDS or kind.is_symlink():
                continue
            for leftover in sorted(kind.glob(".*")):
                self._mend(leftover)
            for folder in sorted(path for path in kind.iterdir() if path.is_dir() and not path.is_symlink()):
                self._read_one(CheckpointPath(name_of(kind.parent.name), kind.name, folder.name), folder)

    def _mend(self, leftover: Path) -> None:
        """Remove what a crash left in part; a checkpoint that was about to be overwritten is itself again."""
        target = leftover.with_name(leftover.name.removeprefix(_REPLACED))
        if leftover.name.startswith(_REPLACED) and not target.exists():
            leftover.rename(target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)

    def _read_one(self, path: CheckpointPath, folder: Path) -> None:
        terms: dict[str, Any] = {}
        try:
            terms = object_line((folder / TERMS).read_bytes())
            if terms.get("deleted"):
                shutil.rmtree(folder, ignore_errors=True)
                return
            manifest = parse((folder / "content" / MANIFEST).read_text(), MANIFEST)
            size = sum(record.bytes for record in files_of(manifest).values())
            self._infos[path] = _info(path, manifest["made"], size, public=terms["public"], expires=terms["expires"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, CheckpointError) as error:
            self._say(f"checkpoint {path} is damaged: {error!r}")
            self._keep_damaged(path, folder)

    def _keep_damaged(self, path: CheckpointPath, folder: Path) -> None:
        """Keep what is left of a checkpoint, so that its owner, who is that of its run, hears why and may delete it."""
        if (owner := self.registry.runs.owner(path.run)) is not None:
            self._infos[path] = CheckpointInfo(
                path, owner, folder.stat().st_mtime, 0, damage=f"its {MANIFEST} or {TERMS} cannot be read"
            )


def open_store(root: Path, *, most_bytes: int | None = None, say: Callable[[str], None] = print) -> CheckpointStore:
    """The store below `root`, with what it had before a restart; `most_bytes` as of `CheckpointStore`."""
    return CheckpointStore(root, most_bytes=most_bytes, say=say)


def _info(
    path: CheckpointPath, origin: Mapping[str, Any], size: int, *, public: bool = False, expires: float | None = None
) -> CheckpointInfo:
    return CheckpointInfo(
        path, origin["tenant"], origin["created"], size, origin["made"], origin["user_metadata"], public, expires
    )


def _write_terms(folder: Path, info: CheckpointInfo, *, deleted: bool = False) -> None:
    write_text_atomically(folder / TERMS, json.dumps({"public": info.public, "expires": info.expires, "deleted": deleted}))
    sync_file(folder / TERMS)


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """A folder beside `target`, which vanishes if the block raises; the block gives it its name."""
    part = target.with_name(f".part-{secrets.token_hex(8)}")
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _bytes_without_links(folder: Path) -> int:
    """Bytes of all files below `folder`.

    Raises:
        CheckpointError: there is a link, or something that is neither file nor folder.
    """
    size = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(f"'{path}' is a link or a device, and a checkpoint has files only")
            size += path.stat().st_size if path.is_file() else 0
    return size


def _link(source: str, target: str) -> None:
    """Share a file's bytes where the disk can, else copy them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def without_folder(sentence: str, folder: Path, name: str) -> str:
    """The sentence with `name` in the place of a folder of the server, which is nobody's business."""
    return sentence.replace(f"{folder}/", "").replace(str(folder), name)
