"""A context on a terminal: its segments, and which of them the memory policy is about to drop.

Whatever models and documents wrote is shown as text and never obeyed: control characters, ANSI escapes among them,
become visible signs, and brackets are not markup.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from memopd_env.memory import MemoryPolicy, Segment, SegmentKind, Turn

_COLOURS = {SegmentKind.TASK: "cyan", SegmentKind.ACTION: "green", SegmentKind.INFORMATION: "yellow"}


def visible(text: str) -> str:
    """Return text in which control and other unprintable characters are spelled out, line breaks and tabs apart."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text)


def context_view(context: Sequence[Segment], forgotten: Collection[Segment] = ()) -> Group:
    """Show the segments of a context, and mark those that will be forgotten after the next action.

    Args:
        context: What the agent sees, oldest first.
        forgotten: The segments to mark.
    """
    panels = []
    for segment in context:
        title = segment.kind.value if segment.turn < 0 else f"{segment.kind.value} of turn {segment.turn + 1}"
        colour = _COLOURS[segment.kind]
        if segment in forgotten:
            title += " · forgotten after this turn"
            colour = "red"
        panels.append(
            Panel(Text(visible(segment.text.strip("\n"))), title=title, title_align="left", border_style=colour)
        )
    return Group(*panels)


def forgotten_next(
    memory: MemoryPolicy, task: str, turns: Sequence[Turn], context: Sequence[Segment]
) -> tuple[Segment, ...]:
    """Return which segments of a context the next one will not hold.

    Args:
        memory: The policy.
        task: The task text.
        turns: What happened so far; the next turn is assumed to be as long as the last.
        context: What the policy makes of it.
    """
    next_turn = turns[-1] if turns else Turn("", "")
    kept = memory.context(task, [*turns, next_turn])
    return tuple(segment for segment in context if segment not in kept)


class History:
    """The turns of an episode as far as its contexts show them, for an onlooker who has only those."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(self, action: str, context: Sequence[Segment]) -> None:
        """Note an action and the context that followed it."""
        number = len(self.turns)
        replies = [part.text for part in context if part.kind is SegmentKind.INFORMATION and part.turn == number]
        self.turns.append(Turn(action, replies[0] if replies else ""))
