"""Two agents that need no model: one that plays perfectly by the rules, one that plays at random.

The oracle knows what would count as right, but it may only write down what it has read: it searches, looks for an
accepted answer in the information it got, carries what it found in its memory, and answers ``unknown`` where it found
nothing. So its score is the ceiling that the retriever and the turn limit allow, and its episodes are demonstrations
that a student can imitate, because every word of them follows from what the student would see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd_env import Task
from memopd_env.errors import ConfigError
from memopd_env.protocol import Tags
from memopd_env.scoring import normalize_answer

UNKNOWN = "unknown"


@dataclass
class _Notes:
    """What the oracle has found out about one question."""

    queries: list[str]
    found: str | None = None
    bridge: str | None = None
    seen: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.found is None and bool(self.queries)


class OracleAgent:
    """Searches for what each question rests on, reads the answer, remembers it, answers.

    Args:
        tasks: The tasks that may be asked; recognised by ``info["task_id"]``.
        tags: The protocol's tag names.
    """

    def __init__(self, tasks: Sequence[Task], tags: Tags | None = None) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._tags = tags or Tags()
        self._task: Task | None = None
        self._notes: list[_Notes] = []
        self._asked: int | None = None

    def reset(self, seed: int | None = None) -> None:
        """Forget the episode; the oracle draws nothing, so the seed changes nothing."""
        self._task, self._notes, self._asked = None, [], None

    def act(self, observation: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        """Return the next action.

        Raises:
            ConfigError: If the environment asks a task that the oracle was not given.
        """
        if self._task is None:
            self._begin(info["task_id"])
        assert self._task is not None
        if self._asked is not None:
            self._read(self._asked, observation["information"])
        open_question = next((number for number, notes in enumerate(self._notes) if notes.open), None)
        if open_question is None or observation["turns_left"] <= 1:
            self._asked = None
            answers = [notes.found or UNKNOWN for notes in self._notes]
            return self._act(self._tags.answer, "; ".join(answers))
        self._asked = open_question
        return self._act(self._tags.search, self._notes[open_question].queries.pop(0))

    def _begin(self, task_id: str) -> None:
        if task_id not in self._tasks:
            raise ConfigError(f"the oracle does not know task {task_id!r}: give it the environment's tasks")
        self._task = task = self._tasks[task_id]
        entities = task.entities or [()] * len(task.questions)
        self._notes = [_Notes(list(dict.fromkeys(titles)) or [question])
                       for question, titles in zip(task.questions, entities, strict=True)]  # fmt: skip

    def _read(self, number: int, information: str) -> None:
        """Take from the information what answers question ``number``, or what leads on to its next search."""
        assert self._task is not None
        notes = self._notes[number]
        text = information.replace("<", " <").replace(">", "> ")  # a tag must not stick to the word beside it
        notes.seen.append(f" {normalize_answer(text)} ")
        if notes.queries:
            notes.bridge = notes.queries[0] if self._mentions(notes.seen[-1], notes.queries[0]) else None
            return
        for answer in self._task.answers[number]:
            if any(self._mentions(text, answer) for text in notes.seen):
                notes.found = answer
                return

    @staticmethod
    def _mentions(text: str, name: str) -> bool:
        wanted = normalize_answer(name)
        return bool(wanted) and f" {wanted} " in text

    def _act(self, tag: str, content: str) -> str:
        assert self._task is not None
        memory = []
        for number, (question, notes) in enumerate(zip(self._task.questions, self._notes, strict=True)):
            pending = notes.open or number == self._asked
            known = notes.found or (f"({notes.bridge}) ?" if notes.bridge and pending else "?" if pending else UNKNOWN)
            memory.append(f"{question.rstrip(' ?')} {known}")
        think = self._tags.think
        return f"<{think}> {'; '.join(memory)}</{think}><{tag}> {content}</{tag}>"


class RandomAgent:
    """Searches for a random word it can see, or answers with random ones; always a valid action.

    Args:
        answer_probability: Chance of answering in each turn before the last.
        tags: The protocol's tag names.
    """

    def __init__(self, answer_probability: float = 0.2, tags: Tags | None = None) -> None:
        self._answer_probability = answer_probability
        self._tags = tags or Tags()
        self._rng = np.random.default_rng(0)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode with its own random stream."""
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        """Return a random valid action."""
        text = f"{observation['task']} {observation['information']}"
        for mark in "<>":
            text = text.replace(mark, " ")
        words = text.split() or [UNKNOWN]
        think, search, answer = self._tags.think, self._tags.search, self._tags.answer
        if observation["turns_left"] > 1 and self._rng.random() >= self._answer_probability:
            return f"<{think}> </{think}><{search}> {self._rng.choice(words)}</{search}>"
        guesses = "; ".join(str(self._rng.choice(words)) for _ in range(info.get("num_questions", 1)))
        return f"<{think}> </{think}><{answer}> {guesses}</{answer}>"
