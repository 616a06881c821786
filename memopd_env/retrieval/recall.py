"""How much an index finds of what exact search finds, and how little effort that takes.

Recall@k is the share of an index's first k rows whose exact score is at least that of the exact k-th; so ties count as
found. Queries are pieces of sampled passages, because real questions are not known when an index is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.retrieval.corpus import Corpus
from memopd_env.retrieval.index import DEFAULT_CANDIDATES, INDEX, REFINE, VectorIndex, load_faiss, read_index

K = 3
_BLOCK = 65_536
_WORDS = 10
_TIE = 1e-5


def sample_queries(corpus: Corpus, start: int, stop: int, count: int) -> list[str]:
    """Titles and runs of ten words of random passages; the same for the same corpus."""
    rng = np.random.default_rng(0)
    queries = []
    for number, row in enumerate(rng.integers(start, stop, count)):
        passage = corpus[int(row)]
        spoken = passage.text.split()
        first = int(rng.integers(0, max(1, len(spoken) - _WORDS)))
        piece = " ".join(spoken[first : first + _WORDS])
        queries.append(passage.title if number % 2 and passage.title else piece or passage.title)
    return queries


def exact(vectors: np.ndarray, queries: np.ndarray, k: int = K, block: int = _BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Exact search by reading all vectors once.

    Args:
        vectors: (rows, dim), usually memory-mapped.
        queries: float32 (queries, dim).
        k: How many.
        block: Rows in memory at a time.

    Returns:
        Scores and rows, (queries, k), best first.
    """
    faiss = load_faiss()
    heap = faiss.ResultHeap(len(queries), k, keep_max=True)
    for start in range(0, len(vectors), block):
        part = np.ascontiguousarray(vectors[start : start + block], np.float32)
        scores, rows = faiss.knn(queries, part, k, metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, np.where(rows < 0, rows, rows + start))
    heap.finalize()
    return heap.D, heap.I


def recall(vectors: np.ndarray, queries: np.ndarray, kth: np.ndarray, rows: np.ndarray) -> float:
    """Share of found rows whose exact score reaches the exact k-th.

    Args:
        vectors: (rows, dim).
        queries: float32 (queries, dim).
        kth: Exact score of each query's k-th row, (queries,).
        rows: Rows found, (queries, k), -1 for none.
    """
    found = np.zeros(rows.shape, np.float32)
    for number, query in enumerate(queries):
        found[number] = np.asarray(vectors[np.maximum(rows[number], 0)], np.float32) @ query
    return float(((found >= kth[:, None] - _TIE) & (rows >= 0)).mean())


def _efforts(index: VectorIndex) -> list[dict[str, int]]:
    """Search settings worth trying, cheapest first."""
    if hasattr(index.index, "nlist"):
        probes = [2**power for power in range(0, 10) if 2**power <= index.index.nlist]
        if index.refine is None:
            return [{"nprobe": probe} for probe in probes]
        return [{"nprobe": probe, "candidates": depth} for depth in (DEFAULT_CANDIDATES, 256) for probe in probes]
    if hasattr(index.index, "hnsw"):
        return [{"efSearch": effort} for effort in (16, 32, 64, 128, 256, 512)]
    return [{}]


def tune(
    folder: Path,
    vectors: np.ndarray,
    queries: np.ndarray,
    kind: str,
    wanted: float,
    tell: Callable[[str, int, int], None],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Measure recall@3 of a written index at growing effort, and choose the least that suffices.

    Args:
        folder: Holds the index files.
        vectors: What was indexed.
        queries: float32 (queries, dim).
        kind: The kind of index.
        wanted: Recall to reach; if none does, the settings with the highest recall are chosen.
        tell: Told the stage, how much is done and how much there is.

    Returns:
        What goes into the manifest as ``recall``, and the chosen search settings.
    """
    k = min(K, len(vectors))
    tell("recall", 0, 1)
    truth, _ = exact(vectors, queries, k)
    refine = read_index(folder / REFINE) if kind == "ivfpq" else None
    index = VectorIndex(read_index(folder / INDEX), refine)
    tried: list[dict[str, Any]] = []
    for effort in _efforts(index):
        index.configure(effort)
        started = time.perf_counter()
        _, rows = index.search(queries, k)
        seconds = time.perf_counter() - started
        value = recall(vectors, queries, truth[:, -1], rows)
        tried.append({**effort, "recall": round(value, 4), "ms_per_query": round(1000 * seconds / len(queries), 3)})
        if value >= wanted:
            break
    best = max(tried, key=lambda one: one["recall"])
    chosen = tried[-1] if tried[-1]["recall"] >= wanted else best
    settings = {name: chosen[name] for name in ("nprobe", "candidates", "efSearch") if name in chosen}
    tell("recall", 1, 1)
    return {"k": k, "queries": len(queries), "value": chosen["recall"], "tried": tried}, settings
