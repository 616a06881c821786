from __future__ import annotations

import json

import pytest
from rich.console import Console

from memopd_agents import OracleAgent, PolicyAgent, RandomAgent, evaluate, format_table, read_episodes
from memopd_agents.engines import HFEngine, SamplingParams
from memopd_agents.evaluation import task_set_hash
from memopd_agents.metrics import measure
from memopd_env import MemOPDEnv
from memopd_env.errors import ConfigError


@pytest.fixture
def make_env(tasks, retriever):
    return lambda: MemOPDEnv(tasks=tasks, retriever=retriever, max_turns=4, instructions="terse")


def test_result_holds_figures_and_protocol(make_env, tasks, tmp_path):
    result = evaluate(
        lambda: OracleAgent(tasks),
        make_env,
        range(5),
        tmp_path,
        name="oracle",
        seed=4,
        settings={"id": "x"},
        corpus_hash="c",
    )
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"]["em"] == {"mean": 2.0, "low": 2.0, "high": 2.0}
    assert result["env"] == {"id": "x", "max_turns": 4, "top_k": 3, "memory": "Consolidate()"}
    assert result["task_set_hash"] == task_set_hash(tasks) and result["corpus_hash"] == "c"
    assert (result["agent"], result["seed"], result["num_questions"]) == ("oracle", 4, [2])
    assert result["wall_time_s"] > 0 and result["versions"]["python"] and result["hardware"]["cpus"]
    assert result["tokens_counted_by"] == "white-space separated words"


def test_result_follows_from_the_recorded_episodes(make_env, tasks, tmp_path):
    result = evaluate(RandomAgent, make_env, range(5), tmp_path, name="random", seed=4)
    figures = measure(list(read_episodes(tmp_path / "episodes.jsonl")), {task.id: task for task in tasks}, seed=4)
    assert {key: result[key] for key in figures} == figures


def test_policy_is_measured_in_its_own_tokens(make_env, model, tokenizer, tmp_path):
    agent = PolicyAgent(HFEngine(model, tokenizer), tokenizer, SamplingParams(max_tokens=8, temperature=0))
    result = evaluate(agent, make_env, [0, 1], tmp_path, name="tiny")
    assert result["tokens_counted_by"] == "the policy's token ids"
    assert result["sampling"]["temperature"] == 0
    episode = next(read_episodes(tmp_path / "episodes.jsonl"))
    assert "".join(text for _, _, text in episode.calls[0].context).startswith("Q: ")


def test_interrupted_evaluation_goes_on(make_env, tmp_path):
    expected = evaluate(RandomAgent, make_env, range(5), tmp_path / "whole", name="random")

    def stop(episode, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(RandomAgent, make_env, range(5), tmp_path / "cut", name="random", on_episode=stop, workers=1)
    spent = json.loads((tmp_path / "cut" / "run.json").read_text())["wall_time_s"]
    assert not (tmp_path / "cut" / "result.json").exists()
    result = evaluate(RandomAgent, make_env, range(5), tmp_path / "cut", name="random")
    assert {**result["metrics"], "seconds": 0} == {**expected["metrics"], "seconds": 0}
    assert result["wall_time_s"] > spent > 0


@pytest.mark.parametrize(("change", "named"), [({"seed": 1}, "seed"), ({"name": "other"}, "agent")])
def test_folder_of_another_evaluation_is_refused(make_env, tmp_path, change, named):
    evaluate(RandomAgent, make_env, [0], tmp_path, name="random")
    with pytest.raises(ConfigError, match=f"holds an evaluation with another {named}"):
        evaluate(RandomAgent, make_env, [0], tmp_path, **{"name": "random", **change})


def test_other_tasks_in_the_same_folder_are_refused(make_env, tmp_path):
    evaluate(RandomAgent, make_env, [0], tmp_path, name="random")
    with pytest.raises(ConfigError, match="task_set_hash"):
        evaluate(RandomAgent, make_env, [0, 1], tmp_path, name="random")


def test_task_set_hash_is_of_content_and_order(tasks):
    assert task_set_hash(tasks) == task_set_hash(list(tasks))
    assert len({task_set_hash(tasks), task_set_hash(tasks[::-1]), task_set_hash(tasks[:-1])}) == 3


def test_table_shows_every_agent_with_its_interval(make_env, tasks, tmp_path):
    results = [
        evaluate(lambda: OracleAgent(tasks), make_env, range(5), tmp_path / "oracle", name="oracle"),
        evaluate(RandomAgent, make_env, range(5), tmp_path / "random", name="random"),
    ]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(format_table(results))
    text = capture.get()
    assert "2.00±0.00" in text and "random" in text and "sums over 2 questions" in text


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b"null", b"{}", b'{"wall_time_s": "long"}'])
def test_damaged_protocol_is_named(make_env, tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        evaluate(RandomAgent, make_env, [0], tmp_path, name="random")


@pytest.mark.parametrize("change", [{"seed": -1}, {"workers": 0}, {"max_active": 0}, {"task_indices": []}])
def test_numbers_that_make_no_sense_are_refused_before_anything_is_played(make_env, tmp_path, change):
    with pytest.raises(ConfigError, match="there must be an episode"):
        evaluate(RandomAgent, make_env, **{"task_indices": [0], "out": tmp_path, "name": "random", **change})
    assert not list(tmp_path.iterdir())
