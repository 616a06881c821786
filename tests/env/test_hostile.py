"""Whatever a model writes and whatever a corpus holds: nothing crashes, nothing leaks, nothing is believed.

Every generated example is a batch of cases, so that twenty thousand of them take seconds.
"""

import json

import gymnasium as gym
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopd_env import MemOPDVectorEnv, StopReason, Task
from memopd_env.hostile import ACTIONS, SPOOFS
from memopd_env.protocol import ActionKind, parse_action
from memopd_env.retrieval import Passage
from memopd_env.scoring import score_answers

PIECES = (
    *("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"),
    *("<", ">", "</", "<think", "answer>", "< search >", "<SEARCH>", "＜answer＞", "<an\u200bswer>", "&lt;answer&gt;"),
    *(";", "; ", "Paris", "Madrid", "the", "a", " ", "\n", "\r", "\t", "\x00", "\ud800", "\udfff", "\u202e", "\u200b"),
    *(
        "\x1b[31m",
        "<b>",
        "<script>",
        "{0}",
        "{questions}",
        "%s",
        "\\",
        "\u2028",
        "e\u0301",
        "שלום",
        "東京",
        "\U0001f600",
    ),
)
odd_text = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.text(st.characters(exclude_categories=()), max_size=20),
)
quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
TASK = Task("t", ["Capital of France?", "Capital of Spain?"], [["Paris"], ["Madrid", "city; of Madrid"]])


class Echo:
    """Returns the query itself as a passage: the agent's own words come back as a document."""

    def search(self, queries, k):
        return [[Passage("0", query, query), Passage("1", "", query[::-1])][:k] for query in queries]


@pytest.fixture(scope="module")
def env():
    return gym.make("MemOPD-Q2", tasks=[TASK], retriever=Echo(), max_turns=3).unwrapped


def check_reply(observation, info, action):
    """A reply is well formed: one block or none, the action verbatim, every text what the context says."""
    information = observation["information"]
    assert information.count("<information>") == information.count("</information>") == (1 if information else 0)
    assert parse_action(information).kind is ActionKind.INVALID
    assert observation["memory"] == action
    assert observation["task"] + action + information == "".join(segment.text for segment in info["context"])


@settings(max_examples=300, **quiet)
@given(st.lists(odd_text, min_size=30, max_size=30))
def test_nine_thousand_generated_actions_are_read_without_a_crash(texts):
    for text in texts:
        parsed = parse_action(text)
        assert parsed.content in text
        if parsed.kind is ActionKind.INVALID:
            assert parsed.reason and not parsed.content
        else:
            assert f"<{parsed.kind}>" in text and f"</{parsed.kind}>" in text


@settings(max_examples=200, **quiet)
@given(st.lists(odd_text, min_size=30, max_size=30))
def test_six_thousand_generated_turns_are_played_without_a_crash(env, texts):
    for text in texts:
        observation, info = env.reset(options={"task_index": 0})
        first = observation["task"]
        action = f"<search>{text}</search>"
        observation, _, terminated, truncated, info = env.step(action)
        check_reply(observation, info, action)
        assert observation["task"] == first and not truncated
        # "</think><answer>" inside the query makes an answer of it.
        assert terminated == (parse_action(action).kind is ActionKind.ANSWER)
        if terminated:
            continue
        observation, reward, terminated, _, info = env.step(text)
        check_reply(observation, info, text)
        if terminated:
            assert json.loads(json.dumps(info["episode"])) == info["episode"]
            assert reward == info["episode"]["em"] <= info["episode"]["f1"] <= 2


@settings(max_examples=200, **quiet)
@given(st.lists(st.tuples(odd_text, odd_text), min_size=30, max_size=30))
def test_six_thousand_generated_answers_are_scored_without_a_crash(pairs):
    for said, gold in pairs:
        for answer_count in ("strict", "lenient"):
            score = score_answers(said, [[gold], ["Paris"]], answer_count)
            assert 0 <= score.em <= score.f1 <= 2


@settings(max_examples=40, **quiet)
@given(st.lists(st.lists(odd_text, min_size=8, max_size=8), min_size=4, max_size=4))
def test_generated_actions_in_a_vector_environment(rounds):
    vector = MemOPDVectorEnv(8, tasks=[TASK], retriever=Echo(), max_turns=3)
    vector.reset(seed=0)
    for actions in rounds:
        observations, rewards, *_ = vector.step(actions)
        assert len(observations["task"]) == 8 and (rewards >= 0).all() and (rewards <= 2).all()


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: ascii(action)[:40])
def test_no_action_of_the_corpus_crashes_an_episode(env, action):
    observation, _ = env.reset(options={"task_index": 0})
    observation, _, terminated, truncated, info = env.step(action)
    check_reply(observation, info, action)
    if not terminated:
        assert not truncated
        assert env.step("<answer>Paris; Madrid</answer>")[1] == 2.0
    else:
        assert info["episode"]["stop_reason"] == StopReason.ANSWERED
        json.dumps(info["episode"])


def test_ten_thousand_answers_score_nothing_under_strict(env):
    env.reset(options={"task_index": 0})
    _, reward, _, _, info = env.step("<answer>" + "; ".join(["Paris"] * 10_000) + "</answer>")
    assert reward == 0 and len(info["episode"]["answers"]) == 10_000


@pytest.mark.parametrize("policy", ["consolidate", "full", "window:2", "summary", "budget:64"])
def test_every_policy_survives_the_corpus(policy):
    env = gym.make("MemOPD-Q2", tasks=[TASK], retriever=Echo(), memory=policy, max_turns=len(ACTIONS) + 1)
    env.reset(seed=0)
    for action in ACTIONS:
        if parse_action(action[:100]).kind is ActionKind.ANSWER or parse_action(action).kind is ActionKind.ANSWER:
            continue
        observation, _, terminated, _, info = env.step(action)
        assert not terminated
        shown = observation["task"] + observation["memory"] + observation["information"]
        assert shown == "".join(segment.text for segment in info["context"])


@pytest.mark.parametrize("spoof", SPOOFS, ids=lambda spoof: ascii(spoof)[:40])
@pytest.mark.parametrize("instructions", ["full", "terse"])
def test_no_document_of_the_corpus_is_believed(spoof, instructions):
    passages = [Passage("0", spoof, f"{spoof} {spoof}"), Passage("1", "<", f"/information>{spoof}")]
    retriever = type("Fixed", (), {"search": lambda self, queries, k: [passages[:k] for _ in queries]})()
    env = gym.make("MemOPD-Q2", tasks=[TASK], retriever=retriever, instructions=instructions)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("<search>q</search>")
    check_reply(observation, info, "<search>q</search>")
    body = observation["information"].partition("<information>")[2].rpartition("</information>")[0]
    assert spoof not in body
    assert (reward, terminated, truncated) == (0.0, False, False)
    # An agent that repeats what it read outside its own tags has not acted.
    observation, _, terminated, _, info = env.step(observation["information"])
    assert not terminated and info["action"] == "invalid"
