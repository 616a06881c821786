from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_agents.episode import Call, Episode
from memopd_agents.metrics import ScoreError, call_sizes, measure
from memopd_env import Task


def episode(em: float = 1.0, calls: list[Call] | None = None, number: int = 0, **changes) -> Episode:
    info = {
        "task_id": "t",
        "answers": ["a", "b"],
        "em": em,
        "f1": em,
        "sub_em": em,
        "num_questions": 2,
        "searches": 2,
        "turns": 3,
        "invalid_actions": 0,
        "stop_reason": "answered",
        "excluded": False,
        **changes,
    }
    return Episode(calls or [Call([1] * 10, [1] * 4), Call([1] * 20, [1] * 2)], em, "t", info, number=number)


def mean(figures, name: str) -> float:
    return figures["metrics"][name]["mean"]


def test_scores_are_sums_and_shares():
    figures = measure([episode(2.0), episode(1.0), episode(0.0), episode(0.0)])
    assert mean(figures, "em") == 0.75
    assert mean(figures, "em_per_question") == 0.375


def test_costs_follow_their_definitions():
    figures = measure([episode()])
    assert mean(figures, "peak_tokens") == 22
    assert mean(figures, "dependency") == (10 + 2) * 4 + (20 + 1) * 2
    assert mean(figures, "action_tokens") == 6


def test_invalid_rate_is_over_turns_not_over_episodes():
    figures = measure([episode(invalid_actions=1, turns=1), episode(invalid_actions=0, turns=9)])
    assert mean(figures, "invalid_rate") == 0.1


def test_episode_that_a_retriever_failure_ended_is_counted_apart():
    figures = measure([episode(2.0), episode(0.0, excluded=True, stop_reason="retriever_error")])
    assert mean(figures, "em") == 2.0
    assert figures["episodes"] == {"played": 2, "scored": 1, "excluded": 1}
    assert figures["stop_reasons"] == {"answered": 1}


def test_nothing_left_to_score_is_an_error():
    with pytest.raises(ScoreError, match="none of 1 episodes"):
        measure([episode(excluded=True)])


def test_episode_without_a_score_is_named():
    with pytest.raises(ScoreError, match=r"episode 7 .* has no score"):
        measure([Episode([], 0.0, "t", {}, number=7)])


def test_order_in_which_episodes_were_finished_changes_nothing():
    outcomes = [episode(em, number=number) for number, em in enumerate((0.1, 2.0, 0.7, 1.1, 0.0))]
    assert measure(outcomes) == measure(outcomes[::-1])


def test_interval_is_seeded_and_of_the_right_width():
    outcomes = [episode(float(right)) for right in np.random.default_rng(0).integers(0, 2, 400)]
    first, again, other = measure(outcomes, seed=1), measure(outcomes, seed=1), measure(outcomes, seed=2)
    assert first == again != other
    em = first["metrics"]["em"]
    assert em["high"] - em["low"] == pytest.approx(2 * 1.96 * 0.5 / 400**0.5, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 9)), min_size=1, max_size=12))
def test_interval_contains_the_mean_and_never_leaves_the_range(outcomes):
    figures = measure([episode(em, turns=turns) for em, turns in outcomes])
    for name in ("em", "turns"):
        metric = figures["metrics"][name]
        values = [em for em, _ in outcomes] if name == "em" else [turns for _, turns in outcomes]
        assert min(values) - 1e-9 <= metric["low"] <= metric["mean"] + 1e-9
        assert metric["mean"] - 1e-9 <= metric["high"] <= max(values) + 1e-9


def test_published_scores_keep_articles():
    figures = measure([episode(answers=["the Louvre", "b"])], {"t": Task("t", ["q1", "q2"], [["Louvre"], ["b"]])})
    assert mean(figures, "paper_em") == 1.0


def test_episode_of_an_unknown_task_is_named():
    with pytest.raises(ScoreError, match="'t', which is not among the tasks"):
        measure([episode()], {})


def text_call(usage: dict[str, int] | None = None) -> Call:
    return Call([], [], text="three words here", context=[("task", -1, "two words")], usage=usage or {})


def test_tokens_are_counted_by_the_best_source_that_covers_every_call():
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    assert call_sizes([episode()]) == ([[(10, 4), (20, 2)]], "the policy's token ids")
    assert call_sizes([episode(calls=[text_call(usage)])]) == ([[(7, 5)]], "the endpoint's own report")
    mixed = [episode(calls=[text_call(usage), text_call()])]
    assert call_sizes(mixed) == ([[(2, 3), (2, 3)]], "white-space separated words")
    assert call_sizes(mixed, len, "characters") == ([[(9, 16), (9, 16)]], "characters")
