"""Every plug-in plays a whole episode against a real HTTP endpoint with scripted replies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memopd_agents import play_episode, play_episodes
from memopd_agents.agent import agent_factory
from memopd_env import MemOPDEnv

from .chat_server import call, chat_server, next_move, text, transcript

EXAMPLES = Path(__file__).parents[2] / "agents" / "examples"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def make_env(tasks, retriever):
    return lambda: MemOPDEnv(tasks=tasks, retriever=retriever)


def in_tags(body):
    memory, query, answers = next_move(body)
    action = f"<search>{query}</search>" if query else f"<answer>{'; '.join(answers)}</answer>"
    return text(f"<think>{memory}</think>{action}")


def in_calls(body):
    memory, query, answers = next_move(body)
    if query:
        return call("search", memory=memory, query=query)
    parameters = next(tool["function"] for tool in body["tools"] if tool["function"]["name"] == "answer")["parameters"]
    as_text = parameters["properties"]["answers"]["type"] == "string"
    return call("answer", memory=memory, answers="; ".join(answers) if as_text else answers)


def in_fields(body):
    """As DSPy's chat adapter asks for it."""
    memory, query, answers = next_move(body)
    fields = {"memory": memory, "action": "search" if query else "answer", "content": query or "; ".join(answers)}
    return text("".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]")


PLUGINS = [
    ("with_openai_agents:SDKAgent", "agents", "m", in_calls),
    ("with_smolagents:SmolAgent", "smolagents", "m", in_calls),
    ("with_langgraph:GraphAgent", "langgraph", "m", in_calls),
    ("with_dspy:DSPyAgent", "dspy", "openai/m", in_fields),
]


@pytest.mark.parametrize(("spec", "package", "model", "reply"), PLUGINS, ids=[plugin[1] for plugin in PLUGINS])
def test_plugin_plays_an_episode(make_env, spec, package, model, reply):
    pytest.importorskip(package)
    with chat_server(reply) as server:
        make_agent = agent_factory(spec, model=model, base_url=server.url)
        episode = play_episode(make_agent(), make_env(), 0, seed=0)
        again = play_episodes(make_agent, make_env, [1, 2, 3], workers=2)
    assert (episode.reward, episode.info["searches"], episode.info["invalid_actions"]) == (2.0, 2, 0)
    assert [played.reward for played in again] == [2.0] * 3
    assert len(server.requests) == 12, "one request a turn"
    first_passage = "Ada was born in Rome."
    assert first_passage in transcript(server.requests[1])
    assert first_passage not in transcript(server.requests[2]), "the endpoint sees what the memory policy dropped"


def test_bare_callable_plays_an_episode(make_env, monkeypatch):
    with chat_server(in_tags) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("MEMOPD_CHAT_MODEL", "m")
        episode = play_episode(agent_factory("bare_callable:act")(), make_env(), 0)
    assert episode.reward == 2.0
    assert len(server.requests) == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_plugin_is_short_and_says_how_to_run_it(path):
    source = path.read_text()
    assert len(source.splitlines()) < 60
    assert re.search(rf"memopd eval --agent {path.stem}:\w+", source)
