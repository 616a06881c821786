"""Finding a stop string among sampled ids without decoding every step.

A stop string can only be completed by a token whose text contains its last character. Those tokens are looked up once
per tokenizer; only when one of them is sampled is the tail of the call decoded and searched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# An id may decode to nothing (a lone word-boundary mark), so look a little further back than the string is long.
_SLACK = 4


class StopStrings:
    """The stop strings of one request, prepared for one tokenizer.

    Args:
        tokenizer: Turns ids into text.
        stop: The strings, any of which ends a call.

    Attributes:
        candidates: Boolean array over ids: True where a token might complete a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(string for string in stop if string)
        self._tail = max((len(string.encode()) for string in self._stop), default=0) + _SLACK
        self.candidates = self._find_candidates()

    def _find_candidates(self) -> NDArray[np.bool_]:
        size = len(self._tokenizer)
        last = {string[-1] for string in self._stop}
        if any(not ("!" <= character <= "~") for character in last):
            # Vocabularies spell spaces and non-ASCII characters in their own alphabets: check every token.
            return np.ones(size, dtype=bool)
        tokens = self._tokenizer.convert_ids_to_tokens(list(range(size)))
        return np.array(
            [
                token is not None and (not last.isdisjoint(token) or bool(last and _BYTE_TOKEN.fullmatch(token)))
                for token in tokens
            ],
            dtype=bool,
        )

    def ends(self, ids: NDArray[np.int64]) -> bool:
        """Say whether the text of ``ids`` contains a stop string, given that the text before the last id does not."""
        tail = ids[-self._tail :].tolist()
        text = self._tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._stop)
