"""One event loop plays many episodes on one engine.

Whenever a call finishes, its environment reads the action; those that want to search wait together for one batched
search in a thread, the others go on at once; and every environment that has its reply submits its next call. So
nobody waits for the slowest episode, and the engine samples while the retriever searches. Seeds hang on (run seed,
episode, call) alone: what an episode is does not depend on who was played beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from memopd_agents.engines.base import Completion, Engine, EngineError, SamplingParams
from memopd_agents.episode import Episode, EpisodeFileError, EpisodeLog
from memopd_agents.policy import PolicyAgent, PromptBuilder
from memopd_agents.seeds import episode_seed
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError, MemOPDError
from memopd_env.memory import Segment
from memopd_env.retrieval.base import Passage, RetrievalError, search

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutError(MemOPDError, RuntimeError):
    """An episode could not be played on; the message names the episode and its task, the cause is chained."""


EpisodeCallback = Callable[[Episode, int, int], None]
"""Called after each episode with it, the number of episodes done, and the number wanted."""


def rollout(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    make_env: Callable[[], gym.Env[Any, Any]],
    task_indices: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    max_active: int = 64,
    path: str | Path | None = None,
    keep_text: bool = False,
    on_episode: EpisodeCallback | None = None,
    builder: PromptBuilder | None = None,
    repeatable: bool = False,
) -> list[Episode]:
    """Play one episode for each entry of ``task_indices``.

    Args:
        engine: Samples the calls. Put a model that trains into evaluation mode first: switching at every poll costs
            time.
        tokenizer: Of the policy.
        make_env: Makes a :class:`memopd_env.MemOPDEnv`, directly or by ``gym.make``; called at most ``max_active``
            times. All of them hold the same tasks and share one retriever.
        task_indices: Index into the environment's tasks, one per episode; repeat an index to sample a task several
            times.
        sampling: How to sample; stop strings default to the environment's closing tags.
        seed: Run seed. Every request's seed is derived from (seed, episode number, call number).
        max_active: Most episodes in progress.
        path: Where to append episodes as JSONL; those already there are not played again.
        keep_text: Also store what every call saw as text, for reports.
        on_episode: Progress callback.
        builder: Makes prompts; made from the tokenizer and the environment's tags if absent.
        repeatable: Take a search's answer always one poll after it was asked, however fast it is. The same calls then
            share the same batches each time, so even the rounding of log-probs repeats.

    Returns:
        The episodes in the order of ``task_indices``.

    Raises:
        ConfigError: If the environment is something else, or wrapped in more than gymnasium's own checks.
        RolloutError: If an environment, a prompt or the retriever fails; names the task.
        EpisodeFileError: If ``path`` is malformed or holds another run.
    """
    log = EpisodeLog(path) if path is not None else None
    done = resumed_episodes(log, len(task_indices), seed)
    loop = _Loop(engine, tokenizer, make_env, sampling, seed, keep_text, builder, repeatable)
    queue = deque(number for number in range(len(task_indices)) if number not in done)
    try:
        while queue or loop.active:
            while queue and loop.active < max_active:
                number = queue.popleft()
                loop.start(number, task_indices[number])
            finished = loop.turn()
            if log is not None and finished:
                log.append(*finished)
            for episode in finished:
                done[episode.number] = episode
                if on_episode is not None:
                    on_episode(episode, len(done), len(task_indices))
    except BaseException:
        engine.abort()
        raise
    finally:
        loop.close()
        if log is not None:
            log.close()
    return [done[number] for number in range(len(task_indices))]


def resumed_episodes(log: EpisodeLog | None, count: int, seed: int) -> dict[int, Episode]:
    """Return what an episode file already holds of this run, by episode number.

    Raises:
        EpisodeFileError: If it holds episodes of another run.
    """
    done = {episode.number: episode for episode in log.episodes} if log is not None else {}
    for number, episode in done.items():
        if number >= count or episode.seed != episode_seed(seed, number):
            raise EpisodeFileError(
                f"{log.path if log else ''}: episode {number} was not played by this run (seed {seed}, {count} "
                "episodes); use the seed and tasks it was started with, or another file"
            )
    return done


@dataclass
class _Seat:
    """One environment, the agent that plays in it, and the episode in progress."""

    env: gym.Env[Any, Any]
    core: MemOPDEnv
    agent: PolicyAgent
    number: int = 0
    started: float = 0.0
    query: str = ""
    context: Sequence[Segment] = ()


_Reply = list[Passage] | RetrievalError | None


class _Loop:
    """The state of a rollout: who waits for the engine, who for the retriever."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        make_env: Callable[[], gym.Env[Any, Any]],
        sampling: SamplingParams | None,
        seed: int,
        keep_text: bool,
        builder: PromptBuilder | None,
        repeatable: bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._make_env = make_env
        self._sampling = sampling
        self._seed = seed
        self._keep_text = keep_text
        self._builder = builder
        self._repeatable = repeatable
        self._free: list[_Seat] = []
        self._seats: list[_Seat] = []
        self._sampled: dict[str, _Seat] = {}
        self._to_search: list[_Seat] = []
        self._search: tuple[Future[list[list[Passage]]], list[_Seat]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memopd-search")

    @property
    def active(self) -> int:
        """Number of episodes in progress."""
        return len(self._seats) - len(self._free)

    def start(self, number: int, task_index: int) -> None:
        """Begin an episode and submit its first call."""
        seat = self._free.pop() if self._free else self._new_seat()
        seat.number, seat.started = number, time.monotonic()
        seed = episode_seed(self._seed, number)
        seat.agent.reset(seed)
        _, info = seat.env.reset(seed=seed, options={"task_index": task_index})
        self._submit(seat, info)

    def turn(self) -> list[Episode]:
        """Advance whatever can advance; return the episodes that ended."""
        finished: list[Episode] = []
        if self._sampled:
            completions = self._engine.poll()
            if not completions:
                raise EngineError(f"the engine lost {len(self._sampled)} requests: poll() returned nothing")
            for completion in completions:
                self._act(self._sampled.pop(completion.request_id), completion, finished)
        if self._search is not None and (self._repeatable or self._search[0].done() or not self._sampled):
            self._answer_searches(finished)
        if self._search is None and self._to_search:
            self._begin_search()
        return finished

    def close(self) -> None:
        """Wait for a search in progress and close the environments."""
        self._thread.shutdown(cancel_futures=True)
        for seat in self._seats:
            seat.env.close()

    def _new_seat(self) -> _Seat:
        env = self._make_env()
        core = _core(env)
        if self._builder is None:
            self._builder = PromptBuilder(self._tokenizer, core.tags)
        agent = PolicyAgent(self._engine, self._tokenizer, self._sampling, tags=core.tags, builder=self._builder)
        seat = _Seat(env, core, agent)
        self._seats.append(seat)
        return seat

    def _submit(self, seat: _Seat, info: Mapping[str, Any]) -> None:
        request_id = f"{seat.number}:{len(seat.agent.calls)}"
        seat.context = info["context"]
        try:
            self._engine.submit(seat.agent.prompt(info, request_id))
        except Exception as error:
            raise _failure(seat, error) from error
        self._sampled[request_id] = seat

    def _act(self, seat: _Seat, completion: Completion, finished: list[Episode]) -> None:
        try:
            action = seat.agent.record(completion)
            if self._keep_text:
                context = [(segment.kind.value, segment.turn, segment.text) for segment in seat.context]
                seat.agent.calls[-1] = replace(seat.agent.calls[-1], context=context)
            query = seat.core.begin_step(action)
        except Exception as error:
            raise _failure(seat, error) from error
        if query is None:
            self._reply(seat, None, finished)
        else:
            seat.query = query
            self._to_search.append(seat)

    def _begin_search(self) -> None:
        seats, self._to_search = self._to_search, []
        core = seats[0].core
        future = self._thread.submit(search, core.retriever, [seat.query for seat in seats], core.top_k)
        self._search = future, seats

    def _answer_searches(self, finished: list[Episode]) -> None:
        assert self._search is not None
        (future, seats), self._search = self._search, None
        replies: Sequence[_Reply]
        try:
            replies = future.result()
            if len(replies) != len(seats):
                raise RetrievalError(
                    f"the retriever answered {len(seats)} queries with {len(replies)} lists of passages"
                )
        except RetrievalError as error:
            replies = [error] * len(seats)
        except Exception as error:
            raise _failure(seats[0], error) from error
        for seat, reply in zip(seats, replies, strict=True):
            self._reply(seat, reply, finished)

    def _reply(self, seat: _Seat, reply: _Reply, finished: list[Episode]) -> None:
        try:
            _, reward, terminated, truncated, info = seat.core.finish_step(reply)
        except Exception as error:
            raise _failure(seat, error) from error
        if not (terminated or truncated):
            self._submit(seat, info)
            return
        summary = info["episode"]
        seed = episode_seed(self._seed, seat.number)
        seconds = time.monotonic() - seat.started
        finished.append(Episode(seat.agent.calls, reward, summary["task_id"], summary, seed, seat.number, seconds))
        self._free.append(seat)


def _core(env: gym.Env[Any, Any]) -> MemOPDEnv:
    """Return the environment under gymnasium's own checks; it is stepped in halves, which other wrappers would miss."""
    while isinstance(env, OrderEnforcing | PassiveEnvChecker):
        env = env.env
    if not isinstance(env, MemOPDEnv):
        raise ConfigError(
            f"a rollout plays in MemOPDEnv itself, but make_env made {type(env).__name__}, whose step would be "
            "bypassed: leave the wrapper out, or play with play_episodes"
        )
    return env


def _failure(seat: _Seat, error: Exception) -> RolloutError:
    return RolloutError(f"episode {seat.number}, task {seat.core.task.id!r}: {error}")
