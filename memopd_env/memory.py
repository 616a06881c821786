"""A memory policy maps the turns so far to the segments that the next call sees.

That is the whole idea of the gym: the context is never a growing transcript but a value, rebuilt before every call by one
small pure function. ``consolidate`` keeps the task, the last action (in which the agent wrote its memory) and the newest
information; everything older is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable


class SegmentKind(StrEnum):
    """Who wrote a piece of context."""

    TASK = "task"
    ACTION = "action"
    INFORMATION = "information"


@dataclass(frozen=True)
class Segment:
    """A piece of context with a known origin.

    Attributes:
        kind: Task text, something the agent wrote, or something the environment replied.
        text: Its text, exactly as the agent sees it.
        turn: The turn it stems from, counted from 0; -1 for the task.
    """

    kind: SegmentKind
    text: str
    turn: int = -1


@dataclass(frozen=True)
class Turn:
    """One agent call and the environment's reply to it, both as rendered text."""

    action: str
    information: str


@runtime_checkable
class MemoryPolicy(Protocol):
    """Decides what the next call sees. Pure and total: same turns, same context; no turn list is an error."""

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return the segments of the next call, oldest first.

        Args:
            task: The rendered task text.
            turns: Everything that happened, oldest first; empty before the first call.
        """
        ...
