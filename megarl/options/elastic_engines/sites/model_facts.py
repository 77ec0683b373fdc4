"""Digests that tell whether two folders have the same model, without reading all of it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import xxhash

from megarl.errors import ConfigError, ModelError
from megarl.observe.record_lines import object_line
from megarl.options.elastic_engines.sites.wire import ModelFacts, SiteFacts
from megarl.version import __version__

READ_BYTES = 64 << 10
"""Of each tensor; all of it is compared later, when weights come."""
MOST_HEADER_BYTES = 128 << 20
SAYS_NOTHING = ("_name_or_path", "transformers_version")
"""Entries of config.json that differ between copies of one model."""


def model_facts(folder: str | Path) -> ModelFacts:
    """Digests of the Hugging Face folder `folder`.

    Of each tensor they take in its name, dtype, shape and first 64 KiB, whichever file it is in.

    Raises:
        ModelError: a file is missing, or cannot be read.
    """
    folder = Path(folder)
    try:
        config = object_line((folder / "config.json").read_bytes())
        for name in SAYS_NOTHING:
            config.pop(name, None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        tokenizer = folder / "tokenizer.json"
        spelling = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else "none"
        return ModelFacts(digest, spelling, _weights(folder))
    except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
        raise ModelError(f"{folder} cannot be read as a Hugging Face folder: {error}") from None


def _weights(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors; it must be a Hugging Face folder with weights")
    tensors: dict[str, bytes] = {}
    for path in files:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MOST_HEADER_BYTES:
                raise ModelError(f"{path} is no safetensors file")
            header = object_line(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                said = json.dumps([name, entry["dtype"], entry["shape"]]).encode()
                tensors[name] = xxhash.xxh3_128_digest(said + file.read(min(READ_BYTES, end - start)))
    return xxhash.xxh3_128_hexdigest(b"".join(tensors[name] for name in sorted(tensors)))


def refusal(megarl: str, model: ModelFacts, facts: SiteFacts) -> str | None:
    """Why an engine with this version of megarl and this model cannot join; None: it can."""
    if megarl != facts.megarl:
        return f"megarl here is {megarl}, the run's is {facts.megarl}: install megarl {facts.megarl}"
    for what, name in (("config.json", "config"), ("tokenizer.json", "tokenizer"), ("weights", "weights")):
        if getattr(model, name) != getattr(facts.model, name):
            verb = "are" if what == "weights" else "is"
            return f"{what} of the model here {verb} not the run's: name a copy of the run's model by --model"
    return None


def check_fits(model: ModelFacts, facts: SiteFacts) -> None:
    """Raise ConfigError, one sentence, if an engine of this machine cannot join the run that told `facts`."""
    why = refusal(__version__, model, facts)
    if why is None and facts.room < 1:
        why = "the run has as many engines as rollout.max_engines allows"
    if why is not None:
        raise ConfigError(why)
