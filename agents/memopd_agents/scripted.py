"""Two agents that need no model: one that plays perfectly by the rules, one that plays at random.

The oracle knows what would count as right, but it may only write down what it has read: it searches for what the
question or a passage names, looks for an accepted answer in the information it got, carries what it found in its
memory, and answers ``unknown`` where it found nothing. So its score is the ceiling that the retriever and the turn
limit allow, and its episodes are demonstrations that a student can imitate, because every name in them follows from
what the student would see.
"""

from __future__ import annotations

import re
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
    """What the oracle has found out about one question: its passages still to read, and all texts it was shown."""

    question: str
    titles: list[str]
    found: str | None = None
    bridge: str | None = None
    asked: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)

    def shows(self, text: str) -> bool:
        """Whether any text seen so far has these words; nothing can be said of a text that is only an article."""
        return not normalize_answer(text) or any(_mentions(seen, text) for seen in self.seen)

    @property
    def query(self) -> str | None:
        """What to search for next, or None if there is nothing left to find.

        A title that nothing seen so far names would be a guess from the answer key: then the question is the query.
        """
        if self.found is not None or not self.titles:
            return None
        named = self.shows(_subject(self.titles[0]))
        query = self.titles[0] if named else self.question
        return None if query in self.asked else query

    def ask(self, query: str) -> None:
        """Note that this is being searched for."""
        self.asked.add(query)
        self.titles.pop(0)


def _subject(title: str) -> str:
    """What a title is about: Poland for ``Geography of Poland``, Augusta for ``Augusta (Georgia)``."""
    return re.sub(r"^.* of (the )?|\s*\([^)]*\)$", "", title) or title


def _mentions(normalized: str, name: str) -> bool:
    wanted = normalize_answer(name)
    return bool(wanted) and f" {wanted} " in normalized


def _readable(text: str) -> str:
    """A text as :func:`_mentions` takes it."""
    text = text.replace("<", " <").replace(">", "> ")  # a tag must not stick to the word beside it
    return f" {normalize_answer(text)} "


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
        queries = [notes.query for notes in self._notes]
        self._asked = next((number for number, query in enumerate(queries) if query is not None), None)
        if self._asked is None or observation["turns_left"] <= 1:
            self._asked = None
            answers = [notes.found or UNKNOWN for notes in self._notes]
            return self._act(self._tags.answer, "; ".join(answers))
        query = queries[self._asked]
        assert query is not None
        self._notes[self._asked].ask(query)
        return self._act(self._tags.search, query)

    def _begin(self, task_id: str) -> None:
        if task_id not in self._tasks:
            raise ConfigError(f"the oracle does not know task {task_id!r}: give it the environment's tasks")
        self._task = task = self._tasks[task_id]
        entities = task.entities or [()] * len(task.questions)
        self._notes = [_Notes(question, list(dict.fromkeys(titles)) or [question], seen=[_readable(question)])
                       for question, titles in zip(task.questions, entities, strict=True)]  # fmt: skip

    def _read(self, number: int, information: str) -> None:
        """Take from the information what answers question ``number``, or what leads on to its next search."""
        assert self._task is not None
        notes = self._notes[number]
        notes.seen.append(_readable(information))
        if notes.titles:
            notes.bridge = notes.titles[0] if _mentions(notes.seen[-1], notes.titles[0]) else None
            return
        read = notes.seen[1:]  # the question itself gives nothing away
        notes.found = next(
            (answer for answer in self._task.answers[number] if any(_mentions(text, answer) for text in read)), None
        )

    def _act(self, tag: str, content: str) -> str:
        assert self._task is not None
        memory = []
        for number, (question, notes) in enumerate(zip(self._task.questions, self._notes, strict=True)):
            pending = notes.query is not None or number == self._asked
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
