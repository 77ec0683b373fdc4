"""`rollout.speculative`: what its fields need is said in one sentence each."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError
from tests.config.smallest import config

SECTION = "rollout.speculative"


def test_what_may_be_chosen() -> None:
    assert config().rollout.speculative.algorithm == "none"
    config(f"{SECTION}={{algorithm: eagle, draft_model: x, topk: 4, num_steps: 2, num_draft_tokens: 21}}")
    config(f"{SECTION}={{algorithm: mtp, num_draft_tokens: 4}}", "rollout.engine=embedded")
    config(f"{SECTION}.algorithm=ngram", "rollout.engine_args={speculative_ngram_max_trie_depth: 8}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{SECTION}.algorithm=medusa",), "must be 'none', 'mtp', 'ngram', 'standalone', 'eagle' or 'eagle3'"),
        ((f"{SECTION}.num_steps=0",), "num_steps is 0; it must be a whole number of at least 1"),
        ((f"{SECTION}.topk=2",), r"topk needs speculative decoding: set rollout\.speculative\.algorithm, or remove"),
        ((f"{SECTION}.algorithm=eagle",), r"algorithm = 'eagle' needs a draft: set rollout\.speculative\.draft_model"),
        (
            (f"{SECTION}={{algorithm: mtp, draft_model: x}}",),
            r"draft_model is 'x', which rollout\.speculative\.algorithm = 'mtp' does not read; it must be null",
        ),
        (
            (f"{SECTION}={{algorithm: eagle, draft_model: x}}", "rollout.engine=embedded"),
            "algorithm is 'eagle', which rollout.engine = 'embedded' cannot do; it must be 'none', 'mtp', 'ngram'",
        ),
        (
            (f"{SECTION}.algorithm=ngram", "rollout.engine=replay", "rollout.replay_from=x"),
            "algorithm is 'ngram', which rollout.engine = 'replay' cannot do; it must be 'none'",
        ),
        (
            (f"{SECTION}.algorithm=ngram", "rollout.weight_transport=folder", "rollout.servers.urls=['http://a']"),
            "cannot do: whoever starts its servers chooses; it must be 'none'",
        ),
        (
            (f"{SECTION}={{algorithm: ngram, topk: 2, num_draft_tokens: 4}}", "rollout.engine=embedded"),
            "topk is 2, which makes drafts trees, which rollout.engine = 'embedded' cannot verify; it must be 1",
        ),
        ((f"{SECTION}={{algorithm: mtp, topk: 2}}",), r"topk = 2 needs the size of the tree of drafts: set .*num_draft_tokens"),
        (
            (f"{SECTION}={{algorithm: mtp, topk: 2, num_steps: 2, num_draft_tokens: 8}}",),
            "num_draft_tokens is 8, which is more than 2 steps of 2 candidates make; it must be at most 7",
        ),
        (
            (f"{SECTION}={{algorithm: mtp, num_draft_tokens: 7}}",),
            "num_draft_tokens is 7, which is not num_steps \\+ 1.*must be null or 4",
        ),
        (
            ("rollout.engine_args={speculative_algorithm: NGRAM}",),
            r"engine_args\.speculative_algorithm is set by rollout\.speculative\.algorithm; remove it",
        ),
        (
            ("rollout.engine_args={speculative_accept_threshold_single: 0.5}",),
            "speculative_accept_threshold_single is set by megarl, whose responses are distributed as without drafts",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
