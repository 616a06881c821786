"""How long a server over a million passages takes to its first answer, and what it holds in memory.

Run ``python -m memopd_benchmarks.speed.retrieval_start``. The corpus and the vectors are generated (row n is random;
start-up does not look at them), everything else is real: the folder is opened, checked and served by
``memopd retriever serve``, and the clock runs from the start of the process to the first complete answer. The first of
three starts warms the page cache and is not counted. Memory that the process has for itself is ``RssAnon``; the mapped
index and corpus are ``RssFile``, shared with the page cache and given back when needed. ``cpu_s`` is what
the start cost in processor time: on a machine that is busy otherwise, the clock says more about that.
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

import httpx
import numpy as np
import psutil

from memopd_benchmarks.speed.retrieval_harness import HOST, free_port, machine, write
from memopd_env.retrieval.adopt import adopt
from memopd_env.retrieval.index import load_faiss, write_codes
from memopd_env.retrieval.kinds import factory

TARGET_FIRST_ANSWER_S = 3.0
TARGET_OWN_MEMORY_MB = 500


def prepare(work: Path, count: int, dim: int) -> Path:
    """Make the index folder, or reuse it."""
    folder = work / f"start-{count}-{dim}"
    if (folder / "manifest.json").is_file():
        return folder
    corpus = work / f"start-{count}.jsonl"
    with open(corpus, "w", encoding="utf-8") as file:
        for row in range(count):
            text = f"Passage number {row} speaks of thing {row * 7919 % count} at some length. " * 4
            file.write(json.dumps({"id": str(row), "contents": f'"Thing {row}"\n{text}'}) + "\n")
    faiss = load_faiss()
    rng = np.random.default_rng(0)

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, count, 50_000):
            vectors = rng.standard_normal((min(50_000, count - start), dim), np.float32)
            yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    empty = faiss.index_factory(dim, factory("flat", dim, count), faiss.METRIC_INNER_PRODUCT)
    write_codes(work / "start.faiss", empty, blocks(), count)
    adopt(work / "start.faiss", corpus, folder, encoder=f"hash:{dim}", move=True)
    return folder


def measure(work: Path, count: int, dim: int) -> dict[str, Any]:
    """Start a server three times and measure it.

    Args:
        work: Where the index is made and reused.
        count: Passages.
        dim: Numbers in a vector.

    Returns:
        The report.
    """
    folder = prepare(work, count, dim)
    starts = [_start(folder) for _ in range(3)]
    index_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    warm = starts[1:]
    return {
        "benchmark": "retrieval_start",
        "setting": {"passages": count, "dim": dim, "kind": "flat", "index_mb": round(index_mb)},
        "machine": machine(),
        "first_answer_s": min(start["first_answer_s"] for start in warm),
        "target_first_answer_s": TARGET_FIRST_ANSWER_S,
        "own_memory_mb": max(start["own_memory_mb"] for start in warm),
        "target_own_memory_mb": TARGET_OWN_MEMORY_MB,
        "starts": starts,
    }


def _start(folder: Path) -> dict[str, float]:
    port = free_port()
    url = f"http://{HOST}:{port}/retrieve"
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "memopd_env.cli", "retriever", "serve", "--index", str(folder), "--port", str(port)]
    )
    try:
        while True:
            try:
                if httpx.post(url, json={"queries": ["thing 4711"], "topk": 3}, timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.perf_counter() - started > 120:
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        first = time.perf_counter() - started
        times = psutil.Process(process.pid).cpu_times()
        for number in range(50):
            httpx.post(url, json={"queries": [f"thing {number}"], "topk": 3}, timeout=60)
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":" in line
        )
        return {
            "first_answer_s": round(first, 2),
            "cpu_s": round(times.user + times.system, 2),
            "own_memory_mb": round(int(fields["RssAnon"].split()[0]) / 1000, 1),
            "mapped_memory_mb": round(int(fields["RssFile"].split()[0]) / 1000, 1),
        }
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--work", type=Path, help="folder to make the index in and reuse; by default a new one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        write(measure(work, given.count, given.dim), given.out)


if __name__ == "__main__":
    main()
