"""SGLang's layers with adapters on a CPU: rows get those of their request, also in the output layer, which has few rows."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.world import REPOSITORY

HIDDEN, IDS, PADDED, RANK = 8, 11, 16, 3
SCALES, RANKS = [0.0, 0.5, 2.0], [0, 2, 3]
"""Of no adapters, and of two sets of them."""
OF_REQUEST, LENGTHS, FROM = [1, 0, 2, 1], [5, 3, 4, 2], [3, 3, 0, 1]
"""Which adapters a request has, its tokens, and from which of them on log-probs are asked for."""
OF_SLICES = [
    ([2, 1, 0, 2, 1], [2, 1, 3, 1, 2], RANKS),
    ([2, 1, 2, 2, 1], [1, 1, 1, 1, 1], [0, RANK, RANK]),
    ([1, 1, 2, 2], [1, 2, 1, 3], [0, RANK - 1, RANK - 1]),
]
"""The same, with the adapters' ranks: multiplied by adapters, and all at once."""


def added_by_sglang(path: str) -> None:
    """Write rows, weights and logits of SGLang's layer, of prompts without log-probs, with them, and in passes of 4 rows."""
    from megarl.rollout.engines.sglang.on_cpu import stand_ins

    stand_ins.install(Path(sys.prefix) / "sglang-cpu")
    from megarl.options.lora.served import allow_on_cpu

    allow_on_cpu()
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.layers import ParallelLMHeadWithLoRA

    torch.manual_seed(0)
    base = torch.nn.Linear(HIDDEN, PADDED, bias=False, dtype=torch.float64)
    base.embedding_dim, base.org_vocab_size, base.tp_size = HIDDEN, IDS, 1
    backend = TorchNativeLoRABackend(len(RANKS), torch.device("cpu"))
    head = ParallelLMHeadWithLoRA(base, backend)
    a, b = (torch.randn(len(RANKS), *shape, dtype=torch.float64) for shape in ((RANK, HIDDEN), (IDS, RANK)))
    head.set_lora_info(a, b)
    found = {"a": a, "b": b, "weight": base.weight.detach()}
    for name, with_log_probs, passes in (("last", False, None), ("scored", True, None), ("in passes", True, 4)):
        os.environ["SGLANG_ENABLE_LOGPROB_CHUNK"] = "1" if passes else "0"
        os.environ["SGLANG_LOGPROB_CHUNK_SIZE"] = str(passes or 0)
        batch = batch_of(LENGTHS, FROM, with_log_probs=with_log_probs)
        backend.prepare_lora_batch(batch, OF_REQUEST, RANKS, SCALES, use_cuda_graph=False)
        owners = [
            owner for owner, rows in zip(OF_REQUEST, rows_of(with_log_probs=with_log_probs), strict=True) for _ in range(rows)
        ]
        rows = torch.randn(len(owners), HIDDEN, dtype=torch.float64)
        parts = []
        for number, part in enumerate(rows.split(passes or len(rows))):
            if passes:
                head.set_lm_head_pass(number)
            parts.append(head(part).detach())
        head.reset_lm_head_pass()
        found[name] = {"rows": rows, "owners": owners, "logits": torch.cat(parts)}
    found["slices"] = [added_by_slices(backend, *case) for case in OF_SLICES]
    torch.save(found, path)


def batch_of(lengths: list[int], first: list[int], *, with_log_probs: bool) -> Any:
    """A batch of prompts as SGLang describes it; log-probs are asked for from token `first` of each on."""
    mode = SimpleNamespace(
        is_idle=lambda: False, is_decode=lambda: False, is_extend=lambda: True, is_target_verify=lambda: False,
        is_draft_extend_v2=lambda: False,
    )  # fmt: skip
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(lengths), return_logprob=with_log_probs, extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths, extend_logprob_start_lens_cpu=first,
    )  # fmt: skip


def added_by_slices(backend: Any, requests: list[int], lengths: list[int], ranks: list[int]) -> dict[str, Any]:
    """A layer of three products in one, as queries, keys and values are: what SGLang adds to rows of requests by turns."""
    widths = [6, 4, 4]
    batch = batch_of(lengths, lengths, with_log_probs=False)
    backend.prepare_lora_batch(batch, requests, ranks, SCALES, use_cuda_graph=False)
    bounds = torch.tensor([0, 6, 10, 14])
    made = {
        "rows": torch.randn(sum(lengths), HIDDEN, dtype=torch.float64),
        "before": torch.randn(sum(lengths), sum(widths), dtype=torch.float64),
        "a": torch.randn(len(RANKS), 3 * RANK, HIDDEN, dtype=torch.float64),
        "b": torch.randn(len(RANKS), sum(widths), RANK, dtype=torch.float64),
    }
    output = backend.run_qkv_lora(made["rows"], made["a"], made["b"], bounds, bounds, 6, base_output=made["before"].clone())
    owners = [owner for owner, length in zip(requests, lengths, strict=True) for _ in range(length)]
    return made | {"owners": owners, "ranks": ranks, "bounds": bounds.tolist(), "output": output}


def rows_of(*, with_log_probs: bool) -> list[int]:
    """The number of rows that the layer is given of each request: at least its last one."""
    asked = FROM if with_log_probs else LENGTHS
    return [max(1, length - first) for length, first in zip(LENGTHS, asked, strict=True)]


def test_rows_have_the_adapters_of_their_requests(tmp_path: Path) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    path = tmp_path / "found.pt"
    code = f"from tests.options.lora.test_served_rows import added_by_sglang; added_by_sglang({str(path)!r})"
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=600, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    )
    found = torch.load(path)
    for name in ("last", "scored", "in passes"):
        rows, owners, logits = (found[name][part] for part in ("rows", "owners", "logits"))
        expected = rows @ found["weight"].T
        for number, owner in enumerate(owners):
            a, b = found["a"][owner, : RANKS[owner]], found["b"][owner, :, : RANKS[owner]]
            expected[number, :IDS] += SCALES[owner] * b @ (a @ rows[number])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12, msg=name)
    for made in found["slices"]:
        expected = made["before"].clone()
        for number, owner in enumerate(made["owners"]):
            rank = made["ranks"][owner]
            for part, (left, right) in enumerate(pairwise(made["bounds"])):
                a, b = made["a"][owner, part * rank : (part + 1) * rank], made["b"][owner, left:right, :rank]
                expected[number, left:right] += SCALES[owner] * b @ (a @ made["rows"][number])
        torch.testing.assert_close(made["output"], expected, rtol=0, atol=1e-12)
