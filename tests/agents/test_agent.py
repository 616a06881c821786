from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

from memopd_agents import Agent, FunctionAgent, OracleAgent, RandomAgent
from memopd_agents import agent as agent_module
from memopd_agents.agent import agent_factory
from memopd_env.errors import ConfigError
from memopd_env.protocol import Tags


class Parrot:
    """A stranger's agent: inherits from nothing."""

    def __init__(self, word: str = "x") -> None:
        self.word = word

    def reset(self, seed=None) -> None:
        pass

    def act(self, observation, info) -> str:
        return f"<answer>{self.word}</answer>"


class NoAct:
    def reset(self, seed=None) -> None:
        pass


def shout(observation, info) -> str:
    return f"<answer>{observation['task'].upper()}</answer>"


HERE = __name__
NOT_CALLABLE = 3


def test_every_built_in_agent_is_an_agent(tasks):
    for agent in (OracleAgent(tasks), RandomAgent(), Parrot(), FunctionAgent(shout)):
        assert isinstance(agent, Agent)


def test_found_by_name_and_given_what_it_asks_for(tasks):
    oracle = agent_factory("oracle", {"tasks": tasks, "tags": Tags(think="thought"), "unused": 1})()
    assert isinstance(oracle, OracleAgent)


def test_found_by_module_and_class(monkeypatch):
    assert agent_factory(f"{HERE}:Parrot", {"tasks": []}, word="hi")().act({}, {}) == "<answer>hi</answer>"


def test_found_in_the_folder_where_one_stands(monkeypatch, tmp_path):
    (tmp_path / "agent_of_a_stranger.py").write_text("def act(observation, info):\n    return '<answer>42</answer>'\n")
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert agent_factory("agent_of_a_stranger:act")().act({}, {}) == "<answer>42</answer>"


def test_function_becomes_an_agent():
    agent = agent_factory(f"{HERE}:shout")()
    agent.reset(0)
    assert agent.act({"task": "who"}, {}) == "<answer>WHO</answer>"


def test_found_by_entry_point(monkeypatch):
    plugin = EntryPoint("parrot", f"{HERE}:Parrot", "memopd.agents")
    monkeypatch.setattr(agent_module, "entry_points", lambda group: [plugin])
    assert agent_factory("parrot")().act({}, {}) == "<answer>x</answer>"


def test_each_call_makes_an_agent_of_its_own():
    make = agent_factory(f"{HERE}:Parrot")
    assert make() is not make()


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("orakel", {}, "no agent 'orakel': use .*oracle.*random"),
        ("nowhere_at_all:X", {}, "cannot be imported: No module named"),
        (f"{HERE}:Missing", {}, "cannot be imported: .*Missing"),
        (f"{HERE}:Parrot", {"wrod": "hi"}, "unexpected keyword argument 'wrod'; its arguments are: word"),
        (f"{HERE}:shout", {"word": "hi"}, r"takes no arguments \(word\)"),
        (f"{HERE}:NOT_CALLABLE", {}, "neither a class nor a function"),
        ("oracle", {}, "missing a required argument: 'tasks'"),
    ],
)
def test_mistake_is_named(spec, arguments, message):
    with pytest.raises(ConfigError, match=message):
        agent_factory(spec, {}, **arguments)


def test_class_without_act_is_refused():
    with pytest.raises(ConfigError, match="lacks act"):
        agent_factory(f"{HERE}:NoAct")()
