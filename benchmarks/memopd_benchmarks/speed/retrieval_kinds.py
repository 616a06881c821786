"""Recall, size and speed of every kind of index against exact search.

Run ``python -m memopd_benchmarks.speed.retrieval_kinds --count 100000``. The vectors are made by a generator, not by a
model (encoding a million passages takes a CPU hours): topics around random directions, each with subtopics, and within
a subtopic variation along a few dozen directions and a little noise in all, as sentence embeddings have. Queries are
new points of the same distribution, each near some passages and equal to none.

``recall`` is recall@3 against exact search; ``bytes`` is the index that a search needs in memory, ``refine_bytes`` what
stays on disk to re-order candidates.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from memopd_benchmarks.speed.retrieval_harness import machine, write
from memopd_env.retrieval.index import INDEX, REFINE, VectorIndex, read_index
from memopd_env.retrieval.indexing import write_vectors
from memopd_env.retrieval.kinds import KINDS
from memopd_env.retrieval.recall import exact, recall, tune

_BLOCK = 50_000


class Generator:
    """Clustered unit vectors.

    Args:
        dim: Numbers in a vector.
        topics: Number of topics.
        seed: Of everything.
    """

    def __init__(self, dim: int, topics: int = 500, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._dim = dim
        self._topics = self._rng.standard_normal((topics, dim)).astype(np.float32)
        self._basis = self._rng.standard_normal((topics, 24, dim)).astype(np.float32) / np.sqrt(24)

    def draw(self, count: int) -> np.ndarray:
        """New vectors, float32 (count, dim)."""
        topic = np.sort(self._rng.integers(0, len(self._topics), count))
        weights = self._rng.standard_normal((count, 24)).astype(np.float32)
        vectors = self._topics[topic] + 0.15 * self._rng.standard_normal((count, self._dim)).astype(np.float32)
        edges = np.searchsorted(topic, np.arange(len(self._topics) + 1))
        for number in range(len(self._topics)):
            part = slice(edges[number], edges[number + 1])
            vectors[part] += 0.8 * weights[part] @ self._basis[number]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors[self._rng.permutation(count)]


def measure(work: Path, count: int, dim: int, kinds: list[str], queries: int, wanted: float) -> dict[str, Any]:
    """Build and measure each kind.

    Args:
        work: Where files go; they are removed kind by kind.
        count: Vectors.
        dim: Numbers in a vector.
        kinds: Which kinds.
        queries: Queries that recall is measured on; half set the effort, the other half are reported.
        wanted: Recall that the search effort is set for.

    Returns:
        The report, one entry per kind.
    """
    generator = Generator(dim)
    vectors = np.memmap(work / "vectors.bin", np.float16, "w+", shape=(count, dim))
    for start in range(0, count, _BLOCK):
        vectors[start : start + _BLOCK] = generator.draw(min(_BLOCK, count - start))
    asked = generator.draw(queries)
    seen, unseen = asked[: queries // 2], asked[queries // 2 :]
    truth, _ = exact(vectors, unseen)
    entries = []
    for kind in kinds:
        started = time.perf_counter()
        write_vectors(vectors, work, kind, lambda *_: None)
        built = time.perf_counter() - started
        found, search = tune(work, vectors, seen, kind, wanted, lambda *_: None)
        refine = read_index(work / REFINE) if (work / REFINE).exists() else None
        index = VectorIndex(read_index(work / INDEX), refine, search)
        started = time.perf_counter()
        _, rows = index.search(unseen, 3)
        batched = time.perf_counter() - started
        started = time.perf_counter()
        for query in unseen[:20]:
            index.search(query[None], 3)
        single = time.perf_counter() - started
        index_files = [path for path in work.glob("index.*")]
        entries.append(
            {
                "kind": kind,
                "bytes": sum(path.stat().st_size for path in index_files),
                "of_flat": round(sum(path.stat().st_size for path in index_files) / (count * dim * 4), 4),
                "refine_bytes": (work / REFINE).stat().st_size if refine is not None else 0,
                "recall": round(recall(vectors, unseen, truth[:, -1], rows), 4),
                "recall_unrefined": _unrefined(work, vectors, unseen, truth, search) if refine is not None else None,
                "search": search,
                "tried": found["tried"],
                "build_s": round(built, 1),
                "ms_per_query_batched": round(1000 * batched / len(unseen), 3),
                "ms_per_query_alone": round(1000 * single / 20, 3),
            }
        )
        del index, refine
        for path in (*index_files, work / REFINE):
            path.unlink(missing_ok=True)
    return {
        "benchmark": "retrieval_kinds",
        "setting": {
            "count": count,
            "dim": dim,
            "queries": len(unseen),
            "wanted_recall": wanted,
            "vectors": "generated",
        },
        "machine": machine(),
        "kinds": entries,
    }


def _unrefined(
    work: Path, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray, search: dict[str, int]
) -> float:
    _, rows = VectorIndex(read_index(work / INDEX), search=search).search(queries, 3)
    return round(recall(vectors, queries, truth[:, -1], rows), 4)


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--wanted-recall", type=float, default=0.95)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(
            Path(folder), given.count, given.dim, given.kinds.split(","), given.queries, given.wanted_recall
        )
    write(report, given.out)


if __name__ == "__main__":
    main()
