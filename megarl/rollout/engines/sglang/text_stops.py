"""Stop texts in a server of megarl's own, which has no tokenizer (0.5.23): behind every token, as the embedded engine looks.

SGLang's own stops need a server with a tokenizer, and miss texts that are spelled in more tokens than that would take. Here a
request brings its texts and the folder of the tokenizer as `custom_params`, which SGLang passes on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from megarl.data.stop_finder import ModelTexts, StopFinder

TEXTS, FOLDER, BEGUN = "megarl_stop", "megarl_tokenizer", "megarl_begun"
"""Keys in `custom_params`: texts, folder of the tokenizer, and how many of the prompt's last tokens are of the response."""


def asked(texts: Sequence[str], folder: str, begun: int) -> dict[str, Any]:
    """The fields of a request's sampling parameters; none without `texts`."""
    return {"custom_params": {TEXTS: [*texts], FOLDER: folder, BEGUN: begun}} if texts else {}


_texts_of = cache(ModelTexts)


def _finder(request: Any, given: dict[str, Any]) -> StopFinder:
    """The finder of a request, which has taken the tokens that were sampled before it."""
    finder = StopFinder(given[TEXTS], _texts_of(given[FOLDER]).decode())
    if given[BEGUN]:
        finder.first(request.origin_input_ids_unpadded[-given[BEGUN] :])
    return finder


def install() -> None:
    """Have SGLang's requests look for their texts; call it in every process of a server before requests come."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

    check = Req._check_str_based_finish

    def check_texts(self: Any, new_accepted_len: int = 1) -> bool:
        """Return whether the last tokens, of which there are several behind a draft, end the response."""
        given = self.sampling_params.custom_params
        if not isinstance(given, dict) or TEXTS not in given:
            return bool(check(self, new_accepted_len))
        finder, taken = getattr(self, "megarl_finder", (None, 0))
        if finder is None:
            finder = _finder(self, given)
        new = self.output_ids[taken:]
        self.megarl_finder = (finder, len(self.output_ids))
        count = finder.first(new)
        if count is None:
            return False
        if self._check_token_based_finish(new) and self.finished_len <= taken + count:  # an end token comes before the text
            return True
        self.finished_reason, self.finished_len = FINISH_MATCHED_STR(matched=given[TEXTS][0]), taken + count
        return True

    Req._check_str_based_finish = check_texts
