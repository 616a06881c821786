"""FAISS sharded over all visible GPUs: does it fit, is it right, how fast is it.

Run ``python benchmarks/gpu/faiss_sharding.py`` on a machine with NVIDIA GPUs and ``faiss-gpu-cu12`` (in place of
``faiss-cpu``). It writes a ``flat-fp16`` file of generated unit vectors as ``memopd retriever build`` would, puts it on
the GPUs the way ``memopd retriever serve --gpu`` does, compares the results with exact search on the CPU over the same
half-precision vectors, and measures throughput by batch size. The default size takes 1.5 GB on the GPUs and about a
minute; ``--count 21000000 --dim 768`` is Wikipedia (33 GB over all GPUs, as much disk).

Expected output, one JSON object (the numbers are placeholders for what the machine gives)::

    {
      "benchmark": "faiss_sharding",
      "machine": {"gpus": ["NVIDIA H100 80GB HBM3", ...], "faiss": "1.12.0"},
      "setting": {"count": 1000000, "dim": 768, "kind": "flat-fp16", "queries": 256, "k": 3},
      "rows_per_gpu": [500000, 500000],
      "load_s": 3.1,
      "gpu_memory_mb": [780, 780],
      "agreement": 1.0,
      "max_score_difference": 0.0006,
      "throughput": [{"batch": 1, "queries_per_s": 900.0, "ms_per_batch": 1.1}, ...],
      "passed": true
    }

``passed`` means that at least 99 % of the rows found are those of the exact search and that no score differs by more
than 0.002; the exit status says the same. Without a GPU it exits with status 2 and says what to install.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.errors import MemOPDError
from memopd_env.retrieval.gpu import shard_ranges, to_gpus
from memopd_env.retrieval.index import VectorIndex, load_faiss, read_index, write_codes

K = 3
QUERIES = 256
BATCHES = (1, 8, 64, 256)
MIN_AGREEMENT = 0.99
MAX_SCORE_DIFFERENCE = 0.002
_BLOCK = 65_536


def blocks(count: int, dim: int) -> Iterator[np.ndarray]:
    """Random unit vectors, the same at each call."""
    rng = np.random.default_rng(0)
    for start in range(0, count, _BLOCK):
        vectors = rng.standard_normal((min(_BLOCK, count - start), dim), np.float32)
        yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def exact(index: Any, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact search over the stored vectors, decoded block by block on the CPU."""
    faiss = load_faiss()
    heap = faiss.ResultHeap(len(queries), K, keep_max=True)
    for start in range(0, index.ntotal, _BLOCK):
        size = min(_BLOCK, index.ntotal - start)
        scores, rows = faiss.knn(queries, index.reconstruct_n(start, size), K, metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, np.where(rows < 0, rows, rows + start))
    heap.finalize()
    return heap.D, heap.I


def measure(work: Path, count: int, dim: int) -> dict[str, Any]:
    """Write, shard, compare, time.

    Args:
        work: Where the index file goes.
        count: Vectors.
        dim: Numbers in a vector.

    Returns:
        The report that the module's docstring shows.

    Raises:
        BrokenIndexError: If there is no GPU, or FAISS cannot use it.
    """
    faiss = load_faiss()
    empty = faiss.index_factory(dim, "SQfp16", faiss.METRIC_INNER_PRODUCT)
    empty.train(np.zeros((1, dim), np.float32))
    path = work / "index.faiss"
    # Before the file is written, so that a machine without a GPU is told at once.
    to_gpus(empty, "flat-fp16")
    write_codes(path, empty, blocks(count, dim), count)
    source = read_index(path)
    noise = 0.5 * np.random.default_rng(1).standard_normal((QUERIES, dim), np.float32) / dim**0.5
    queries = np.ascontiguousarray(next(blocks(count, dim))[:QUERIES] + noise)
    before = _gpu_memory()
    started = time.perf_counter()
    index = VectorIndex(to_gpus(source, "flat-fp16"), exclusive=True)
    loaded = time.perf_counter() - started
    used = [after - first for after, first in zip(_gpu_memory(), before, strict=True)]
    true_scores, true_rows = exact(source, queries)
    scores, rows = index.search(queries, K)
    agreement = float(np.mean([len(set(a) & set(b)) / K for a, b in zip(rows, true_rows, strict=True)]))
    difference = float(np.abs(scores - true_scores).max())
    return {
        "benchmark": "faiss_sharding",
        "machine": {"gpus": _gpu_names(), "faiss": faiss.__version__},
        "setting": {"count": count, "dim": dim, "kind": "flat-fp16", "queries": QUERIES, "k": K},
        "rows_per_gpu": [stop - start for start, stop in shard_ranges(count, faiss.get_num_gpus())],
        "load_s": round(loaded, 2),
        "gpu_memory_mb": used,
        "agreement": round(agreement, 4),
        "max_score_difference": round(difference, 6),
        "throughput": [_throughput(index, queries, batch) for batch in BATCHES],
        "passed": agreement >= MIN_AGREEMENT and difference <= MAX_SCORE_DIFFERENCE,
    }


def _throughput(index: VectorIndex, queries: np.ndarray, batch: int, seconds: float = 3.0) -> dict[str, float]:
    index.search(queries[:batch], K)
    started = time.perf_counter()
    runs = 0
    while time.perf_counter() - started < seconds and runs < 2_000:
        start = runs * batch % (len(queries) - batch + 1)
        index.search(queries[start : start + batch], K)
        runs += 1
    each = (time.perf_counter() - started) / runs
    return {"batch": batch, "queries_per_s": round(batch / each, 1), "ms_per_batch": round(1000 * each, 2)}


def _ask_driver(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def _gpu_memory() -> list[int]:
    return [int(line) for line in _ask_driver("memory.used")]


def _gpu_names() -> list[str]:
    return [line.strip() for line in _ask_driver("name")]


def main() -> int:
    """Measure and write JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--work", type=Path, help="folder with room for the index; by default a temporary one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        try:
            report = measure(Path(folder), given.count, given.dim)
        except MemOPDError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    text = json.dumps(report, indent=2) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
