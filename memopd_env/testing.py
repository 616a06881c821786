"""Check your own environment, memory policy, retriever or agent against what MemOPD expects of it.

Each function plays with the object and raises :class:`ContractError` at the first thing that is wrong, saying what it
did, what it saw and what it expected::

    from memopd_env.testing import check_memory_policy

    class OnlyNewest:
        def context(self, task, turns):
            return tuple(Segment(SegmentKind.INFORMATION, turn.information, i) for i, turn in enumerate(turns))

    check_memory_policy(OnlyNewest())
    # ContractError: OnlyNewest.context('task', []) returned (): the first segment must be the task

They need no test framework. The same checks run on MemOPD's own parts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, NoReturn, Protocol

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

from memopd_env.errors import MemOPDError
from memopd_env.hostile import ACTIONS, SPOOFS
from memopd_env.memory import MemoryPolicy, Segment, SegmentKind, Turn
from memopd_env.protocol import Tags, parse_action
from memopd_env.retrieval.base import Passage, Retriever
from memopd_env.tasks.task import Task

EPISODE_KEYS = (
    *("task_id", "answers", "em", "f1", "sub_em", "per_question", "num_questions", "searches", "turns"),
    *("invalid_actions", "stop_reason", "excluded"),
)


class ContractError(MemOPDError, AssertionError):
    """Something does not keep the contract; the message says what was done, seen and expected."""


class _Agent(Protocol):
    def act(self, observation: Mapping[str, Any], info: Mapping[str, Any]) -> str: ...
    def reset(self, seed: int | None = None) -> None: ...


def check_env_contract(env: gym.Env[Any, Any], seed: int = 0) -> None:
    """Check an environment: Gymnasium's API, the observation, the context, rewards, the record, seeding, odd actions.

    Args:
        env: What ``gymnasium.make`` returned, with dict observations. It is reset many times.
        seed: First seed to play.

    Raises:
        ContractError: If something is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Rendering by spec would make the environment anew, with other tasks than the caller's.
        check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
    for offset in range(3):
        first = _play(env, seed + offset)
        again = _play(env, seed + offset)
        if first != again:
            _fail(f"two episodes with seed {seed + offset} and the same actions differ")
    for action in ACTIONS:
        env.reset(seed=seed)
        try:
            observation, _, _, _, info = env.step(action)
        except Exception as error:
            _fail(f"step({_short(action)}) raised {type(error).__name__}: {error}; any string is an action")
        _check_observation(observation, info, env)


def check_spoofing(make: Callable[[Sequence[Task], Retriever], gym.Env[Any, Any]], tags: Tags | None = None) -> None:
    """Check that no document or question can look like the protocol.

    Args:
        make: Returns an environment that plays these tasks with this retriever.
        tags: The tag names it uses.

    Raises:
        ContractError: If a document closes the information block, adds a tag, or acts.
    """
    tags = tags or Tags()
    plain_task = make([Task("plain", ["Who?", "What?"], [["nobody"], ["nothing"]])], _Fixed([])).reset()[0]["task"]
    for spoof in _spoofs(tags):
        passages = [Passage("0", spoof, spoof), Passage("1", "<", "/answer>"), Passage("2", "plain", f"a {spoof} b")]
        task = Task("spoof", [f"Who? {spoof}", "What?"], [["nobody"], ["nothing"]])
        env = make([task], _Fixed(passages))
        env.reset(seed=0)
        observation, _, terminated, truncated, info = env.step(f"<{tags.search}>q</{tags.search}>")
        information = info["context"][-1].text
        opening, closing = f"<{tags.information}>", f"</{tags.information}>"
        if information.count(opening) != 1 or information.count(closing) != 1:
            _fail(f"the document {_short(spoof)} broke the information block: {_short(information)}")
        if information.partition(closing)[2].strip():
            _fail(f"the document {_short(spoof)} got text behind the information block: {_short(information)}")
        if any(f"<{side}{name}>" in information for side in ("", "/") for name in tags.names[:3]):
            _fail(f"the document {_short(spoof)} put a tag into the information: {_short(information)}")
        if parse_action(information, tags).content:
            _fail(f"the document {_short(spoof)} acts when it is read as an action")
        if terminated or truncated:
            _fail(f"the document {_short(spoof)} ended the episode")
        if spoof in information.partition(opening)[2].rpartition(closing)[0]:
            _fail(f"the document {_short(spoof)} stands in the information as it is, brackets and all")
        if spoof in observation["task"] and spoof not in plain_task:
            _fail(f"the question {_short(spoof)} stands in the task text as it is, brackets and all")


