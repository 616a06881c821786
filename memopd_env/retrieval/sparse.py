"""Word search (BM25) over a corpus, with no model and no download.

bm25s does the heavy part once: it stores, for every word, the passages that hold it and what that word adds to their
score. A query is then a sum of a few columns. What this file adds is what an environment needs on top: words of any
script, names made of common words (nothing is stemmed, no stop word is dropped), ties broken by row so that a run can
be repeated, and queries of any content, because the query is whatever a model wrote.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from memopd_env.errors import CorpusError
from memopd_env.retrieval.base import Passage

MAX_QUERY_CHARACTERS = 20_000
MAX_QUERY_WORDS = 512

# Scripts written without spaces are cut into single characters; anything else is a run of letters and digits.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """Cut a text into the words that are indexed and searched.

    Case, accents and compatibility forms are folded, so ``Beyoncé`` is found by ``beyonce``. Single letters, digits and
    common words stay, so ``The Who`` and ``X`` can be found.
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(character for character in decomposed if not unicodedata.combining(character))
    return _WORD.findall(text.casefold())


def top_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Rows of the ``k`` largest positive scores, best first; equal scores in the order of rows."""
    positive = np.flatnonzero(scores > 0)
    if len(positive) > k:
        threshold = np.partition(scores[positive], len(positive) - k)[len(positive) - k]
        positive = positive[scores[positive] >= threshold]
    order = np.argsort(-scores[positive], kind="stable")[:k]
    return positive[order]


class SparseRetriever:
    """BM25 over passages that are at hand; title and text are indexed together.

    Immutable once built, so any number of threads may search it. Build it with :meth:`from_passages` or
    :meth:`from_corpus`.

    Args:
        passages: The passages, addressed by row; only those that are returned are ever read.
        vocabulary: Word to column number.
        columns: For each column, where its entries start in ``rows`` and ``weights``; one longer than the vocabulary.
        rows: Rows of the passages that hold a column's word.
        weights: What that word adds to the score of each of those rows.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        vocabulary: dict[str, int],
        columns: np.ndarray,
        rows: np.ndarray,
        weights: np.ndarray,
    ) -> None:
        self._passages = passages
        self._vocabulary = vocabulary
        self._columns = columns
        self._rows = rows
        self._weights = weights

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], k1: float = 1.5, b: float = 0.75) -> SparseRetriever:
        """Index passages.

        Args:
            passages: Any iterable; a sequence is kept as it is, anything else is read into a list.
            k1: How fast repeated words stop adding to a score.
            b: How strongly long passages are discounted, 0 to 1.
        """
        import bm25s

        kept = passages if isinstance(passages, Sequence) else list(passages)
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{passage.title} {passage.text}")]
            for passage in kept
        ]
        if not vocabulary:
            nothing = np.zeros(0, np.int64)
            return cls(kept, vocabulary, np.zeros(1, np.int64), nothing, nothing.astype(np.float32))
        index = bm25s.BM25(method="lucene", k1=k1, b=b)
        index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        matrix = index.scores
        return cls(kept, vocabulary, matrix["indptr"], matrix["indices"], matrix["data"])

    @classmethod
    def from_corpus(cls, path: str | Path, k1: float = 1.5, b: float = 0.75) -> SparseRetriever:
        """Index a corpus file, JSONL or JSONL.gz with ``{"id", "contents"}`` per line.

        Raises:
            CorpusError: If the file is missing or empty, or a line is malformed; the message names the line.
        """
        from memopd_env.retrieval.corpus import Corpus

        corpus = Corpus.open(path)
        if not len(corpus):
            raise CorpusError(f'{path} holds no passages; expected a line {{"id": "…", "contents": "…"}} for each')
        return cls.from_passages(corpus, k1=k1, b=b)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages that share a word with it, best first.

        Equal scores come in the order of the corpus. A query with no known word finds nothing, which is an answer and
        not an error. Only the first 512 words of a query count.
        """
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Passage]:
        known = (self._vocabulary.get(word) for word in words(query[:MAX_QUERY_CHARACTERS])[:MAX_QUERY_WORDS])
        # Sorted, so that the same words in another order add up to the very same sum.
        columns = sorted(column for column in known if column is not None)
        if not columns or k < 1:
            return []
        scores = np.zeros(len(self._passages), np.float32)
        for column in columns:
            entries = slice(self._columns[column], self._columns[column + 1])
            scores[self._rows[entries]] += self._weights[entries]
        found = []
        for row in top_rows(scores, k):
            passage = self._passages[int(row)]
            found.append(Passage(passage.id, passage.title, passage.text, float(scores[row])))
        return found
