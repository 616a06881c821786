"""Episode files on a terminal: a list of episodes, one call of one of them, and a score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memopd_agents.episode import Call, Episode
from memopd_agents.metrics import call_sizes
from memopd_agents.terminal import context_view, visible
from memopd_env.memory import Segment, SegmentKind


def episode_table(episodes: Iterable[Episode], limit: int) -> Table:
    """List the first ``limit`` episodes."""
    table = Table()
    for head in ("episode", "task", "reward", "calls", "searches", "invalid", "peak tokens", "end"):
        table.add_column(head, justify="left" if head in ("task", "end") else "right")
    source = iter(episodes)
    for episode in islice(source, limit):
        info = episode.info
        (sizes,), _ = call_sizes([episode])
        table.add_row(
            str(episode.number),
            _shown(episode.task_id),
            _shown(f"{episode.reward:g} of {info.get('num_questions', '?')}"),
            str(len(episode.calls)),
            _shown(info.get("searches", "?")),
            _shown(info.get("invalid_actions", "?")),
            str(max((sum(size) for size in sizes), default=0)),
            _shown(info.get("stop_reason", "?")),
        )
    more = sum(1 for _ in source)
    table.caption = f"and {more} more; --limit shows them" if more else None
    return table


def call_view(episode: Episode, number: int, decode: Callable[[list[int]], str] | None = None) -> Group:
    """Show one call: what the model saw, what it wrote, and what it saw in the call before but no longer.

    Args:
        episode: The episode.
        number: Which call, from 0.
        decode: Turns ids into text, for calls that were recorded without.
    """
    call = episode.calls[number]
    context = _context(call, decode)
    parts: list[Any] = [context_view(context)]
    action = call.text or (decode(call.action_ids) if decode else "")
    sizes, _ = call_sizes([episode])
    prompt, sampled = sizes[0][number]
    title = _shown(f"action, {sampled} tokens after {prompt}, ended by {call.finish_reason}")
    parts.append(Panel(Text(visible(action)), title=title, title_align="left", border_style="bold green"))
    if number:
        before = _context(episode.calls[number - 1], decode)
        if dropped := [segment for segment in before if segment not in context]:
            names = ", ".join(f"{segment.kind.value} of turn {segment.turn + 1}" for segment in dropped)
            parts.append(Text(f"forgotten since the call before: {names}", style="red"))
    return Group(*parts)


def score_table(
    info: Mapping[str, Any], questions: Sequence[str] = (), accepted: Sequence[Sequence[str]] = ()
) -> Table:
    """Show how an episode was scored, question by question.

    Args:
        info: The environment's ``info["episode"]``.
        questions: The questions, if at hand.
        accepted: For each question the accepted answers, if at hand.
    """
    totals = ", ".join(f"{name} {_figure(info[name])}" for name in ("em", "f1", "sub_em") if name in info)
    title = f"{info.get('stop_reason', 'no score')} after {info.get('turns', '?')} turns: {totals}"
    table = Table(title=_shown(title))
    for head in ("question", "answer", *(["accepted"] if accepted else []), "EM", "F1"):
        table.add_column(head)
    scores = info.get("per_question", {"em": [], "f1": []})
    given = info.get("answers", [])
    for number, (em, f1) in enumerate(zip(scores["em"], scores["f1"], strict=True)):
        question = questions[number] if questions else str(number + 1)
        said = given[number] if number < len(given) else ""
        golds = [" | ".join(accepted[number])] if accepted else []
        table.add_row(*map(_shown, (question, said, *golds, _figure(em), _figure(f1))))
    return table


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)


def _shown(value: object) -> Text:
    """Whatever a file holds, as text: never markup, never an escape."""
    return Text(visible(str(value)))


def _context(call: Call, decode: Callable[[list[int]], str] | None) -> list[Segment]:
    if call.context:
        return [Segment(SegmentKind(kind), text, turn) for kind, turn, text in call.context]
    spans = call.segments
    texts = [
        decode(call.prompt_ids[span.start : span.end])
        if decode
        else f"({span.end - span.start} tokens; --tokenizer FOLDER shows them)"
        for span in spans
    ]
    return [Segment(SegmentKind(span.kind), text, span.turn) for span, text in zip(spans, texts, strict=True)]
