"""memopd world build."""

import json

import gymnasium as gym

from memopd_env.cli import main


def test_a_world_on_disk_can_be_played(tmp_path, capsys):
    out = tmp_path / "world"
    assert main(["world", "build", str(out), "--passages", "200", "--count", "5", "-n", "2"]) == 0
    assert len((out / "corpus.jsonl").read_text().splitlines()) == 200
    assert json.loads((out / "world.json").read_text())["passages"] == 200
    env = gym.make("memopd_env:MemOPD-Q2", tasks=out / "test.jsonl", retriever=out / "corpus.jsonl")
    env.reset(options={"task_index": 0})
    title = env.unwrapped.task.entities[0][0]
    observation, *_ = env.step(f"<search>{title}</search>")
    assert f"Title: {title}" in observation["information"]


def test_an_impossible_size_is_one_line(tmp_path, capsys):
    assert main(["world", "build", str(tmp_path / "w"), "--passages", "3"]) == 2
    assert "100 to 1,000,000" in capsys.readouterr().err
