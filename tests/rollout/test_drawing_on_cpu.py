"""Tokens that SGLang draws on a CPU are drawn from the distribution that it gives, with one random number a row."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from megarl.rollout.engines.sglang.on_cpu.drawing import draw_rows


def test_tokens_are_drawn_from_the_distribution() -> None:
    torch.manual_seed(0)
    probs = (torch.randn(60) * 2).softmax(-1)
    impossible = [0, 7, 59]  # taken away by top-p, at both ends too
    probs[impossible] = 0
    tokens = draw_rows((probs / probs.sum()).expand(20_000, -1))
    assert (tokens.dtype, tokens.shape) == (torch.int32, (20_000,))
    counts, expected = Counter(tokens.tolist()), (probs.double() / probs.double().sum() * 20_000).tolist()
    assert not any(counts[token] for token in impossible)
    likely = [token for token in range(60) if expected[token] >= 5]
    seen, shares = [counts[token] for token in likely], [expected[token] for token in likely]
    assert chisquare([*seen, 20_000 - sum(seen)], [*shares, 20_000 - sum(shares)]).pvalue > 0.01


def test_ranks_with_one_seed_draw_the_same() -> None:
    probs = torch.randn(64, 500).softmax(-1)
    torch.manual_seed(3)
    first = draw_rows(probs)
    torch.manual_seed(3)
    assert torch.equal(draw_rows(probs), first)
    assert not torch.equal(draw_rows(probs), first)


IN_A_SERVER = """
import sys, torch
from megarl.rollout.engines.sglang import launch
launch._prepare_for_cpu(["--model-path", sys.argv[1]])
from sglang.srt.layers import sampler
from megarl.rollout.engines.sglang.on_cpu import drawing
probs = torch.randn(8, 50).softmax(-1)
torch.manual_seed(0)
drawn = sampler.sampling_from_probs_torch(probs)
torch.manual_seed(0)
print(torch.equal(drawn, drawing.draw_rows(probs)))
sampler.sampling_from_probs_torch = lambda *given: given
drawing.install()
print(sampler.sampling_from_probs_torch(1, 2, 3) == (1, 2, 3))
"""


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_a_server_draws_so_where_requests_have_no_seeds(tiny_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", IN_A_SERVER, str(tiny_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["True", "True"]
