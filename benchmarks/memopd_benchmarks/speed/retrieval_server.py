"""Throughput beside the server that the field runs today, same index, same queries, same results.

Run ``python -m memopd_benchmarks.speed.retrieval_server``. Both servers hold the same flat index and encoder and get
the same different queries (so no cache helps) from 64 clients, one after the other, each with as many threads as
``OMP_NUM_THREADS`` says. With ``--encoder minilm`` the encoder is a real model; with the default hashing encoder, and
with a large index, the scan dominates, which is the case of a CPU server over Wikipedia.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from memopd_benchmarks.speed.retrieval_harness import (
    Load,
    free_port,
    load,
    machine,
    queries_of,
    server,
    world_index,
    write,
)

TARGET_RATIO = 5


def measure(work: Path, requests: int, clients: int, passages: int, encoder: str) -> dict[str, Any]:
    """Load both servers and compare.

    Args:
        work: Where the index is built and reused.
        requests: Requests for each server.
        clients: Concurrent clients.
        passages: Passages in the index.
        encoder: The encoder's name.

    Returns:
        The report; ``ratio`` is ours over plain.
    """
    index = world_index(work, passages, encoder)
    queries = queries_of(work / f"world-{passages}.jsonl", requests)
    commands = {
        "plain": lambda port: ["-m", "memopd_benchmarks.speed.retrieval_plain_server", str(index), str(port)],
        "memopd": lambda port: [
            "-m",
            "memopd_env.cli",
            "retriever",
            "serve",
            "--index",
            str(index),
            "--port",
            str(port),
        ],
    }
    runs: dict[str, Load] = {}
    for name, command in commands.items():
        port = free_port()
        with server(command(port), port):
            load(port, 4, queries[:8])
            runs[name] = load(port, clients, queries, time_limit=120)
    both = runs["plain"].answers.keys() & runs["memopd"].answers.keys()
    same = sum(runs["plain"].answers[query] == runs["memopd"].answers[query] for query in both)
    plain, ours = (runs[name].report() for name in ("plain", "memopd"))
    return {
        "benchmark": "retrieval_server",
        "setting": {"clients": clients, "passages": passages, "encoder": encoder, "kind": "flat"},
        "machine": machine(),
        "plain": plain,
        "memopd": ours,
        "ratio": round(ours["requests_per_s"] / plain["requests_per_s"], 2),
        "target_ratio": TARGET_RATIO,
        "same_results": f"{same} of {len(both)}",
    }


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--encoder", default="hash:384")
    parser.add_argument("--work", type=Path, help="folder to build the index in and reuse; by default a new one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        write(measure(work, given.requests, given.clients, given.passages, given.encoder), given.out)


if __name__ == "__main__":
    main()
