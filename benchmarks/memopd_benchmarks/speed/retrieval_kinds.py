"""Recall, size and speed of every kind of index against exact search, on passages of the built-in world.

Run ``python -m memopd_benchmarks.speed.retrieval_kinds --count 100000``. The world generator writes the passages, an
encoder makes their vectors once, and every kind indexes the same ones; queries are the world's questions. The default
encoder hashes words (a million passages through a transformer take a CPU hours); ``--encoder minilm`` and the like
measure what a model's vectors give.

``recall`` is recall@3 against exact search; ``bytes`` is the index that a search needs in memory, ``refine_bytes`` what
stays on disk to re-order candidates. A kind's line is also printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from memopd_benchmarks.speed.retrieval_harness import machine, write
from memopd_env.retrieval.encoders import Encoder, load_encoder
from memopd_env.retrieval.index import INDEX, REFINE, VectorIndex, read_index
from memopd_env.retrieval.indexing import write_vectors
from memopd_env.retrieval.kinds import KINDS
from memopd_env.retrieval.recall import exact, recall, tune
from memopd_env.tasks.world import World, WorldConfig

_BLOCK = 10_000


def world_vectors(work: Path, count: int, encoder: Encoder, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode a world's passages and questions.

    Args:
        work: Where the passages' vectors go, memory-mapped.
        count: Passages.
        encoder: Makes the vectors.
        queries: Questions, each about another passage.

    Returns:
        Passages float16 (count, dim) and questions float32 (queries, dim).
    """
    world = World(WorldConfig.preset("default", passages=count))
    vectors = np.memmap(work / "vectors.bin", np.float16, "w+", shape=(count, encoder.dim))
    for start in range(0, count, _BLOCK):
        texts = [world.passage(number).contents for number in range(start, min(start + _BLOCK, count))]
        vectors[start : start + len(texts)] = encoder.encode_passages(texts)
    rng = np.random.default_rng(0)
    asked = [world.question(int(number), slot % 4).text for slot, number in enumerate(rng.integers(0, count, queries))]
    return vectors, encoder.encode_queries(asked)


def measure(work: Path, count: int, encoder: Encoder, kinds: list[str], queries: int, wanted: float) -> dict[str, Any]:
    """Build and measure each kind.

    Args:
        work: Where files go; they are removed kind by kind.
        count: Passages.
        encoder: Makes the vectors.
        kinds: Which kinds.
        queries: Queries that recall is measured on; half set the effort, the other half are reported.
        wanted: Recall that the search effort is set for.

    Returns:
        The report, one entry per kind.
    """
    dim = encoder.dim
    vectors, asked = world_vectors(work, count, encoder, queries)
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
        print(json.dumps(entries[-1]), file=sys.stderr, flush=True)
        del index, refine
        for path in (*index_files, work / REFINE):
            path.unlink(missing_ok=True)
    return {
        "benchmark": "retrieval_kinds",
        "setting": {
            "passages": count,
            "encoder": encoder.name,
            "dim": dim,
            "queries": len(unseen),
            "wanted_recall": wanted,
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
    parser.add_argument("--encoder", default="hash:384", help="as for memopd retriever build")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--wanted-recall", type=float, default=0.95)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    encoder = load_encoder(given.encoder)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), given.count, encoder, given.kinds.split(","), given.queries, given.wanted_recall)
    write(report, given.out)


if __name__ == "__main__":
    main()
