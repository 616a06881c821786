"""A memory policy maps the turns so far to the segments that the next call sees.

That is the whole idea of the gym: the context is never a growing transcript but a value, rebuilt before every call by
one small pure function. ``consolidate`` keeps the task, the last action (in which the agent wrote its memory) and the
newest information; everything older is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from memopd_env.errors import ConfigError


class SegmentKind(StrEnum):
    """Who wrote a piece of context."""

    TASK = "task"
    ACTION = "action"
    INFORMATION = "information"


_TASK, _ACTION, _INFORMATION = SegmentKind  # a member's name is looked up slowly, and these are needed in every step


class Segment(NamedTuple):
    """A piece of context with a known origin.

    Attributes:
        kind: Task text, something the agent wrote, or something the environment replied.
        text: Its text, exactly as the agent sees it.
        turn: The turn it stems from, counted from 0; -1 for the task.
    """

    kind: SegmentKind
    text: str
    turn: int = -1


_segment: Callable[[tuple[SegmentKind, str, int]], Segment] = partial(tuple.__new__, Segment)
"""``Segment(*fields)`` in half the time, for the policy that every step of most environments runs."""


class Turn(NamedTuple):
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


@dataclass(frozen=True)
class Consolidate:
    """Keep the task, the last action and the last information: the agent's own words are its only memory.

    This is the context of MEM1 (arXiv 2506.15841): what the agent wants to know later it must write again in every
    action.
    """

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return task, last action, last information."""
        if not turns:
            return (Segment(_TASK, task),)
        (action, information), number = turns[-1], len(turns) - 1
        return (
            _segment((_TASK, task, -1)),
            _segment((_ACTION, action, number)),
            _segment((_INFORMATION, information, number)),
        )


@dataclass(frozen=True)
class Full:
    """Keep everything: the ordinary growing transcript, as Search-R1 (arXiv 2503.09516) has it."""

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return the task and every turn."""
        return _newest(task, turns, len(turns))


@dataclass(frozen=True)
class Window:
    """Keep the task and the last ``k`` turns.

    Raises:
        ConfigError: If ``k`` is negative.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"memory 'window:{self.k}': the number of turns must be 0 or more")

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return the task and the last ``k`` turns."""
        return _newest(task, turns, self.k)


@dataclass(frozen=True)
class Summary:
    """Keep only what the agent thought: the think block of the last action, then the last information.

    The query or answer after the think block is dropped; an action without a complete think block leaves nothing
    behind.

    Attributes:
        think: Name of the think tag.
    """

    think: str = "think"

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return task, last think block, last information."""
        start = Segment(_TASK, task)
        if not turns:
            return (start,)
        number = len(turns) - 1
        thought = Segment(_ACTION, _think_block(turns[-1].action, self.think), number)
        return (start, thought, Segment(_INFORMATION, turns[-1].information, number))


def estimate_tokens(text: str) -> int:
    """Guess a token count: a quarter of the UTF-8 bytes, rounded up, a rule of thumb for byte-pair vocabularies."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(frozen=True)
class Budget:
    """Keep the newest segments that fit a budget of tokens; the task is always kept and costs nothing.

    Segments are taken whole, from the newest backwards, and the first that does not fit ends the walk, so what is kept
    is always an unbroken end of the history.

    Attributes:
        tokens: Budget for everything after the task.
        count: How many tokens a text has; :func:`estimate_tokens` unless you have a tokenizer at hand.

    Raises:
        ConfigError: If ``tokens`` is negative.
    """

    tokens: int
    count: Callable[[str], int] = field(default=estimate_tokens, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"memory 'budget:{self.tokens}': the number of tokens must be 0 or more")

    def context(self, task: str, turns: Sequence[Turn]) -> tuple[Segment, ...]:
        """Return the task and the newest segments within the budget."""
        left = self.tokens
        kept: list[Segment] = []
        for number in range(len(turns) - 1, -1, -1):
            for kind, text in (
                (_INFORMATION, turns[number].information),
                (_ACTION, turns[number].action),
            ):
                left -= self.count(text)
                if left < 0:
                    return (Segment(_TASK, task), *reversed(kept))
                kept.append(Segment(kind, text, number))
        return (Segment(_TASK, task), *reversed(kept))


def memory_policy(spec: str | MemoryPolicy, think: str = "think") -> MemoryPolicy:
    """Turn the ``memory`` argument of an environment into a policy.

    Args:
        spec: ``consolidate``, ``full``, ``window:K`` (turns), ``summary``, ``budget:T`` (tokens), or an object with a
            ``context`` method.
        think: Name of the think tag, which ``summary`` looks for.

    Raises:
        ConfigError: If the name is unknown, its number malformed, or the object no memory policy.
    """
    if not isinstance(spec, str):
        if callable(getattr(spec, "context", None)):
            return spec
        raise ConfigError(f"memory is {spec!r}, which has no context(task, turns) method; {_MEMORY_NAMES}")
    name, colon, number = spec.partition(":")
    if not colon and name in ("consolidate", "full", "summary"):
        return {"consolidate": Consolidate, "full": Full, "summary": lambda: Summary(think)}[name]()
    if name in ("window", "budget") and number.isascii() and number.isdigit():
        return Window(int(number)) if name == "window" else Budget(int(number))
    raise ConfigError(f"memory is {spec!r}; {_MEMORY_NAMES}")


_MEMORY_NAMES = "use consolidate, full, window:K (turns), summary, budget:T (tokens), or a policy object"


def _newest(task: str, turns: Sequence[Turn], k: int) -> tuple[Segment, ...]:
    segments = [Segment(_TASK, task)]
    for number in range(max(0, len(turns) - k), len(turns)):
        turn = turns[number]
        segments.append(Segment(_ACTION, turn.action, number))
        segments.append(Segment(_INFORMATION, turn.information, number))
    return tuple(segments)


def _think_block(action: str, think: str) -> str:
    opening, closing = f"<{think}>", f"</{think}>"
    end = action.find(closing)
    if end < 0:
        return ""
    # A model whose prompt already opened the block writes only its end.
    start = action.find(opening, 0, end)
    return action[max(start, 0) : end + len(closing)]
