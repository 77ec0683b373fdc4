"""One answer of two servers: what each of them knows, bytes of experts among it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.options.disaggregation.client import joined, same_version


def encoded(experts: npt.NDArray[np.int32]) -> str:
    """Experts `[tokens, layers, k]` as SGLang answers them."""
    return base64.b64encode(experts.tobytes()).decode()


def answer(ids: list[int], reason: str = "length", **info: Any) -> dict[str, Any]:
    log_probs = [[-0.5, token, None] for token in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": log_probs, **info}}


def test_the_prompts_experts_and_hits_come_from_the_one_that_prefills_and_all_else_from_the_other() -> None:
    """A prompt of 3 tokens and a response of 4, whose last one was never computed with."""
    of_prompt = np.arange(3 * 2 * 2, dtype=np.int32).reshape(3, 2, 2)
    of_both = 100 + np.arange(6 * 2 * 2, dtype=np.int32).reshape(6, 2, 2)
    prefilled = answer([7], cached_tokens=2, routed_experts=encoded(of_prompt))
    decoded = answer([7, 8, 9, 10], cached_tokens=3, routed_experts=encoded(of_both))
    whole = joined(prefilled, decoded)
    assert whole["output_ids"] == [7, 8, 9, 10]
    assert whole["meta_info"]["cached_tokens"] == 2
    assert whole["meta_info"]["output_token_logprobs"] == decoded["meta_info"]["output_token_logprobs"]
    found = np.frombuffer(base64.b64decode(whole["meta_info"]["routed_experts"]), np.int32).reshape(-1, 2, 2)
    np.testing.assert_array_equal(found, np.concatenate([of_prompt, of_both[3:]]))
    assert "routed_experts" not in joined(answer([7]), answer([7, 8]))["meta_info"]


def test_an_answer_that_was_stopped_has_as_many_tokens_as_log_probs() -> None:
    stopped = answer([7, 8, 9], "abort")
    del stopped["meta_info"]["output_token_logprobs"][2]
    assert joined(answer([7]), stopped)["output_ids"] == [7, 8]
    del stopped["meta_info"]["output_token_logprobs"]
    assert joined(answer([7]), stopped)["output_ids"] == []


def test_answers_of_two_versions_are_no_answer() -> None:
    assert same_version(answer([1], weight_version="3"), answer([1], weight_version="3"))
    assert not same_version(answer([1], weight_version="3"), answer([1], weight_version="4"))
