"""Memory policies: what of the turns so far the next call sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.memory import (
    Budget,
    Consolidate,
    Full,
    Segment,
    SegmentKind,
    Summary,
    Turn,
    Window,
    estimate_tokens,
    memory_policy,
)
from memopd_env.testing import check_memory_policy

TURNS = [Turn(f"<think>t{i}</think><search>q{i}</search>", f"i{i}") for i in range(4)]
TASK = Segment(SegmentKind.TASK, "task")


def texts(policy, turns=TURNS):
    return [segment.text for segment in policy.context("task", turns)[1:]]


@pytest.mark.parametrize(
    "policy",
    [Consolidate(), Full(), Window(0), Window(1), Window(3), Summary(), Summary("thought"), Budget(0), Budget(60)],
    ids=repr,
)
def test_every_policy_keeps_the_contract(policy):
    check_memory_policy(policy)


@pytest.mark.parametrize("policy", [Consolidate(), Full(), Window(2), Summary(), Budget(9)], ids=repr)
def test_the_first_call_sees_the_task_alone(policy):
    assert policy.context("task", []) == (TASK,)


def test_consolidate_keeps_the_last_turn():
    assert texts(Consolidate()) == [TURNS[3].action, "i3"]


def test_full_keeps_every_turn_in_order():
    assert texts(Full()) == [text for turn in TURNS for text in (turn.action, turn.information)]
    assert [segment.turn for segment in Full().context("task", TURNS)] == [-1, 0, 0, 1, 1, 2, 2, 3, 3]


def test_window_keeps_the_last_k_turns():
    assert texts(Window(2)) == [TURNS[2].action, "i2", TURNS[3].action, "i3"]
    assert texts(Window(0)) == []
    assert texts(Window(99)) == texts(Full())


def test_summary_carries_only_the_thought():
    assert texts(Summary()) == ["<think>t3</think>", "i3"]


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        ("<think>open <search>q</search>", ""),
        ("<search>q</search>", ""),
        ("began in the prompt</think><search>q</search>", "began in the prompt</think>"),
        ("a</think><think>b</think>", "a</think>"),
        ("noise <think>a</think><think>b</think>", "<think>a</think>"),
    ],
)
def test_summary_of_malformed_thoughts(action, kept):
    assert texts(Summary(), [Turn(action, "i")]) == [kept, "i"]


def test_budget_keeps_the_newest_segments_whole():
    policy = Budget(10, count=len)
    turns = [Turn("aaaa", "bbbb"), Turn("cccc", "dd")]
    assert texts(policy, turns) == ["bbbb", "cccc", "dd"]
    assert texts(Budget(9, count=len), turns) == ["cccc", "dd"]
    assert texts(Budget(1, count=len), turns) == []


def test_budget_never_skips_a_segment_to_fit_an_older_one():
    assert texts(Budget(5, count=len), [Turn("a", "b"), Turn("too long", "c")]) == ["c"]


@given(
    st.lists(st.builds(Turn, st.text(max_size=9), st.text(max_size=9)), max_size=8),
    st.integers(0, 80),
)
def test_budget_is_kept_and_is_a_suffix_of_the_full_history(turns, tokens):
    kept = Budget(tokens).context("task", turns)
    assert sum(estimate_tokens(segment.text) for segment in kept[1:]) <= tokens
    everything = Full().context("task", turns)
    assert kept[0] == everything[0] and kept[1:] == everything[len(everything) - len(kept) + 1 :]


def test_token_estimate_counts_bytes_and_survives_lone_surrogates():
    assert (estimate_tokens(""), estimate_tokens("abcd"), estimate_tokens("abcde"), estimate_tokens("東京")) == (
        0,
        1,
        2,
        2,
    )
    assert estimate_tokens("\ud800") == 1


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("consolidate", Consolidate()),
        ("full", Full()),
        ("window:3", Window(3)),
        ("summary", Summary("think")),
        ("budget:512", Budget(512)),
    ],
)
def test_policies_by_name(name, policy):
    assert memory_policy(name) == policy


def test_summary_looks_for_the_configured_tag():
    assert memory_policy("summary", think="thought") == Summary("thought")


def test_a_policy_object_is_taken_as_it_is():
    class Mine:
        def context(self, task, turns):
            return (Segment(SegmentKind.TASK, task),)

    mine = Mine()
    assert memory_policy(mine) is mine


@pytest.mark.parametrize(
    "spec", ["", "fulls", "window", "window:", "window:-1", "window:x", "full:2", "budget:²", object()]
)
def test_unknown_policies_are_refused_with_the_names_that_exist(spec):
    with pytest.raises(ConfigError, match="consolidate, full, window:K"):
        memory_policy(spec)


@pytest.mark.parametrize("make", [lambda: Window(-1), lambda: Budget(-1)])
def test_negative_sizes_are_refused(make):
    with pytest.raises(ConfigError, match="0 or more"):
        make()
