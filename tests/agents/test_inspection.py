from __future__ import annotations

import io

from rich.console import Console

from memopd_agents.episode import Call, Episode
from memopd_agents.inspection import call_view, episode_table, score_table

NASTY = "[/bold]\x1b[2J\x07"


def rendered(view) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(view)
    return stream.getvalue()


def test_nothing_that_a_file_holds_is_markup_or_an_escape():
    call = Call([1], [2], text=NASTY, context=[("task", -1, NASTY)], finish_reason=NASTY)
    info = {
        **dict.fromkeys(("stop_reason", "num_questions", "searches", "invalid_actions", "turns", "em"), NASTY),
        "answers": [NASTY],
        "per_question": {"em": [NASTY], "f1": [NASTY]},
    }
    episode = Episode([call], 1.0, NASTY, info)
    for view in (episode_table([episode], 5), call_view(episode, 0), score_table(info, [NASTY], [[NASTY]])):
        text = rendered(view)
        assert "[/bold]" in text and "\x1b" not in text and "\x07" not in text


def test_scores_are_short_figures():
    text = rendered(score_table({"em": 1.0, "answers": ["a"], "per_question": {"em": [1.0], "f1": [2 / 3]}}))
    assert "em 1" in text and "0.667" in text
