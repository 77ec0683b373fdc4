"""Answers of `megarl chat` end behind their stops, each as if it were the only one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.observe.chat import chat
from tests.data.chat_tokenizers import byte_tokenizer
from tests.rollout.tiny import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes that knows no end token."""
    path = tmp_path_factory.mktemp("talker")
    tokenizer = byte_tokenizer(None)
    torch.manual_seed(0)
    sizes = TINY.to_dict() | {"vocab_size": len(tokenizer), "eos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes)).float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def said(folder: Path, lines: list[str], **stops: object) -> list[str]:
    """What was printed for each line, up to 40 tokens."""
    console = Console(record=True, width=500, quiet=False)
    answers = []
    for line in lines:
        with console.capture() as printed:
            chat(folder, console, max_new_tokens=40, temperature=0.0, lines=[line], **stops)  # type: ignore[arg-type]
        answers.append(printed.get().removesuffix("\n"))
    return answers


def test_an_answer_ends_behind_the_token_that_completes_a_stop(folder: Path) -> None:
    [whole] = said(folder, ["hello"])
    readable = [at for at in range(4, len(whole) - 2) if "\ufffd" not in whole[at : at + 3]]
    stop = whole[readable[0] : readable[0] + 3]
    first = whole.index(stop) + 3
    assert first < len(whole)
    assert said(folder, ["hello"] * 2, stop=[stop]) == [whole[:first]] * 2
    assert said(folder, ["hello"], stop=["never said", whole[first - 2 :]]) == [whole]
    token = byte_tokenizer()(stop[0], add_special_tokens=False)["input_ids"][-1]
    [by_token] = said(folder, ["hello"], stop_token_ids=[token])
    assert whole.startswith(by_token)
    assert len(by_token) <= first
