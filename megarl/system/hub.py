"""The Hugging Face hub: which names are meant there, and copies of models and data sets in this machine's cache.

Downloads are the hub library's own, with its environment: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. Who loads what was
downloaded is given a local folder and knows nothing of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Literal

from megarl.errors import MegarlError

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files that megarl and SGLang read of a model: no weights in other formats, no code."""
NOT_OF_MODELS = ("original/*", "onnx/*")
_NAME = re.compile(r"(?P<scheme>hf://(datasets/|models/)?)?(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"(?P<cache>.+)/models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>[0-9a-f]{40})/?")


@dataclass(frozen=True)
class HubRepo:
    """A repository of the hub at a branch, tag or commit; None: its main branch."""

    kind: Literal["model", "dataset"]
    repo: str
    revision: str | None

    @classmethod
    def meant_by(cls, kind: Literal["model", "dataset"], path: str) -> HubRepo | None:
        """The repository that `ORG/NAME` or `ORG/NAME@REVISION` names; None where `path` is local.

        A local file or folder of that name wins, and so does a local folder `ORG`: then the name inside it is misspelled.
        With `hf://` in front the hub is meant, whatever is here.
        """
        match = _NAME.fullmatch(path)
        if match is None or (match["scheme"] is None and (Path(path).exists() or Path(path).parts[0] in (".", "..", "~"))):
            return None
        if match["scheme"] is None and Path(match["repo"]).parent.is_dir():
            return None
        return cls(kind, match["repo"], match["revision"])

    def download(self, files: Sequence[str], without: Sequence[str] = (), *, error: type[MegarlError], named: str) -> Path:
        """The folder in the cache that has the `files` (patterns) of the repository but those of `without`.

        What is in the cache already is not downloaded again; without a network it must all be there.

        Raises:
            MegarlError: an `error` that begins with `named`, the field and its value: there is no such repository or
                revision, it may not be read, or there is no network and no copy.
        """
        from huggingface_hub import snapshot_download

        with self._telling(error, named):
            return Path(
                snapshot_download(
                    self.repo,
                    repo_type=self.kind,
                    revision=self.revision,
                    allow_patterns=list(files),
                    ignore_patterns=list(without),
                )
            )

    def files(self, *, error: type[MegarlError], named: str) -> tuple[Path, list[str]]:
        """The folder of the revision in the cache, with the repository's card in it, and the names of all its files, sorted.

        Without a network the files are those in the cache. Raises as `download` does.
        """
        from huggingface_hub import HfApi, constants

        folder = self.download(["README.md"], error=error, named=named)
        if constants.HF_HUB_OFFLINE:
            return folder, sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        with self._telling(error, named):
            return folder, sorted(HfApi().list_repo_files(self.repo, repo_type=self.kind, revision=folder.name))

    def pinned(self, folder: Path) -> HubRepo:
        """This repository at the commit that `folder`, which `download` gave, is a copy of."""
        return HubRepo(self.kind, self.repo, folder.name)

    @contextmanager
    def _telling(self, error: type[MegarlError], named: str) -> Iterator[None]:
        """The hub library's exceptions as sentences."""
        import httpx
        from huggingface_hub import constants, errors

        what, at = {"model": "model", "dataset": "data set"}[self.kind], constants.ENDPOINT
        here = f"{named}, which is no local folder"
        try:
            yield
        except errors.GatedRepoError:
            page = f"{at}/{'datasets/' * (self.kind == 'dataset')}{self.repo}"
            raise error(f"{named}, whose readers must accept its terms: accept them at {page}, and set HF_TOKEN") from None
        except errors.RevisionNotFoundError:
            raise error(f"{named}, but {self.repo} at {at} has no branch, tag or commit '{self.revision}'") from None
        except errors.RepositoryNotFoundError:
            raise error(
                f"{here}, and {at} has no {what} of that name; it must be a local folder, or ORG/NAME of a {what} there (of a "
                "private one with HF_TOKEN set)"
            ) from None
        except errors.LocalEntryNotFoundError as lost:
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{at} cannot be reached"
            part = "not all of" if isinstance(lost, errors.IncompleteSnapshotError) else "no copy of"
            raise error(
                f"{here}; {why}, and {part} the {what} is in {constants.HF_HUB_CACHE}: give a local folder, or download it "
                f"where there is a network (hf download {self.repo}{' --repo-type dataset' * (self.kind == 'dataset')})"
            ) from None
        except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as other:
            reason = (str(other).splitlines() or [type(other).__name__])[0]
            raise error(f"{here}, and cannot be downloaded from {at}: {reason}") from other


def exactly(files: Sequence[str]) -> list[str]:
    """Patterns that match these files alone."""
    return [escape(file) for file in files]


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache of the hub's library: what another machine needs for a copy of it at the same path."""

    folder: str
    repo: str
    commit: str
    cache: str

    @classmethod
    def at(cls, folder: str) -> CachedModel | None:
        """The model in `folder`, if that is in such a cache."""
        match = _SNAPSHOT.fullmatch(str(Path(folder).absolute()))
        return cls(match[0], f"{match['owner']}/{match['name']}", match["commit"], match["cache"]) if match else None

    def download(self, endpoint: str, token: str | None) -> None:
        """Have the same files in the same folder on the machine that calls this.

        Raises:
            OSError: the hub cannot be reached or refuses.
        """
        from huggingface_hub import snapshot_download

        snapshot_download(
            self.repo,
            revision=self.commit,
            cache_dir=self.cache,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(NOT_OF_MODELS),
            endpoint=endpoint,
            token=token,
        )
