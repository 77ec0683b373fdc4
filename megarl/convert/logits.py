"""The last check of a conversion: the same prompts through megatron-core and through transformers, logits side by side."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.format.safe_pickle import check_pickles
from megarl.convert.sources import ConversionSource, DistSource, HFSource
from megarl.errors import CheckpointError, DataError
from megarl.models.transformers_names import config_in_transformers, loader_of
from megarl.system.hidden_bars import hide_bars

TOLERANCE = 1e-3
"""Share of the largest logit: further apart, the two are not the same model computed in float32."""


@dataclass(frozen=True)
class LogitReport:
    """The comparison over `tokens` positions: largest |difference|, largest |logit|, share of positions with the same best."""

    tokens: int
    largest_difference: float
    largest_logit: float
    same_best: float

    @property
    def agrees(self) -> bool:
        """Return whether the two are the same model."""
        return self.largest_difference <= TOLERANCE * self.largest_logit


def compare_logits(left: ConversionSource, right: ConversionSource, prompts: Path) -> LogitReport:
    """Logits of every position of every prompt, float32 on the CPU: one folder through transformers, the other through
    megatron-core in a process of its own (the distributed checkpoint, or the first of two Hugging Face folders).

    `prompts` holds one prompt a line: text, or a JSON list of token ids. Both models are in memory at once at no time.

    Raises:
        CheckpointError: neither folder is one that transformers can load, or reading the other one could run code.
        DataError: the prompts cannot be read.
    """
    through_megatron, through_transformers = (right, left) if isinstance(right, DistSource) else (left, right)
    if not isinstance(through_transformers, HFSource):
        raise CheckpointError(
            f"'{left.path}' and '{right.path}' are both distributed checkpoints, but --prompts compares one with a Hugging "
            "Face folder, which transformers can load"
        )
    is_dist = isinstance(through_megatron, DistSource)
    if is_dist:
        check_pickles(through_megatron.path)
    token_ids = read_prompts(prompts, through_transformers.path)
    expected = _transformers_logits(str(through_transformers.path), token_ids)
    arguments = (str(through_megatron.companions), str(through_megatron.path) if is_dist else None, token_ids)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        actual = process.submit(_megatron_logits, *arguments).result()
    differences = [(a - b).abs().max() for a, b in zip(actual, expected, strict=True)]
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(actual, expected, strict=True)]
    return LogitReport(
        tokens=sum(map(len, token_ids)),
        largest_difference=float(torch.stack(differences).max()),
        largest_logit=float(torch.stack([logits.abs().max() for logits in expected]).max()),
        same_best=float(torch.cat(same).float().mean()),
    )


def read_prompts(path: Path, model: Path) -> list[list[int]]:
    """Token ids of each line of a file.

    Raises:
        DataError: the file is missing or empty, or has text while the model has no tokenizer.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts '{path}' cannot be read: {error}") from None
    if not lines:
        raise DataError(f"prompts '{path}' is empty; it must hold a prompt a line")
    token_ids = [_ids_of_json(line) for line in lines]
    if any(ids is None for ids in token_ids):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(f"prompts '{path}' holds text, but '{model}' has no tokenizer: {error}") from None
        token_ids = [tokenizer.encode(line) if ids is None else ids for line, ids in zip(lines, token_ids, strict=True)]
    return [ids for ids in token_ids if ids]


def _ids_of_json(line: str) -> list[int] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(item, int) for item in value) else None


def _transformers_logits(folder: str, token_ids: Sequence[list[int]]) -> list[Tensor]:
    """`[T, V]` of each prompt."""
    hide_bars()
    config = config_in_transformers(folder)
    model = loader_of(folder)(folder, config=config, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].clone() for ids in token_ids]


def _megatron_logits(config_folder: str, checkpoint: str | None, token_ids: Sequence[list[int]]) -> list[Tensor]:
    """`[T, V]` of each prompt, from a distributed checkpoint or from the folder that also has the config; one rank."""
    from megarl import platform

    warnings.simplefilter("ignore")  # megatron-core's own, about packages that a CPU does not have
    installed = platform.install()
    from megatron.core import dist_checkpointing

    from megarl.config.layout import Layout
    from megarl.megatron.build import build_model, initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.weights import load_weights
    from megarl.models.hf_folder import HFFolder
    from megarl.models.registry import architecture_for

    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group(
            installed.collective_backend, init_method=f"file://{rendezvous}/store", rank=0, world_size=1
        )
        initialize_layout(Layout(), seed=0)
        folder = HFFolder(config_folder)
        architecture, options = architecture_for(folder.config), ModelOptions(config_folder, Layout(), trainable=False)
        model: Any = build_model(options, folder)[0]
        if checkpoint is None:
            load_weights([model], options, folder, architecture.weight_map(folder.config))
        else:
            # `compare_logits` has looked at its pickles
            state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
            model.load_state_dict(state["model"], strict=True)
        traits = architecture.traits(folder.config)
        logits = [_logits(model, options, ids) / traits.logits_divisor for ids in token_ids]
        if (cap := traits.logits_cap) is not None:
            logits = [(of_ids / cap).tanh() * cap for of_ids in logits]
        torch.distributed.destroy_process_group()
    return logits


def _logits(model: Any, options: Any, ids: list[int]) -> Tensor:
    """The decoder's output at each token times the output matrix."""
    from megarl.data.stream import Response, Unit
    from megarl.megatron.step import forward

    hidden: list[Tensor] = []
    handle = model.decoder.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    # the last token of a response is never fed, so one more stands behind the prompt's own
    response = torch.tensor([*ids[1:], 0])
    forward(
        [model], options, [[Unit(torch.tensor(ids[:1]), [Response(0, response, torch.ones_like(response, dtype=torch.bool))])]]
    )
    handle.remove()
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return (hidden.pop()[: len(ids), 0] @ weight.T).detach().cpu()
