from __future__ import annotations

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from memopd_agents import cli, read_episodes
from memopd_agents.rollout import RolloutError
from memopd_env.errors import ConfigError
from memopd_env.tasks.io import write_tasks

from .conftest import make_model, make_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory, tasks, passages):
    folder = tmp_path_factory.mktemp("files")
    write_tasks(tasks, folder / "tasks.jsonl")
    corpus = [json.dumps({"id": passage.id, "contents": passage.contents}) + "\n" for passage in passages]
    (folder / "corpus.jsonl").write_text("".join(corpus))
    return ["--tasks", str(folder / "tasks.jsonl"), "--corpus", str(folder / "corpus.jsonl")]


def run(command, *arguments: object, input: str | None = None, status: int = 0) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(map(str, arguments)), input=input, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("command", [cli.evaluate, cli.play, cli.inspect])
def test_help_shows_an_example(command):
    assert "Example: memopd" in run(command, "--help")


def test_evaluation_of_a_named_agent(files, tmp_path):
    output = run(cli.evaluate, *files, "--out", tmp_path, "--agent", "oracle", "--workers", 2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"]["em"]["mean"] == 2.0 and "2.00±0.00" in output
    assert len(result["corpus_hash"]) == 64
    assert result["env"]["id"] == "MemOPD-Q2" and result["env"]["tasks"] == "tasks.jsonl"


def test_evaluation_of_a_model_folder(files, tmp_path):
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--agent", tmp_path / "model", "--max-tokens", 8, "--episodes", 2, "--instructions", "terse"]
    run(cli.evaluate, *files, "--out", tmp_path / "out", *arguments, "--name", "tiny")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["agent"] == "tiny" and result["sampling"]["temperature"] == 0
    assert result["episodes"]["played"] == 2
    text = run(cli.inspect, tmp_path / "out" / "episodes.jsonl", "--episode", 0)
    assert "episode 0, call 1 of 6" in text and "8 tokens after" in text


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "xpu9", "use cpu, cuda"),
        ("--temperature", "nan", "temperature is nan"),
        ("--top-p", "0", "top_p is 0"),
    ],
)
def test_option_of_a_model_that_makes_no_sense_is_named(files, tmp_path, option, value, message):
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        run(cli.evaluate, *files, "--out", tmp_path / "out", "--agent", tmp_path / "model", option, value)


def test_text_agent_is_measured_by_the_tokenizer_named(files, tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run(cli.evaluate, *files, "--out", tmp_path / "out", "--episodes", 1, "--tokenizer", tmp_path / "tokenizer")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["tokens_counted_by"] == f"tokenizer {tmp_path / 'tokenizer'}"


def test_options_come_from_a_file_and_flags_win(files, tmp_path):
    config = tmp_path / "eval.yaml"
    config.write_text(f"out: {tmp_path / 'out'}\nagent: random\nepisodes: 3\nagent-arg: {{answer_probability: 1.0}}\n")
    run(cli.evaluate, *files, "--config", config, "--episodes", "2")
    episodes = list(read_episodes(tmp_path / "out" / "episodes.jsonl"))
    assert len(episodes) == 2
    assert all(episode.info["turns"] == 1 for episode in episodes)


@pytest.mark.parametrize(
    ("content", "message"),
    [("episods: 3", "unknown option 'episods'; the options are .*episodes"), ("[1]", "must hold lines like")],
)
def test_mistake_in_the_file_is_named(tmp_path, content, message):
    (tmp_path / "eval.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        run(cli.evaluate, "--out", tmp_path, "--config", tmp_path / "eval.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "MemOPD-Q3"], "no environment 'MemOPD-Q3': use MemOPD-WikiRAG"),
        (["--agent", "runs/gone/model"], "not a model folder"),
        (["--agent", "random", "--agent-arg", "x"], "write NAME=VALUE"),
        (["--agent", "random", "--agent-arg", "x=["], "not YAML"),
    ],
)
def test_mistake_in_a_flag_is_named(files, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(cli.evaluate, *files, "--out", tmp_path, *arguments)


@pytest.mark.parametrize(
    "option", ["--episodes", "--workers", "--max-active", "--max-tokens", "--top-k", "--max-turns"]
)
def test_number_that_makes_no_sense_is_a_usage_error(files, tmp_path, option):
    run(cli.evaluate, *files, "--out", tmp_path / "out", option, "0", status=2)
    assert not (tmp_path / "out").exists()


def test_refused_folder_is_not_said_to_go_on(files, tmp_path, capsys):
    run(cli.evaluate, *files, "--out", tmp_path, "--episodes", "1")
    with pytest.raises(ConfigError, match="use another folder"):
        run(cli.evaluate, *files, "--out", tmp_path, "--episodes", "1", "--seed", "5")
    assert "goes on" not in capsys.readouterr().err


def test_person_plays_an_episode(files):
    keys = "Ada Rome?\ns\nAda\nAda Rome\nx\ns\nBo\nAda Rome, Bo Oslo\na\nRome; Oslo\n"
    output = run(cli.play, *files, "--task", "0", input=keys)
    assert "Ada was born in Rome" in output
    assert "action of turn 1 · forgotten after this turn" in output
    assert "answered after 3 turns: em 2" in output


def test_agent_is_watched(files):
    output = run(cli.play, *files, "--agent", "oracle", "--task", "1", "--memory", "full")
    assert "<answer> Oslo; Lima</answer>" in " ".join(output.split()) and "forgotten" not in output


def test_a_watched_agent_that_fails_is_named_with_its_turn(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strangers.py").write_text(
        "def broken(observation, info):\n    raise KeyError('memory')\n\n"
        "class Picky:\n    def __init__(self, tasks):\n        self.first = tasks[0]\n"
    )
    with pytest.raises(RolloutError, match="turn 1: KeyError: 'memory'"):
        run(cli.play, *files, "--agent", "strangers:broken")
    with pytest.raises(ConfigError, match="'strangers:Picky' cannot be made: TypeError"):
        run(cli.play, *files, "--agent", "strangers:Picky", "--agent-arg", "tasks=3")


def test_person_who_leaves_ends_the_game(files):
    assert "answered after" not in run(cli.play, *files, "--task", "0", input="memory\n", status=130)


def test_episodes_are_listed_and_walked_through(files, tmp_path):
    run(cli.evaluate, *files, "--out", tmp_path, "--workers", "1")
    listed = run(cli.inspect, tmp_path / "episodes.jsonl", "--limit", "2")
    assert re.search(r"and 3 more", listed)
    walked = run(cli.inspect, tmp_path / "episodes.jsonl", "--episode", "1")
    assert "forgotten since the call before: action of turn 1, information of turn 1" in walked
    with pytest.raises(ConfigError, match="has no episode 99"):
        run(cli.inspect, tmp_path / "episodes.jsonl", "--episode", "99")
