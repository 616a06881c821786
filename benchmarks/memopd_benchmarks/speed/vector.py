"""How many environment steps a second: the vector environment, a Python loop over single ones, and AsyncVectorEnv.

Run ``python -m memopd_benchmarks.speed.vector``. Everyone searches in every step, each for something else, so nothing
can be cached. Two retrievers: ``sparse`` in the process, where a query costs the same alone or in a batch and the
vector environment has nothing to save, and ``http``, a retrieval server on the loopback interface, where a step of the
vector environment is one request instead of one per environment.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import httpx
from gymnasium.vector import AsyncVectorEnv

import memopd_env
from memopd_env.retrieval import HTTPRetriever

ENV_ID = "MemOPD-Q16"
SIZES = (1, 8, 64, 256)
TARGET_AT_64 = 5

_SERVER = """
import uvicorn
from memopd_env.retrieval import SparseRetriever
from memopd_env.retrieval.server import create_app
from memopd_env.tasks.world import World
uvicorn.run(create_app(SparseRetriever.from_passages(list(World().passages()))), port={port}, log_level="error")
"""


@contextmanager
def server(ready_within_s: float = 60.0) -> Iterator[str]:
    """Run a retrieval server over the default world in a process of its own; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-c", _SERVER.format(port=port)])
    try:
        deadline = time.monotonic() + ready_within_s
        while True:
            try:
                if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def steps_per_second(env: Any, num_envs: int, queries: Sequence[str], seconds: float) -> float:
    """Step a vector environment for a while; returns environment steps a second."""
    env.reset(seed=0)
    env.step(_actions(queries, 0, num_envs))
    return _rate(lambda turn: env.step(_actions(queries, turn, num_envs)), num_envs, seconds)


def loop_steps_per_second(envs: Sequence[gym.Env[Any, str]], queries: Sequence[str], seconds: float) -> float:
    """Step single environments one after the other; returns environment steps a second."""
    for seed, env in enumerate(envs):
        env.reset(seed=seed)

    def step(turn: int) -> None:
        for env, action in zip(envs, _actions(queries, turn, len(envs)), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    step(0)
    return _rate(step, len(envs), seconds)


def measure(
    retrievers: Sequence[str] = ("sparse", "http"),
    sizes: Sequence[int] = SIZES,
    seconds: float = 3.0,
    async_up_to: int = 8,
) -> list[dict[str, Any]]:
    """Measure every combination.

    Args:
        retrievers: ``sparse``, ``http``.
        sizes: Numbers of environments.
        seconds: How long to step each.
        async_up_to: Most environments, a process each, that AsyncVectorEnv is tried with.

    Returns:
        One row a combination: steps a second of each way, and how many times faster than the loop the vector
        environment is.
    """
    memopd_env.MemOPDEnv(16).retriever.search(["build the index"], 1)
    queries = [title for task in memopd_env.MemOPDEnv(16).tasks for titles in task.entities for title in titles]
    rows = []
    with server() as address:
        for name in retrievers:
            for size in sizes:
                rows.append(_row(name, size, address, queries, seconds, size <= async_up_to))
    return rows


def _row(
    name: str, size: int, address: str, queries: Sequence[str], seconds: float, with_async: bool
) -> dict[str, Any]:
    # No cache: repeated queries would be answered without a request.
    client = HTTPRetriever(address, cached_queries=0) if name == "http" else None
    vector = gym.make_vec(ENV_ID, num_envs=size, retriever=client)
    row: dict[str, Any] = {"retriever": name, "envs": size}
    row["vector"] = steps_per_second(vector, size, queries, seconds)
    row["loop"] = loop_steps_per_second([gym.make(ENV_ID, retriever=client) for _ in range(size)], queries, seconds)
    if with_async:
        workers = AsyncVectorEnv([_maker(name, address)] * size, shared_memory=False)
        try:
            row["async"] = steps_per_second(workers, size, queries, seconds)
        finally:
            workers.close()
    row["times_loop"] = row["vector"] / row["loop"]
    if client is not None:
        client.close()
    return row


def _maker(name: str, address: str) -> Any:
    def make() -> gym.Env[Any, str]:
        return gym.make(
            f"memopd_env:{ENV_ID}", retriever=HTTPRetriever(address, cached_queries=0) if name == "http" else None
        )

    return make


def _actions(queries: Sequence[str], turn: int, num_envs: int) -> list[str]:
    first = turn * num_envs
    return [
        f"<think>nothing yet</think><search>{queries[(first + i) % len(queries)]}</search>" for i in range(num_envs)
    ]


def _rate(step: Any, num_envs: int, seconds: float) -> float:
    turns, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        turns += 1
        step(turns)
    return turns * num_envs / (time.perf_counter() - started)


def main() -> None:
    """Measure and write JSON lines to standard output, or to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retrievers", nargs="+", default=["sparse", "http"], choices=["sparse", "http"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--async-up-to", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.retrievers, arguments.sizes, arguments.seconds, arguments.async_up_to)
    rounded = [{name: round(v, 2) if isinstance(v, float) else v for name, v in row.items()} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rounded)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
