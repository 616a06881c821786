"""What a student imitates: text agents' episodes as token-exact calls, and reading exercises from passages.

A scripted agent plays in text. Its actions are encoded once and its prompts are built from ids by the same
:class:`~memopd_agents.policy.PromptBuilder` that the policy will use, so a demonstrated call is laid out exactly like a
sampled one.

From-scratch models learn to copy before they can imitate. An exercise is a text in an information block followed by its
pieces in another order, as a memory: many copies in one call. The pieces are the facts of a terse world, the sentences
of a passage, or runs of random words, which nothing but copying can predict, so that copying comes soonest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from transformers import PreTrainedTokenizerBase

from memopd_agents.agent import Agent
from memopd_agents.episode import Call, Episode
from memopd_agents.policy import PromptBuilder
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage
from memopd_env.tasks.world import World


def demonstrate(
    agent: Agent,
    env: gym.Env[Any, Any],
    tokenizer: PreTrainedTokenizerBase,
    task_indices: Iterable[int],
    *,
    min_reward: float = 0.0,
    on_episode: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Play a text agent and record its episodes as calls of ids.

    Args:
        agent: Plays; its actions become ids by one encoding each.
        env: A MemOPD environment.
        tokenizer: Of the student.
        task_indices: Which of the environment's tasks to play, in this order.
        min_reward: Episodes below this reward per question (0..1) are left out.
        on_episode: Called after each episode with the number played so far.

    Returns:
        The kept episodes, without log-probs.
    """
    base = env.unwrapped
    if not isinstance(base, MemOPDEnv):
        raise ConfigError(f"demonstrations are played on a MemOPD environment, not on {type(base).__name__}")
    builder = PromptBuilder(tokenizer, base.tags)
    kept: list[Episode] = []
    for played, index in enumerate(task_indices, start=1):
        agent.reset(index)
        observation, info = base.reset(options={"task_index": index})
        calls: list[Call] = []
        actions: dict[int, tuple[str, Sequence[int]]] = {}
        reward, done = 0.0, False
        while not done:
            action = agent.act(observation, info)
            prompt_ids, segments = builder.build(info["context"], actions)
            action_ids = list(builder.encode(action))
            actions[len(calls)] = action, action_ids
            calls.append(Call(prompt_ids, action_ids, segments=segments, text=action))
            observation, gained, terminated, truncated, info = base.step(action)
            reward += float(gained)
            done = terminated or truncated
        episode = Episode(calls, reward, info["episode"]["task_id"], dict(info["episode"]))
        if reward >= min_reward * episode.info["num_questions"]:
            kept.append(episode)
        if on_episode:
            on_episode(played)
    return kept


def reading_exercises(
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    split: str = "train",
    passages: int = 2,
    seed: int = 0,
) -> list[Episode]:
    """Make exercises from a terse world: passages, then all their facts in another order, as memory lines.

    Args:
        world: A terse world.
        tokenizer: Of the student.
        count: Number of exercises, one call each.
        split: Whose entities occur.
        passages: Passages an exercise.
        seed: Another seed, other exercises.
    """
    if world.config.style != "terse":
        raise ConfigError("reading exercises are made from a terse world")
    rng, pool = np.random.default_rng(seed), world.indices(split)
    builder = PromptBuilder(tokenizer)
    episodes = []
    for number in range(count):
        chosen = [pool[int(i)] for i in rng.choice(len(pool), passages, replace=False)]
        lines = [f"{world.name(i)} {fact.sentence}" for i in chosen for fact in world.facts(i)]
        text = " ".join(f"{world.name(i)}: {world.passage(i).text}" for i in chosen)
        memory = "; ".join(lines[int(i)] for i in rng.permutation(len(lines)))
        prompt = list(builder.encode(f"<information> {text}</information>"))
        action = list(builder.encode(f"<think> {memory}</think>"))
        episodes.append(Episode([Call(prompt, action)], 0.0, f"exercise-{number}"))
    return episodes


def sentence_exercises(
    passages: Sequence[Passage], tokenizer: PreTrainedTokenizerBase, count: int, *, sentences: int = 3, seed: int = 0
) -> list[Episode]:
    """Make exercises from any corpus: a passage, then some of its sentences in another order, as a memory.

    Args:
        passages: The corpus, or a part of it.
        tokenizer: Of the student.
        count: Number of exercises, one call each.
        sentences: Most sentences that are repeated.
        seed: Another seed, other exercises.
    """
    if not passages:
        raise ConfigError("exercises are made from passages, and there are none to read: give a corpus file")
    rng = np.random.default_rng(seed)
    builder = PromptBuilder(tokenizer)
    episodes = []
    for number, at in enumerate(rng.integers(len(passages), size=count)):
        passage = passages[int(at)]
        found = [sentence for sentence in re.split(r"(?<=[.!?])\s+", passage.text) if sentence]
        chosen = " ".join(found[int(i)] for i in rng.permutation(len(found))[:sentences])
        prompt = list(builder.encode(f"<information> {passage.title}: {passage.text}</information>"))
        action = list(builder.encode(f"<think> {chosen}</think>"))
        episodes.append(Episode([Call(prompt, action)], 0.0, f"sentences-{number}"))
    return episodes


def word_exercises(
    passages: Iterable[Passage], tokenizer: PreTrainedTokenizerBase, count: int, *, words: int = 24, seed: int = 0
) -> list[Episode]:
    """Make exercises from any corpus: random words of it, then the same in runs of one to six, in another order.

    Args:
        passages: The corpus, or a part of it.
        tokenizer: Of the student.
        count: Number of exercises, one call each.
        words: Most words of an exercise; the least is a third of it.
        seed: Another seed, other exercises.
    """
    known = sorted({word for passage in passages for word in f"{passage.title} {passage.text}".split()})
    if not known:
        raise ConfigError("exercises are made from the words of passages, and there are none: give a corpus file")
    rng = np.random.default_rng(seed)
    builder = PromptBuilder(tokenizer)
    episodes = []
    for number in range(count):
        drawn = [known[int(i)] for i in rng.integers(len(known), size=rng.integers(words // 3, words, endpoint=True))]
        cuts = np.cumsum(rng.integers(1, 7, size=len(drawn)))
        runs = [list(run) for run in np.split(np.array(drawn), cuts) if len(run)]
        memory = "; ".join(" ".join(runs[int(i)]) for i in rng.permutation(len(runs)))
        prompt = list(builder.encode(f"<information> {' '.join(drawn)}</information>"))
        action = list(builder.encode(f"<think> {memory}</think>"))
        episodes.append(Episode([Call(prompt, action)], 0.0, f"words-{number}"))
    return episodes
