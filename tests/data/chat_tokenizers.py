"""A small tokenizer for the tests of chat templates and masks: one token per byte, after its special tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('!')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Shortens an assistant turn once another message follows it, as templates do that drop earlier reasoning."""


def byte_tokenizer(template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """`<s>` 0, `</s>` 1 (end), `<|start|>` 2, `<|end|>` 3, then one id per byte in the order of ByteLevel's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def ids_of(*pieces: str) -> list[int]:
    """The ids of `pieces` by hand: a special token is one id, any other text one id per byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    places = {letter: len(SPECIAL) + number for number, letter in enumerate(sorted(letters.values()))}
    ids: list[int] = []
    for piece in pieces:
        ids += [SPECIAL.index(piece)] if piece in SPECIAL else [places[letters[byte]] for byte in piece.encode()]
    return ids


def family_tokenizer(
    template: str,
    *,
    special: tuple[str, ...],
    plain: tuple[str, ...] = (),
    eos: str | None = None,
    bos: str | None = None,
    folder: str = "",
) -> Any:
    """One id per byte behind added tokens, of which `plain` are not special; it comes from `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate([*special, *plain, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    named = {"eos_token": eos} | ({} if bos is None else {"bos_token": bos})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
    tokenizer.name_or_path = folder
    return tokenizer
