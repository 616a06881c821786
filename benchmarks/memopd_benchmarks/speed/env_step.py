"""What an environment costs beside its searches: one step against one BM25 query, and the time to a first observation.

Run ``python -m memopd_benchmarks.speed.env_step``. A step is everything but retrieval and model: parsing the action,
rendering three passages, rebuilding the context. Times are the smallest of several repeats, since only slowness is
noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

import memopd_env  # noqa: F401 (registers the ids)

TARGET_RATIO = 20
TARGET_FIRST_OBSERVATION_S = 2.0

_FIRST_OBSERVATION = """
import time; started = time.perf_counter()
import gymnasium as gym, memopd_env
imported = time.perf_counter()
gym.make({env!r}).reset(seed=0)
print(imported - started, time.perf_counter() - imported)
"""


def measure(env_id: str = "MemOPD-Q16", repeats: int = 200) -> dict[str, Any]:
    """Measure one environment over the default world.

    Args:
        env_id: Which environment.
        repeats: Episodes to play; the fastest counts.

    Returns:
        ``step_us``, ``query_us``, ``ratio`` and its target; ``import_s`` and ``first_observation_s`` of a new process.
    """
    env: Any = gym.make(env_id).unwrapped
    env.reset(seed=0)
    questions = [question for task in env.tasks[:100] for question in task.questions]
    passages = env.retriever.search(questions[:1], env.top_k)[0]
    action = f"<think>{'Known so far: a is b; c is d. ' * 6}</think><search>{questions[0]}</search>"
    query = min(_seconds_per_query(env, questions) for _ in range(5))
    step = min(_seconds_per_step(env, action, passages) for _ in range(repeats))
    imported, first = _first_observation(env_id)
    return {
        "env": env_id,
        "step_us": round(step * 1e6, 2),
        "query_us": round(query * 1e6, 2),
        "ratio": round(query / step, 1),
        "target_ratio": TARGET_RATIO,
        "import_s": round(imported, 3),
        "first_observation_s": round(first, 3),
        "target_first_observation_s": TARGET_FIRST_OBSERVATION_S,
    }


def _seconds_per_query(env: Any, questions: list[str]) -> float:
    started = time.perf_counter()
    for question in questions:
        env.retriever.search([question], env.top_k)
    return (time.perf_counter() - started) / len(questions)


def _seconds_per_step(env: Any, action: str, passages: Any) -> float:
    env.reset(seed=0)
    turns = env.max_turns - 1
    started = time.perf_counter()
    for _ in range(turns):
        env.begin_step(action)
        env.finish_step(passages)
    return (time.perf_counter() - started) / turns


def _first_observation(env_id: str) -> tuple[float, float]:
    code = _FIRST_OBSERVATION.format(env=env_id)
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    imported, first = min((float(run[0]), float(run[1])) for run in runs)
    return imported, first


def main() -> None:
    """Measure and write JSON to standard output, or to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="MemOPD-Q16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.env), indent=2) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
