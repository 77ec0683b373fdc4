"""Stop texts are found at the token with which the decoded text of a response first has one, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.config.stop_checks import UNDECIDED
from megarl.data.stop_finder import StopFinder, check_stops_of, decode_by
from megarl.errors import ConfigError
from tests.data.chat_tokenizers import byte_tokenizer, ids_of


def _fast(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def pieces_with_bytes() -> Any:
    """As Llama 2 has it: pieces that begin with a space, which the first one loses, and bytes for what has no piece."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "\u2581", "b", "\u2581b", "ab", "\n", "\u00e9"]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _fast(tokenizer)


def word_pieces() -> Any:
    """As BERT has it: words with a space before them, and their ends without."""
    words = ["<unk>", "a", "b", "##a", "##b", "ab", ".", "##ab"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _fast(tokenizer)


def words_alone() -> Any:
    """Words that the decoder puts one space between."""
    words = ["<unk>", "a", "b", "c", "ab"]
    return _fast(Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")))


MERGES = (("a", "b"), ("ab", "a"), ("\u00c3", "\u00a9"), ("\u010a", "\u010a"), ("b", "\u00c3"))
TOKENIZERS = {
    "bytes": (byte_tokenizer(), [*ids_of("<s>", "<|end|>", "ab\n \u00e9\u4f60\U0001f600"), 200, 255]),
    "merged bytes": (byte_tokenizer(merges=MERGES), [*ids_of("<|end|>", "ab\n\u00e9\u4f60"), 260, 261, 262, 263, 264]),
    "pieces": (pieces_with_bytes(), [*range(257, 264), 1 + 0xC3, 1 + 0xA9, 1 + 0xE4, 1 + 0xBD, 1 + 0xA0, 1 + 0xFF]),
    "word pieces": (word_pieces(), [1, 2, 3, 4, 5, 6, 7]),
    "words": (words_alone(), [1, 2, 3, 4]),
}


def first(ids: Sequence[int], texts: Sequence[str], tokenizer: Any) -> int | None:
    """As anybody would write it: the first beginning of the response whose text has a stop."""
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(stop in text for stop in texts):
            return length
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_token_is_that_of_a_search_through_every_beginning(name: str) -> None:
    tokenizer, choices = TOKENIZERS[name]
    decode, numbers, found = decode_by(tokenizer), random.Random(name), 0
    for _ in range(400):
        ids = numbers.choices(choices, k=numbers.randrange(1, 40))
        text, stops = tokenizer.decode(ids, skip_special_tokens=False), list[str]()
        for _ in range(numbers.randrange(1, 4)):
            start = numbers.randrange(len(text) + 1)
            stops.append(text[start : start + numbers.randrange(1, 9)])
        stops = [stop for stop in stops if stop and UNDECIDED not in stop] or ["never said"]
        expected = first(ids, stops, tokenizer)
        assert StopFinder(stops, decode).first(ids) == expected, (ids, stops)
        cut = numbers.randrange(len(ids))
        continued = StopFinder(stops, decode)
        if continued.first(ids[:cut]) is None:
            behind = continued.first(ids[cut:])
            assert (None if behind is None else cut + behind) == expected, "a response that is continued"
        found += expected is not None
    assert found > 100


@pytest.mark.parametrize(
    ("pieces", "stop", "count"),
    [
        (["a", "<|end|>", "b"], "<|end|>", 2),
        (["a", "<|end|>", "b"], "a<|end|>b", 3),
        (["\u00e9", "x"], "\u00e9", 2),
        (["\U0001f600", "\n"], "\n", 5),
        (["a\u00e9"], "a", 1),
    ],
)
def test_special_tokens_are_text_and_half_a_character_is_none(pieces: list[str], stop: str, count: int) -> None:
    assert StopFinder([stop], decode_by(byte_tokenizer())).first(ids_of(*pieces)) == count


def test_a_token_that_ends_a_stop_and_begins_a_character_is_the_last() -> None:
    tokenizer = byte_tokenizer(merges=MERGES)
    ids = [*ids_of("a"), 264, *ids_of("\u00e9")[1:]]  # "a", "b" with the first byte of \u00e9, its second byte
    assert tokenizer.decode(ids) == "ab\u00e9"
    assert StopFinder(["ab"], decode_by(tokenizer)).first(ids) == 2


def test_bytes_that_are_never_a_character_do_not_make_the_search_longer_and_longer() -> None:
    decoded = list[int]()

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    tokenizer = byte_tokenizer()
    decode, ids = decode_by(tokenizer), [*([255] * 300), *ids_of("stop")]
    tokens = StopFinder(["stop"], counted).first(ids)
    assert tokens == first(ids, ["stop"], tokenizer) == 304
    assert sum(decoded) < 40 * len(ids)


@pytest.mark.parametrize("before", range(12))
def test_a_character_is_found_behind_any_number_of_bytes_that_are_none(before: int) -> None:
    tokenizer = byte_tokenizer()
    ids = [*[tokenizer.convert_tokens_to_ids("\u00ff")] * before, *ids_of("\u00e9")]
    assert StopFinder(["\u00e9"], decode_by(tokenizer)).first(ids) == first(ids, ["\u00e9"], tokenizer) == before + 2


def test_a_text_without_tokens_and_a_token_that_is_none_are_refused_by_name() -> None:
    tokenizer = words_alone()
    with pytest.raises(ConfigError, match=r"rollout\.stop\[1\] is 'z', which cannot be encoded: the model's tokenizer has no"):
        check_stops_of(tokenizer, "rollout", ["a", "z"], [])
    with pytest.raises(ConfigError, match=r"evaluations\[0\]\.stop_token_ids\[0\] is 5; it must be below 5, the tokenizer's"):
        check_stops_of(tokenizer, "evaluations[0]", [], [5])
    check_stops_of(tokenizer, "rollout", ["a", "c"], [0, 4])
    check_stops_of(byte_tokenizer(), "rollout", ["\u4f60"], [3])
