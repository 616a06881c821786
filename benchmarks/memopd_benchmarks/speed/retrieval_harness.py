"""What the retrieval benchmarks share: a server in a process of its own, and many clients in one event loop.

The clients speak just enough HTTP to keep a connection alive, so that on a small machine the load generator does not
become what is measured. All traffic stays on loopback, and every run is bounded in requests and in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from memopd_env.retrieval.build import build
from memopd_env.retrieval.encoders import load_encoder
from memopd_env.tasks.world import World, WorldConfig

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def world_index(work: Path, passages: int, encoder: str, kind: str = "flat") -> Path:
    """Build, or reuse, an index over the built-in world; returns its folder."""
    name = f"world-{passages}-{encoder.replace(':', '')}-{kind}"
    folder = work / name
    if not (folder / "manifest.json").is_file():
        corpus = work / f"world-{passages}.jsonl"
        if not corpus.is_file():
            World(WorldConfig.preset("default", passages=passages)).write_corpus(corpus)
        build(corpus, folder, encoder=load_encoder(encoder), kind=kind, recall_queries=0)
    return folder


def queries_of(corpus: Path, count: int) -> list[str]:
    """Different queries about a corpus: the first words of its passages, numbered."""
    queries = []
    with open(corpus, encoding="utf-8") as file:
        for line in file:
            title, _, text = json.loads(line)["contents"].partition("\n")
            queries.append(" ".join([title.strip('"'), *text.split()[:6]]))
            if len(queries) == count:
                break
    return [f"{queries[number % len(queries)]} {number // len(queries) or ''}".strip() for number in range(count)]


@contextmanager
def server(arguments: Sequence[str], port: int, wait: float = 120.0) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python ARGUMENTS`` until the block ends; waits until ``/health`` says 200."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        wait_ready(process, port, wait)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_ready(process: subprocess.Popen[bytes], port: int, wait: float) -> None:
    """Wait until a server is ready; raises RuntimeError if it is not in time."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"http://{HOST}:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise RuntimeError(f"the server was not ready within {wait} s")


@dataclass
class Load:
    """What a load run saw: seconds per answered request, errors, wall time, and the first answers by query."""

    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answers: dict[str, list[str]] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """Numbers for a report; latencies in milliseconds."""
        times = np.array(self.latencies or [np.nan]) * 1000
        return {
            "requests": len(self.latencies),
            "errors": len(self.errors),
            "first_errors": self.errors[:3],
            "requests_per_s": round(len(self.latencies) / self.seconds, 1),
            "p50_ms": round(float(np.percentile(times, 50)), 1),
            "p95_ms": round(float(np.percentile(times, 95)), 1),
            "p99_ms": round(float(np.percentile(times, 99)), 1),
            "max_ms": round(float(times.max()), 1),
        }


def load(port: int, clients: int, queries: Sequence[str], topk: int = 3, time_limit: float = 300.0) -> Load:
    """Send each query once, from so many clients that each wait for their answer before they ask again."""
    return asyncio.run(_load(port, clients, list(queries), topk, time_limit))


async def _load(port: int, clients: int, queries: list[str], topk: int, time_limit: float) -> Load:
    result = Load()
    waiting = iter(queries)
    started = time.perf_counter()
    end = started + time_limit

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        for query in waiting:
            if time.perf_counter() > end:
                break
            body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
            head = f"POST /retrieve HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            began = time.perf_counter()
            try:
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                status, content = await _reply(reader)
                found = json.loads(content)["result"][0]
            except (OSError, ValueError, KeyError, EOFError) as error:
                result.errors.append(repr(error))
                writer.close()
                reader, writer = await asyncio.open_connection(HOST, port)
                continue
            if status == 200:
                result.latencies.append(time.perf_counter() - began)
                result.answers[query] = [entry["document"]["id"] for entry in found]
            else:
                result.errors.append(str(status))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    result.seconds = time.perf_counter() - started
    return result


async def _reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
    }


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write a report as JSON to standard output, and to a file if one is given."""
    text = json.dumps(report, indent=2) + "\n"
    if out:
        out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
