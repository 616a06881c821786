"""The conformance kit: our own parts pass, and each kind of defect is found and named."""

import gymnasium as gym
import pytest

import memopd_env
from memopd_env.memory import Consolidate, Segment, SegmentKind
from memopd_env.protocol import Tags
from memopd_env.retrieval import Passage
from memopd_env.testing import (
    ContractError,
    check_agent,
    check_env_contract,
    check_memory_policy,
    check_retriever,
    check_spoofing,
)


@pytest.mark.parametrize("env_id", memopd_env.ENVIRONMENTS)
def test_our_environments_pass(env_id):
    check_env_contract(gym.make(env_id))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"memory": "full"},
        {"memory": "summary"},
        {"memory": "budget:100"},
        {"memory": "window:0"},
        {"instructions": "terse"},
        {"answer_count": "lenient"},
        {"tags": Tags("thought", "query", "final", "result")},
    ],
    ids=repr,
)
def test_our_environment_passes_in_every_setting(make, kwargs):
    check_env_contract(make(**kwargs))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"instructions": "terse"},
        {"memory": "full"},
        {"tags": Tags("thought", "query", "final", "result")},
        {"tags": Tags("pensée", "begin_query", "最终", "x-info")},
        {"max_passage_chars": 30},
    ],
    ids=repr,
)
def test_no_document_spoofs_our_environment(kwargs):
    check_spoofing(
        lambda tasks, retriever: gym.make("MemOPD-Q2", tasks=tasks, retriever=retriever, **kwargs), kwargs.get("tags")
    )


def test_our_retriever_passes(retriever):
    check_retriever(retriever, ["Spain", "capital of France", "river"])


class Broken(gym.Wrapper):
    """An environment with one thing wrong."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.spoil(observation, reward, terminated, truncated, info)

    @property
    def unwrapped(self):
        return self.env.unwrapped


def broken(spoil):
    return type("Spoiled", (Broken,), {"spoil": staticmethod(spoil)})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda o, r, t, u, i: (o | {"memory": "lost"}, r, t, u, i), "not the text of"),
        (lambda o, r, t, u, i: (o | {"turns_left": 5}, r, t, u, i), "turns_left is 5 after a turn"),
        (lambda o, r, t, u, i: (o, r + 0.1, t, u, i), "reward must be 0|must be equal"),
        (lambda o, r, t, u, i: (o, r, t, u, {k: v for k, v in i.items() if k != "episode"}), "no 'episode'"),
        (lambda o, r, t, u, i: (o, r, False, u, i), "before the end|must end the episode"),
        (lambda o, r, t, u, i: (o | {"information": None}, r, t, u, i), "not in the observation space"),
    ],
)
def test_a_broken_environment_is_found(make, spoil, complaint):
    with pytest.raises(ContractError, match=complaint):
        check_env_contract(broken(spoil)(make()))


def test_an_environment_that_lets_documents_through_is_found(monkeypatch):
    monkeypatch.setattr("memopd_env.protocol.neutralise", lambda text, names: text)
    with pytest.raises(ContractError, match="broke the information block"):
        check_spoofing(lambda tasks, retriever: gym.make("MemOPD-Q2", tasks=tasks, retriever=retriever))


def policy(context):
    return type("Mine", (), {"context": staticmethod(context)})()


def task_segment(text):
    return Segment(SegmentKind.TASK, text)


@pytest.mark.parametrize(
    ("context", "complaint"),
    [
        (lambda task, turns: (), "first segment must be the task"),
        (lambda task, turns: [task_segment(task)], "tuple of Segment"),
        (lambda task, turns: (task_segment(task), task_segment(task)), "second task segment"),
        (
            lambda task, turns: (task_segment(task), Segment(SegmentKind.ACTION, turns[-1].action, 0)),
            "raised IndexError",
        ),
        (lambda task, turns: (task_segment(task), Segment(SegmentKind.ACTION, "x", 99)), "did not happen"),
        (
            lambda task, turns: (turns.clear() if isinstance(turns, list) else None, (task_segment(task),))[1],
            "changed the turns",
        ),
        (
            lambda task, turns: (
                task_segment(task),
                *(Segment(SegmentKind.ACTION, t.action, i) for i, t in reversed(list(enumerate(turns)))),
            ),
            "out of order",
        ),
        (
            lambda task, turns: (
                task_segment(task),
                *(Segment(SegmentKind.INFORMATION, "made up", i) for i, _ in enumerate(turns)),
            ),
            "no part of it",
        ),
    ],
)
def test_a_broken_memory_policy_is_found(context, complaint):
    with pytest.raises(ContractError, match=complaint):
        check_memory_policy(policy(context))


def test_a_policy_with_a_state_is_found():
    calls = []

    def context(task, turns):
        calls.append(1)
        return (task_segment(task),) + ((Segment(SegmentKind.ACTION, str(len(calls)), 0),) if turns else ())

    with pytest.raises(ContractError, match="pure function"):
        check_memory_policy(policy(context))


def searching(search):
    return type("Mine", (), {"search": lambda self, queries, k: search(queries, k)})()


@pytest.mark.parametrize(
    ("search", "complaint"),
    [
        (lambda queries, k: [[]], "one list for each query"),
        (lambda queries, k: [[Passage("0", "", "")] * (k + 1) for _ in queries], "more than 1"),
        (lambda queries, k: [["text"] for _ in queries], "something else than Passage"),
        (lambda queries, k: [[Passage(str(i), "", "", i) for i in range(k)] for _ in queries], "not best first"),
        (lambda queries, k: [[Passage(str(len(queries)), "", "")] for _ in queries], "one query at a time"),
        (lambda queries, k: [[] for _ in queries], "found nothing"),
    ],
)
def test_a_broken_retriever_is_found(search, complaint):
    with pytest.raises(ContractError, match=complaint):
        check_retriever(searching(search))


class Scripted:
    """Searches once, then answers."""

    def __init__(self, answer="<answer>Paris; Madrid</answer>"):
        self.answer = answer

    def reset(self, seed=None):
        self.turn = 0

    def act(self, observation, info):
        self.turn += 1
        return "<search>Spain</search>" if self.turn == 1 else self.answer


def test_a_sound_agent_passes(make):
    check_agent(Scripted(), make())


def test_broken_agents_are_found(make):
    with pytest.raises(ContractError, match="an action is a string"):
        check_agent(Scripted(answer=None), make())

    class Meddling(Scripted):
        def act(self, observation, info):
            observation["task"] = "easier"
            return super().act(observation, info)

    with pytest.raises(ContractError, match="changed the observation"):
        check_agent(Meddling(), make())

    class Moody(Scripted):
        moods = 0

        def act(self, observation, info):
            Moody.moods += 1
            return f"<answer>{Moody.moods}</answer>"

    with pytest.raises(ContractError, match="differently"):
        check_agent(Moody(), make())
    check_agent(Moody(), make(), deterministic=False)


def test_a_contract_error_is_an_assertion_for_test_frameworks():
    with pytest.raises(AssertionError):
        check_memory_policy(policy(lambda task, turns: ()))
    check_memory_policy(Consolidate())
