"""Episodes of agents that work on text, in the same record as token-exact ones.

An agent that is a stranger's code has no token ids to record, so its calls hold text: what it saw, segment by
segment, and what it wrote. Many environments are played side by side in threads, since such an agent mostly waits for
somebody's server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gymnasium as gym

from memopd_agents.agent import Agent
from memopd_agents.episode import Call, Episode, EpisodeLog
from memopd_agents.rollout import EpisodeCallback, RolloutError, resumed_episodes
from memopd_agents.seeds import episode_seed


def play_episode(
    agent: Agent, env: gym.Env[Any, Any], task_index: int | None = None, *, seed: int | None = None, number: int = 0
) -> Episode:
    """Play one episode and record it as text.

    Args:
        agent: Plays. If it has an attribute ``usage`` (a mapping, e.g. ``prompt_tokens`` and ``completion_tokens`` of
            its last call), every call records it.
        env: A MemOPD environment, wrapped or not.
        task_index: Which task; None lets the environment draw one.
        seed: Seed of environment and agent.
        number: Recorded as the episode's number.

    Raises:
        RolloutError: If agent or environment fails; names the task.
    """
    started = time.monotonic()
    try:
        agent.reset(seed)
    except Exception as error:
        raise RolloutError(f"episode {number}: the agent cannot begin: {type(error).__name__}: {error}") from error
    options = None if task_index is None else {"task_index": task_index}
    observation, info = env.reset(seed=seed, options=options)
    task_id = info["task_id"]
    calls: list[Call] = []
    reward, ended = 0.0, False
    try:
        while not ended:
            action = agent.act(observation, info)
            if not isinstance(action, str):
                raise TypeError(f"act() returned {type(action).__name__}, not a string")
            context = [(segment.kind.value, segment.turn, segment.text) for segment in info["context"]]
            usage = dict(getattr(agent, "usage", None) or {})
            calls.append(Call([], [], text=action, context=context, usage=usage))
            observation, gained, terminated, truncated, info = env.step(action)
            reward += float(gained)
            ended = terminated or truncated
    except Exception as error:
        raise RolloutError(f"episode {number}, task {task_id!r}, turn {len(calls)}: {error}") from error
    return Episode(calls, reward, task_id, info.get("episode", {}), seed, number, time.monotonic() - started)


def play_episodes(
    make_agent: Callable[[], Agent],
    make_env: Callable[[], gym.Env[Any, Any]],
    task_indices: Sequence[int],
    *,
    seed: int = 0,
    workers: int = 1,
    path: str | Path | None = None,
    on_episode: EpisodeCallback | None = None,
) -> list[Episode]:
    """Play one episode for each entry of ``task_indices``, ``workers`` at a time.

    Args:
        make_agent: Makes an agent; called once a worker.
        make_env: Makes an environment; called once a worker. All of them hold the same tasks.
        task_indices: Index into the environment's tasks, one per episode.
        seed: Run seed; every episode's seed is derived from it and the episode's number.
        workers: Threads. More than one pays when the agent or the retriever waits for a server.
        path: Where to append episodes as JSONL; those already there are not played again.
        on_episode: Progress callback.

    Returns:
        The episodes in the order of ``task_indices``.

    Raises:
        RolloutError: If an agent or an environment fails; what was finished by then is in ``path``.
        EpisodeFileError: If ``path`` is malformed or holds another run.
    """
    log = EpisodeLog(path) if path is not None else None
    done = resumed_episodes(log, len(task_indices), seed)
    numbers = iter([number for number in range(len(task_indices)) if number not in done])
    tables: SimpleQueue[tuple[Agent, gym.Env[Any, Any]]] = SimpleQueue()
    envs: list[gym.Env[Any, Any]] = []

    def play(number: int) -> Episode:
        table = tables.get()
        try:
            return play_episode(*table, task_indices[number], seed=episode_seed(seed, number), number=number)
        finally:
            tables.put(table)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="memopd-play")
    running: set[Future[Episode]] = set()
    try:
        for _ in range(min(workers, len(task_indices) - len(done))):
            envs.append(make_env())
            tables.put((make_agent(), envs[-1]))
        running.update(pool.submit(play, number) for number in islice(numbers, workers))
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            # Record what was finished before a failure among them stops the run.
            for future in sorted(ended, key=lambda future: future.exception() is not None):
                episode = future.result()
                if log is not None:
                    log.append(episode)
                done[episode.number] = episode
                if on_episode is not None:
                    on_episode(episode, len(done), len(task_indices))
            running.update(pool.submit(play, number) for number in islice(numbers, len(ended)))
    finally:
        pool.shutdown(cancel_futures=True)
        for env in envs:
            env.close()
        if log is not None:
            log.close()
    return [done[number] for number in range(len(task_indices))]