def check_memory_policy(policy: MemoryPolicy) -> None:
    """Check that a memory policy is total and pure and labels its segments truthfully.

    Raises:
        ContractError: If something is wrong.
    """
    name = type(policy).__name__
    texts = ["plain", "", "\x00\ud800", "<think>a</think><search>b</search>", "x" * 10_000, "שלום", "<think>unclosed"]
    histories = [
        [Turn(texts[i % len(texts)], texts[(i * 3 + 1) % len(texts)]) for i in range(length)]
        for length in (0, 1, 2, 3, 7, 40)
    ]
    for task in ("task", ""):
        for turns in histories:
            did = f"{name}.context({task!r}, {'[]' if not turns else f'{len(turns)} turns'})"
            before = deepcopy(turns)
            try:
                context = policy.context(task, turns)
            except Exception as error:
                _fail(f"{did} raised {type(error).__name__}: {error}; a policy has an answer to every history")
            if turns != before:
                _fail(f"{did} changed the turns it was given")
            if policy.context(task, turns) != context or policy.context(task, tuple(turns)) != context:
                _fail(f"{did} gave two different contexts for the same turns; a policy is a pure function")
            _check_segments(did, context, task, turns)


def check_retriever(retriever: Retriever, queries: Sequence[str] = ("who wrote it", "capital", "year")) -> None:
    """Check a retriever: shape, order, repeatability, batches, threads and odd queries.

    Args:
        retriever: The retriever.
        queries: Queries that find something in its corpus.

    Raises:
        ContractError: If something is wrong.
    """
    name = type(retriever).__name__
    odd = ["", " ", "\x00", "\ud800", "<search>", "שלום", "x" * 100_000, "; drop table", "\U0001f600"]
    asked = [*queries, *odd]
    for k in (1, 3, 10):
        found = retriever.search(asked, k)
        did = f"{name}.search({len(asked)} queries, {k})"
        if not isinstance(found, list) or len(found) != len(asked):
            _fail(f"{did} must return a list with one list for each query, got {_short(found)}")
        for query, passages in zip(asked, found, strict=True):
            if len(passages) > k:
                _fail(f"{did} returned {len(passages)} passages for {_short(query)}, more than {k}")
            if not all(isinstance(passage, Passage) for passage in passages):
                _fail(f"{did} returned something else than Passage for {_short(query)}")
            scores = [passage.score for passage in passages]
            if scores != sorted(scores, reverse=True):
                _fail(f"{did} returned {_short(query)} not best first: scores {scores}")
        if _ids(retriever.search(asked, k)) != _ids(found):
            _fail(f"{did} gave two different results")
        if _ids([retriever.search([query], k)[0] for query in asked]) != _ids(found):
            _fail(f"{did} gave another result than one query at a time")
        with ThreadPoolExecutor(4) as pool:
            others = pool.map(retriever.search, [asked] * 8, [k] * 8)
            if any(_ids(other) != _ids(found) for other in others):
                _fail(f"{did} gave another result when called from several threads")
    if retriever.search([], 3) != []:
        _fail(f"{name}.search([], 3) must return []")
    if not any(retriever.search(list(queries), 3)):
        _fail(f"{name} found nothing for any of {list(queries)}; pass queries that its corpus can answer")


def check_agent(agent: _Agent, env: gym.Env[Any, Any], seed: int = 0, *, deterministic: bool = True) -> None:
    """Check an agent: it returns strings, leaves what it is shown alone, survives an episode, and repeats itself.

    Args:
        agent: Has ``act(observation, info) -> str`` and ``reset(seed)``.
        env: What to play.
        seed: Seed of environment and agent.
        deterministic: Whether the same seed must give the same actions.

    Raises:
        ContractError: If something is wrong.
    """
    name = type(agent).__name__
    episodes: list[list[str]] = []
    for _ in range(2):
        agent.reset(seed)
        observation, info = env.reset(seed=seed)
        actions: list[str] = []
        ended = False
        while not ended:
            shown = deepcopy(observation), info["context"]
            try:
                action = agent.act(observation, info)
            except Exception as error:
                _fail(f"{name}.act raised {type(error).__name__}: {error} in turn {len(actions) + 1}")
            if not isinstance(action, str):
                _fail(f"{name}.act returned {_short(action)}; an action is a string")
            if (observation, info["context"]) != shown:
                _fail(f"{name}.act changed the observation or the context it was given")
            actions.append(action)
            observation, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        episodes.append(actions)
    if deterministic and episodes[0] != episodes[1]:
        _fail(f"{name} acted differently in two episodes with seed {seed}; or pass deterministic=False")


