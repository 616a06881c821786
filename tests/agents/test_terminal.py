from __future__ import annotations

import pytest
from rich.console import Console

from memopd_agents.terminal import History, context_view, forgotten_next, visible
from memopd_env import MemOPDEnv
from memopd_env.memory import Consolidate, Full, Segment, SegmentKind, Turn, memory_policy

TURNS = [Turn("a0", "i0"), Turn("a1", "i1")]


def test_control_characters_are_spelled_out():
    assert visible("a\x1b[31mb\x00\r\n\tü") == "a\\x1b[31mb\\x00\\r\n\tü"


@pytest.mark.parametrize(
    ("memory", "dropped"),
    [("consolidate", ["a1", "i1"]), ("full", []), ("window:2", ["a0", "i0"]), ("window:3", []), ("summary", ["i1"])],
)
def test_what_the_policy_will_drop_is_known_before(memory, dropped):
    policy = memory_policy(memory)
    turns = (
        [Turn(f"<think>{turn.action}</think>", turn.information) for turn in TURNS] if memory == "summary" else TURNS
    )
    context = policy.context("q", turns)
    texts = [segment.text for segment in forgotten_next(policy, "q", turns, context)]
    assert [text for text in texts if "think" not in text] == dropped


def test_view_marks_the_forgotten_and_obeys_no_markup():
    task = "[red]task[/red]\x1b[2J"
    context = Consolidate().context(task, TURNS)
    console = Console(width=60, force_terminal=False)
    with console.capture() as capture:
        console.print(context_view(context, forgotten_next(Consolidate(), task, TURNS, context)))
    text = capture.get()
    assert "[red]task[/red]\\x1b[2J" in text and "\x1b" not in text
    assert text.count("forgotten after this turn") == 2
    assert "information of turn 2" in text


def test_history_is_what_the_contexts_show(tasks, retriever):
    env = MemOPDEnv(tasks=tasks, retriever=retriever, memory=Full())
    env.reset(seed=0)
    history = History()
    for action in ("<search>Bo</search>", "nonsense"):
        _, _, _, _, info = env.step(action)
        history.add(action, info["context"])
    shown = [segment.text for segment in info["context"] if segment.kind is SegmentKind.INFORMATION]
    assert [turn.information for turn in history.turns] == shown
    assert [turn.action for turn in history.turns] == ["<search>Bo</search>", "nonsense"]


def test_history_without_a_reply_in_sight_is_empty_there():
    history = History()
    history.add("a", (Segment(SegmentKind.TASK, "q"),))
    assert history.turns == [Turn("a", "")]
