"""Speculative decoding of SGLang's servers: its arguments are SGLang's, its counts are read, what is not exact is refused."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.errors import ConfigError, EngineError
from megarl.options.prediction.column import DraftCounts
from megarl.options.prediction.section import SpeculativeConfig
from megarl.options.prediction.sglang import NAMES, AnsweredDrafts, check_servers, draft_arguments
from megarl.rollout.engines.protocol import EnginePlace
from megarl.rollout.engines.sglang.arguments import server_arguments
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def config_of(folder: Path, speculative: dict[str, Any], **others: Any) -> Config:
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}
    rollout = {"engine": "sglang", "speculative": speculative} | others.pop("rollout", {})
    tree = {"model": {"path": str(folder)}, "data": {"train": task}, "rewards": [{"name": "exact_number"}], "rollout": rollout}
    return parse_config(tree | others)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        (
            {"algorithm": "mtp", "num_steps": 2},
            {
                "speculative_algorithm": "NEXTN",
                "speculative_num_steps": 2,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 3,
                "speculative_draft_model_path": "model",
                "enable_draft_weights_cpu_backup": True,
            },
        ),
        (
            {"algorithm": "ngram", "num_steps": 6, "topk": 4, "num_draft_tokens": 12},
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_steps": 6,
                "speculative_ngram_max_bfs_breadth": 4,
                "speculative_num_draft_tokens": 12,
            },
        ),
        (
            {"algorithm": "eagle3", "num_steps": 3, "topk": 4, "num_draft_tokens": 16, "draft_model": "d"},
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 16,
                "speculative_draft_model_path": "d",
                "enable_draft_weights_cpu_backup": True,
            },
        ),
    ],
)
def test_the_section_becomes_arguments_of_sglang(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    found = draft_arguments(SpeculativeConfig.model_validate(settings), "model")
    assert found == expected
    assert found.keys() <= server_arguments()


def test_servers_are_started_with_them(folder: Path) -> None:
    config = config_of(folder, {"algorithm": "standalone", "draft_model": "d", "num_steps": 4})
    options = SglangEngine.options(config, EnginePlace(0, 1, "cuda", folder))
    line = ServerOptions(str(folder), **options).arguments(1, "none")
    assert "--speculative-algorithm STANDALONE --speculative-num-steps 4 --speculative-eagle-topk 1" in " ".join(line)
    assert "--speculative-num-draft-tokens 5 --speculative-draft-model-path d" in " ".join(line)


def test_sglang_has_the_algorithms_and_accepts_exactly_by_default() -> None:
    """Read from its source: importing it takes CUDA's kernels."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "srt")
    fields = ast.parse((source / "arg_groups/fields/spec.py").read_text())
    section = next(node for node in fields.body if isinstance(node, ast.ClassDef))
    defaults = {
        node.target.id: node.value.value
        for node in section.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant)
    }
    assert defaults["speculative_accept_threshold_single"] == defaults["speculative_accept_threshold_acc"] == 1.0
    known = (source / "speculative/spec_info.py").read_text() + (source / "speculative/spec_registry.py").read_text()
    assert all(f"{name} = auto()" in known or f'"{name}"' in known for name in NAMES.values())


def test_counts_of_drafts_are_read_from_the_answer() -> None:
    info = {"output_token_logprobs": [[-1.0, 5]], "finish_reason": {"type": "length"}}
    assert AnsweredDrafts().read({"meta_info": info}, 3, "url") is None
    info |= {"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 7, "spec_accept_rate": 7 / 12}
    assert AnsweredDrafts().read({"meta_info": info}, 3, "url") == DraftCounts(4, 12, 7)
    with pytest.raises(EngineError, match="answered something that is no generation"):
        AnsweredDrafts().read({"meta_info": {"spec_verify_ct": None}}, 3, "url")


EXPERTS = {"replay": "engine"}


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"algorithm": "ngram"}, {"rollout": {"min_p": 0.1}}, r"rollout\.min_p is 0\.1, which SGLang's servers leave out"),
        (
            {"algorithm": "ngram"},
            {"rollout": {"top_p": 0.9, "top_k": 20}},
            r"rollout\.top_p is 0\.9, which SGLang's servers judge by what top_k has left.* 1 where top_k is set",
        ),
        (
            {"algorithm": "ngram"},
            {"evaluations": [{"name": "a", "rows": {"name": "chain_sum"}, "min_p": 0.2, "temperature": 1.0}]},
            r"evaluations\[0\]\.min_p is 0\.2",
        ),
        ({"algorithm": "ngram"}, {"policy": {"routing": EXPERTS}}, r"policy\.routing\.replay is 'engine', which asks for"),
        (
            {"algorithm": "mtp"},
            {},
            r"rollout\.speculative\.algorithm is 'mtp', which needs a layer for multi-token prediction as SGLang knows it",
        ),
    ],
)
def test_what_is_not_exact_is_refused(folder: Path, settings: dict[str, Any], others: dict[str, Any], message: str) -> None:
    config = config_of(folder, settings, **others)
    with pytest.raises(ConfigError, match=message):
        check_servers(config, "cuda")


def test_on_a_cpu_servers_are_refused(folder: Path) -> None:
    config = config_of(folder, {"algorithm": "ngram"})
    check_servers(config, "cuda")
    with pytest.raises(ConfigError, match=r"which SGLang's servers do not do exactly on a CPU: they take"):
        check_servers(config, "cpu")