def _spoofs(tags: Tags) -> list[str]:
    """Return the corpus, and the same in the configured names."""
    spoofs = list(SPOOFS)
    for spoof in SPOOFS:
        renamed = spoof
        for standard, configured in zip(Tags().names, tags.names, strict=True):
            renamed = renamed.replace(standard, configured)
        if renamed != spoof:
            spoofs.append(renamed)
    return spoofs


class _Fixed:
    """Answers every query with the same passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [self._passages[:k] for _ in queries]


def _play(env: gym.Env[Any, Any], seed: int) -> list[Any]:
    """Search, err, search, answer; check every turn; return all that was seen."""
    observation, info = env.reset(seed=seed)
    _check_observation(observation, info, env)
    if observation["memory"] or observation["information"] or len(info["context"]) != 1:
        _fail("after reset the context must be the task and nothing else")
    seen: list[Any] = [observation, info["context"]]
    task_text, left = observation["task"], observation["turns_left"]
    tags = getattr(env.unwrapped, "tags", Tags())
    think = f"<{tags.think}>note {{}}</{tags.think}>"
    actions = [
        f"{think.format(1)}<{tags.search}>first thing</{tags.search}>",
        "not an action",
        f"{think.format(2)}<{tags.search}>second thing</{tags.search}>",
        f"{think.format(3)}<{tags.answer}>one; two</{tags.answer}>",
    ]
    ended = False
    for action in actions:
        if ended:
            break
        observation, reward, terminated, truncated, info = env.step(action)
        ended = terminated or truncated
        _check_observation(observation, info, env)
        left -= 1
        if observation["turns_left"] != left:
            _fail(f"turns_left is {observation['turns_left']} after a turn, expected {left}")
        if observation["task"] != task_text:
            _fail("the task text changed within an episode")
        if not ended and (reward != 0 or "episode" in info):
            _fail(f"before the end the reward must be 0 and info hold no 'episode'; got {reward}, {sorted(info)}")
        if ended:
            _check_record(info, reward)
        seen += [observation, info["context"], reward, terminated, truncated, info.get("episode")]
    if not ended:
        _fail("an answer must end the episode")
    return seen


def _check_observation(observation: Any, info: Mapping[str, Any], env: gym.Env[Any, Any]) -> None:
    if observation not in env.observation_space:
        _fail(f"the observation {_short(observation)} is not in the observation space")
    if "context" not in info:
        _fail(f"info has no 'context', only {sorted(info)}")
    joined = "".join(segment.text for segment in info["context"])
    if observation["task"] + observation["memory"] + observation["information"] != joined:
        _fail("task + memory + information of the observation is not the text of info['context']")


def _check_record(info: Mapping[str, Any], reward: Any) -> None:
    record = info.get("episode")
    if record is None:
        _fail("the last info holds no 'episode'")
    if missing := set(EPISODE_KEYS) - set(record):
        _fail(f"info['episode'] lacks {', '.join(sorted(missing))}")
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        _fail(f"info['episode'] is not JSON: {error}")
    if reward != record["em"] or record["em"] != sum(record["per_question"]["em"]):
        _fail(f"the reward {reward}, em {record['em']} and the sum over questions must be equal")
    if any(f1 < em for em, f1 in zip(record["per_question"]["em"], record["per_question"]["f1"], strict=True)):
        _fail("f1 is below em for a question")


def _check_segments(did: str, context: Any, task: str, turns: Sequence[Turn]) -> None:
    if not isinstance(context, tuple) or not all(isinstance(segment, Segment) for segment in context):
        _fail(f"{did} returned {_short(context)}; it must be a tuple of Segment")
    if not context or context[0] != Segment(SegmentKind.TASK, task):
        _fail(f"{did} returned {_short(context)}: the first segment must be the task")
    if any(segment.kind is SegmentKind.TASK for segment in context[1:]):
        _fail(f"{did} returned a second task segment")
    places = [(segment.turn, segment.kind is SegmentKind.INFORMATION) for segment in context[1:]]
    if any(not 0 <= turn < len(turns) for turn, _ in places):
        _fail(f"{did} labels a segment with a turn that did not happen: {[turn for turn, _ in places]}")
    if places != sorted(places):
        _fail(f"{did} returned segments out of order; oldest first, an action before its information")
    for segment in context[1:]:
        if segment.kind is SegmentKind.INFORMATION and segment.text not in turns[segment.turn].information:
            _fail(f"{did} labels as information of turn {segment.turn} a text that is no part of it")


def _ids(found: Sequence[Sequence[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in found]


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _fail(message: str) -> NoReturn:
    raise ContractError(message)
