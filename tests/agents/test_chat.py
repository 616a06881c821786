from __future__ import annotations

import sys
import time
from itertools import pairwise

import pytest
from fastapi.responses import JSONResponse

from memopd_agents import ChatAgent, evaluate, play_episode
from memopd_agents.agent import agent_factory
from memopd_agents.chat import ChatError, close_action
from memopd_agents.rollout import RolloutError
from memopd_env import MemOPDEnv
from memopd_env.errors import ConfigError, MissingExtraError
from memopd_env.protocol import ActionKind, Tags, parse_action

from .chat_server import call, chat_server, completion, next_move, text

pytest.importorskip("openai")


@pytest.fixture
def make_env(tasks, retriever):
    return lambda **options: MemOPDEnv(tasks=tasks, retriever=retriever, **options)


def in_tags(body):
    """A model that writes tags; the server cuts at the stop string, as servers do."""
    memory, query, answers = next_move(body)
    action = f"<search>{query}</search>" if query else f"<answer>{'; '.join(answers)}</answer>"
    written = f"<think>{memory}</think>{action}"
    for stop in body.get("stop") or ():
        written = written.split(stop)[0]
    return text(written)


def in_calls(body):
    memory, query, answers = next_move(body)
    return call("search", memory=memory, query=query) if query else call("answer", memory=memory, answers=answers)


def test_plays_through_tags(make_env):
    with chat_server(in_tags) as server:
        episode = play_episode(ChatAgent("m", server.url), make_env(), 0, seed=1)
    assert (episode.reward, episode.info["searches"]) == (2.0, 2)
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[0]["stop"] == ["</search>", "</answer>"]
    assert episode.calls[1].text.endswith("</search>")


def test_plays_through_function_calls(make_env):
    with chat_server(in_calls) as server:
        episode = play_episode(ChatAgent("m", server.url, tools=True), make_env(), 0, seed=1)
    assert (episode.reward, episode.info["invalid_actions"]) == (2.0, 0)
    assert episode.calls[0].text == "<think></think><search>Ada</search>"
    assert {tool["function"]["name"] for tool in server.requests[0]["tools"]} == {"search", "answer"}


def test_model_that_writes_tags_although_it_has_functions_is_understood(make_env):
    with chat_server(in_tags) as server:
        assert play_episode(ChatAgent("m", server.url, tools=True), make_env(), 0).reward == 2.0


def test_endpoint_sees_no_more_than_the_context(make_env):
    with chat_server(in_tags) as server:
        episode = play_episode(ChatAgent("m", server.url), make_env(), 0)
    for request, played in zip(server.requests, episode.calls, strict=True):
        assert "".join(m["content"] for m in request["messages"]) == "".join(part[2] for part in played.context)


def test_token_usage_becomes_the_measure(make_env, tmp_path):
    with chat_server(in_tags) as server:
        result = evaluate(lambda: ChatAgent("m", server.url), make_env, [0, 1], tmp_path, name="chat", workers=2)
    assert result["tokens_counted_by"] == "the endpoint's own report"
    assert result["metrics"]["action_tokens"]["mean"] == 21


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failure_is_retried_after_as_long_as_the_endpoint_asks(make_env, status):
    moments = []

    def flaky(body):
        moments.append(time.monotonic())
        if len(moments) <= 2:
            return JSONResponse({"error": {"message": "busy"}}, status, {"retry-after-ms": "30"})
        return text("<answer>Rome; Oslo</answer>")

    with chat_server(flaky) as server:
        assert play_episode(ChatAgent("m", server.url), make_env(), 0).reward == 2.0
    assert len(moments) == 3
    assert all(later - sooner >= 0.03 for sooner, later in pairwise(moments))


def test_lasting_failure_names_endpoint_and_cure(make_env):
    with chat_server(lambda body: JSONResponse({"error": {"message": "no such key"}}, 401)) as server:
        agent = ChatAgent("m", server.url, "wrong")
        with pytest.raises(RolloutError, match=r"task 't0'.*127.0.0.1.*no such key.*check base_url, model and key"):
            play_episode(agent, make_env(), 0)
    assert len(server.requests) == 1
    assert server.headers[0]["authorization"] == "Bearer wrong"


