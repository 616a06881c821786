"""A task is N questions and, for each, the answers that count as right.

Nothing else of the field's schemas survives loading: whatever file a task came from, the rest of the product sees only
this frozen value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopd_env.errors import TaskError


@dataclass(frozen=True)
class Task:
    """N questions asked in one episode.

    Attributes:
        id: Unique within its task set.
        questions: The N questions, in the order in which they are asked.
        answers: For each question its accepted answers; the first is the canonical one.
        source: Where the questions come from, e.g. a dataset name.
        split: ``train``, ``validation``, ``test`` or empty.
        entities: For each question the titles its answer rests on, in reading order, where known; else empty. Splits
            are kept disjoint by them, and the oracle searches for them. Never shown to an agent.

    Raises:
        TaskError: If there is no question, a question or an accepted answer is blank, or the three lists disagree in
            length.
    """

    id: str
    questions: Sequence[str]
    answers: Sequence[Sequence[str]]
    source: str = ""
    split: str = ""
    entities: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.questions, str) or any(isinstance(accepted, str) for accepted in self.answers):
            raise TaskError(
                f"task {self.id!r}: questions must be a list of strings and answers a list of lists of strings"
            )
        object.__setattr__(self, "questions", tuple(self.questions))
        object.__setattr__(self, "answers", tuple(tuple(accepted) for accepted in self.answers))
        object.__setattr__(self, "entities", tuple(tuple(titles) for titles in self.entities))
        if not self.questions:
            raise TaskError(f"task {self.id!r} has no questions")
        if len(self.answers) != len(self.questions):
            raise TaskError(
                f"task {self.id!r} has {len(self.questions)} questions but {len(self.answers)} lists of answers"
            )
        if self.entities and len(self.entities) != len(self.questions):
            raise TaskError(
                f"task {self.id!r} has {len(self.questions)} questions but {len(self.entities)} lists of entities"
            )
        for number, (question, accepted) in enumerate(zip(self.questions, self.answers, strict=True), start=1):
            if not question.strip():
                raise TaskError(f"task {self.id!r}: question {number} is blank")
            if not all(answer.strip() for answer in accepted):
                raise TaskError(f"task {self.id!r}: question {number} ({question!r}) accepts a blank answer")
            if not accepted:
                raise TaskError(f"task {self.id!r}: question {number} ({question!r}) has no accepted answer")
