"""Two hundred clients, twenty thousand requests, and a server that is killed in the middle.

Run ``python -m memopd_benchmarks.speed.retrieval_load``. First 200 clients that each keep a connection open send 20,000
different queries to ``memopd retriever serve``: no error is allowed, and the latencies are reported. Then 200 threads
send as many through one ``HTTPRetriever`` while the server is killed with SIGKILL halfway and started again: every
search must be answered, and answered right.

The index is flat over the built-in world with the hashing encoder, so that what is measured is the server and not a
model.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memopd_benchmarks.speed.retrieval_harness import (
    HOST,
    free_port,
    load,
    machine,
    queries_of,
    server,
    world_index,
    write,
)
from memopd_env.retrieval import DenseRetriever, HTTPRetriever


def measure(work: Path, requests: int, clients: int, passages: int, encoder: str) -> dict[str, Any]:
    """Run both load tests.

    Args:
        work: Where the index is built and reused.
        requests: Requests of each test.
        clients: Concurrent clients.
        passages: Passages in the index.
        encoder: The encoder's name.

    Returns:
        The report; ``steady`` and ``killed`` hold the two tests.
    """
    index = world_index(work, passages, encoder)
    queries = queries_of(work / f"world-{passages}.jsonl", requests)
    port = free_port()
    command = ["-m", "memopd_env.cli", "retriever", "serve", "--index", str(index), "--port", str(port)]
    with server(command, port):
        steady = load(port, clients, queries).report()
    return {
        "benchmark": "retrieval_load",
        "setting": {"clients": clients, "passages": passages, "encoder": encoder, "kind": "flat"},
        "machine": machine(),
        "steady": steady,
        "killed": _killed(command, port, clients, queries, index),
    }


def _killed(command: list[str], port: int, clients: int, queries: list[str], index: Path) -> dict[str, Any]:
    client = HTTPRetriever(f"http://{HOST}:{port}", cached_queries=0, deadline=120)
    answered = [0]
    lock = threading.Lock()

    def ask(query: str) -> list[str] | str:
        try:
            found = client.search([query], 3)[0]
        except Exception as error:
            return repr(error)
        with lock:
            answered[0] += 1
        return [passage.id for passage in found]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        with server(command, port) as first:
            pending = [pool.submit(ask, query) for query in queries]
            while answered[0] < len(queries) // 2:
                time.sleep(0.01)
            first.kill()
            first.wait()
            at_kill = answered[0]
        down = time.perf_counter()
        with server(command, port):
            down = time.perf_counter() - down
            results = [future.result() for future in pending]
    seconds = time.perf_counter() - started
    client.close()
    truth = DenseRetriever.open(index)
    checked = range(0, len(queries), max(1, len(queries) // 200))
    expected = truth.search([queries[number] for number in checked], 3)
    wrong = sum(
        results[number] != [passage.id for passage in found] for number, found in zip(checked, expected, strict=True)
    )
    failures = [result for result in results if isinstance(result, str)]
    return {
        "requests": len(results),
        "lost": len(failures),
        "first_failures": failures[:3],
        "answered_before_the_kill": at_kill,
        "server_away_s": round(down, 2),
        "checked_against_the_index": len(checked),
        "wrong": wrong,
        "requests_per_s": round(len(results) / seconds, 1),
    }


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--passages", type=int, default=3_000)
    parser.add_argument("--encoder", default="hash:256")
    parser.add_argument("--work", type=Path, help="folder to build the index in and reuse; by default a new one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        write(measure(work, given.requests, given.clients, given.passages, given.encoder), given.out)


if __name__ == "__main__":
    main()