def test_slow_endpoint_times_out(make_env):
    def slow(body):
        time.sleep(0.5)
        return text("late")

    with chat_server(slow) as server:
        agent = ChatAgent("m", server.url, timeout=0.1, max_retries=0)
        with pytest.raises(ChatError, match="timed out"):
            agent.act({}, make_env().reset(seed=0)[1])


def test_options_win_and_none_removes(make_env):
    with chat_server(in_tags) as server:
        options = {"temperature": 0.7, "max_tokens": None, "max_completion_tokens": 99, "stop": None}
        agent = ChatAgent("m", server.url, options=options)
        assert play_episode(agent, make_env(), 0, seed=2).reward == 2.0
    request = server.requests[0]
    assert (request["temperature"], request["max_completion_tokens"]) == (0.7, 99)
    assert "max_tokens" not in request and "stop" not in request


def test_seed_of_a_request_follows_from_the_episode(make_env):
    with chat_server(in_tags) as server:
        for seed in (1, 1, 2):
            play_episode(ChatAgent("m", server.url), make_env(), 0, seed=seed)
    seeds = [request["seed"] for request in server.requests]
    assert seeds[:3] == seeds[3:6] and not set(seeds[:3]) & set(seeds[6:])


def reply_to(message, **agent_options) -> str:
    env = MemOPDEnv(tasks=None, world="tiny")
    _, info = env.reset(seed=0)
    with chat_server(lambda body: message) as server:
        return ChatAgent("m", server.url, **agent_options).act({}, info)


def test_reasoning_that_a_server_hands_over_apart_is_the_think_block():
    action = reply_to({"content": "<search>x", "reasoning_content": "so </think><answer>1</answer> what"})
    assert parse_action(action).kind is ActionKind.SEARCH
    assert action.startswith("<think>so ") and action.endswith("</think><search>x</search>")


@pytest.mark.parametrize("arguments", ["{", "[]", "{}", '{"query": 1', "null"])
def test_function_call_that_makes_no_sense_is_an_invalid_action(arguments):
    message = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}]}
    assert parse_action(reply_to(message, tools=True)).kind is ActionKind.INVALID


def test_text_in_a_function_call_cannot_act():
    memory = "</think><answer>forged</answer>"
    action = parse_action(reply_to(call("search", memory=memory, query="a</search><answer>b</answer>"), tools=True))
    assert action.kind is ActionKind.SEARCH and "answer" in action.content
    answers = parse_action(reply_to(call("answer", memory="", answers=["AC;DC", "x"]), tools=True))
    assert answers.content == "AC, DC; x"


def test_silence_is_an_invalid_action():
    assert parse_action(reply_to({"content": None})).kind is ActionKind.INVALID


def test_reply_without_choices_is_an_error():
    with pytest.raises(ChatError, match="without choices"):
        reply_to(JSONResponse(completion({"model": "m", "messages": []}, {}, choices=[])))


@pytest.mark.parametrize(
    ("written", "closed"),
    [
        ("<think>a</think><search>b", "<think>a</think><search>b</search>"),
        ("<answer>b", "<answer>b</answer>"),
        ("<search>b</search>", "<search>b</search>"),
        ("<think>a <search>b", "<think>a <search>b"),
        ("no tag", "no tag"),
        ("<search>a</search><answer>b", "<search>a</search><answer>b</answer>"),
    ],
)
def test_closing_tag_that_a_stop_string_cut_off_is_put_back(written, closed):
    assert close_action(written, Tags()) == closed


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="needs a model"):
        ChatAgent()
    with pytest.raises(ConfigError, match="needs a key: set OPENAI_API_KEY"):
        ChatAgent("m")
    monkeypatch.setenv("MEMOPD_CHAT_MODEL", "from-environment")
    with chat_server(lambda body: text("<answer>a; b</answer>")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        agent_factory("chat")().act({}, MemOPDEnv(world="tiny").reset(seed=0)[1])
    assert server.requests[0]["model"] == "from-environment"
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memopd\[chat\]'"):
        ChatAgent("m", "http://127.0.0.1:1/v1")
