"""Retrievers made of retrievers: fused, reranked, or cut into shards.

Each is a retriever again, so they nest: shards of a dense index, fused with word search, reranked, served.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage, RetrievalError, Retriever
from memopd_env.retrieval.dense import DenseRetriever


class Scorer(Protocol):
    """Says how well a passage answers a query, e.g. :class:`~memopd_env.retrieval.transformer.CrossEncoder`."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Score (query, passage contents) pairs, (pairs,); higher is better."""
        ...


class HybridRetriever:
    """Reciprocal-rank fusion: what several retrievers rank high comes first, whatever their scores mean.

    A passage's score is the sum over retrievers of ``weight / (constant + rank)`` (Cormack et al., SIGIR 2009).

    Args:
        retrievers: Over the same corpus; passages are the same if their ids are.
        weights: One per retriever; by default all 1.
        depth: How many each retriever contributes, at least ``k``.
        constant: Softens the lead of the first ranks.

    Raises:
        ConfigError: If there is no retriever, or another number of weights.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        weights: Sequence[float] | None = None,
        depth: int = 50,
        constant: float = 60.0,
    ) -> None:
        self._retrievers = list(retrievers)
        self._weights = [1.0] * len(self._retrievers) if weights is None else list(weights)
        if not self._retrievers or len(self._weights) != len(self._retrievers):
            raise ConfigError(f"{len(self._retrievers)} retrievers and {len(self._weights)} weights: give one for each")
        self._depth, self._constant = depth, constant
        self._pool = ThreadPoolExecutor(len(self._retrievers), thread_name_prefix="hybrid")

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages, best first; equal scores in the order they were met.

        Raises:
            RetrievalError: If any of the retrievers fails.
        """
        if k < 1:
            return [[] for _ in queries]
        depth = max(k, self._depth)
        lists = list(self._pool.map(lambda retriever: retriever.search(queries, depth), self._retrievers))
        return [self._fused([ranked[number] for ranked in lists], k) for number in range(len(queries))]

    def _fused(self, rankings: list[list[Passage]], k: int) -> list[Passage]:
        scores: dict[str, float] = {}
        passages: dict[str, Passage] = {}
        for weight, ranking in zip(self._weights, rankings, strict=True):
            for rank, passage in enumerate(ranking, start=1):
                scores[passage.id] = scores.get(passage.id, 0.0) + weight / (self._constant + rank)
                passages.setdefault(passage.id, passage)
        best = sorted(scores, key=lambda id: -scores[id])[:k]
        return [Passage(id, passages[id].title, passages[id].text, scores[id]) for id in best]


class RerankRetriever:
    """Finds more than asked for and keeps what a slower, better scorer likes most.

    Args:
        retriever: Finds the candidates.
        scorer: Scores them.
        depth: Number of candidates, at least ``k``; the field's default is 10, of which 3 are kept.
    """

    def __init__(self, retriever: Retriever, scorer: Scorer, depth: int = 10) -> None:
        self._retriever, self._scorer, self._depth = retriever, scorer, depth

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages, best first; equal scores in the order they were found.

        Raises:
            RetrievalError: If the retriever fails, or the scorer returns another number of scores.
        """
        if k < 1:
            return [[] for _ in queries]
        found = self._retriever.search(queries, max(k, self._depth))
        pairs = [
            (query, passage.contents) for query, passages in zip(queries, found, strict=True) for passage in passages
        ]
        scores = np.asarray(self._scorer.score(pairs), np.float64)
        if scores.shape != (len(pairs),):
            raise RetrievalError(
                f"the reranker gave scores of shape {scores.shape} for {len(pairs)} pairs: it is defective"
            )
        result: list[list[Passage]] = []
        start = 0
        for passages in found:
            own = scores[start : start + len(passages)]
            start += len(passages)
            order = np.argsort(-own, kind="stable")[:k]
            result.append(
                [Passage(passages[i].id, passages[i].title, passages[i].text, float(own[i])) for i in order.tolist()]
            )
        return result


class ShardedRetriever:
    """One retriever out of several that each hold a part of the corpus; the merged top-k is exact.

    Any passage of the overall top-k is in the top-k of its own shard, so asking each shard for ``k`` is enough. Shards
    may be index folders, or :class:`~memopd_env.retrieval.http.HTTPRetriever` for shards on other machines.

    Args:
        shards: In the order of their rows, so that equal scores keep it.

    Raises:
        ConfigError: If there is none.
    """

    def __init__(self, shards: Sequence[Retriever]) -> None:
        if not shards:
            raise ConfigError("no shard was given")
        self._shards = list(shards)
        self._pool = ThreadPoolExecutor(len(self._shards), thread_name_prefix="shard")

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards if isinstance(shard, DenseRetriever))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query the ``k`` best passages of all shards; equal scores in the order of shards.

        Raises:
            RetrievalError: If any shard fails: a top-k without one of the shards would be wrong without a sign of it.
        """
        if k < 1 or not queries:
            return [[] for _ in queries]
        lists = self._ask(queries, k)
        merged: list[list[Passage]] = []
        for number in range(len(queries)):
            candidates = [passage for shard in lists for passage in shard[number]]
            merged.append(sorted(candidates, key=lambda passage: -passage.score)[:k])
        return merged

    def _ask(self, queries: Sequence[str], k: int) -> list[list[list[Passage]]]:
        first = self._shards[0]
        if isinstance(first, DenseRetriever) and all(
            isinstance(shard, DenseRetriever) and shard.encoder is first.encoder for shard in self._shards
        ):
            vectors = first.encode(queries)
            return list(self._pool.map(lambda shard: shard.search_vectors(vectors, k), self._shards))  # pyright: ignore[reportAttributeAccessIssue]
        return list(self._pool.map(lambda shard: shard.search(queries, k), self._shards))
