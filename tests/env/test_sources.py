"""Where tasks and passages come from."""

import json
import pickle

import gymnasium as gym
import pytest

from memopd_env import MemOPDEnv, Task
from memopd_env.errors import ConfigError, CorpusError
from memopd_env.sources import resolve_retriever
from memopd_env.tasks import write_tasks
from memopd_env.tasks.world import WorldConfig

TASKS = [
    Task("a", ["Capital of France?"], [["Paris"]], split="train"),
    Task("b", ["Capital of Spain?"], [["Madrid"]], split="test"),
]


def corpus(folder, lines=('{"id": "0", "contents": "\\"France\\"\\nThe capital of France is Paris."}',)):
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tasks_and_corpus_from_files(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(TASKS, path)
    env = gym.make("MemOPD-WikiRAG", tasks=path, retriever=str(corpus(tmp_path)))
    env.reset(options={"task_index": 0})
    observation, *_ = env.step("<search>France</search>")
    assert "capital of France is Paris" in observation["information"]
    assert env.step("<answer>Paris</answer>")[1] == 1.0


def test_a_changed_corpus_file_is_read_again(tmp_path):
    first = resolve_retriever(corpus(tmp_path), TASKS, "default")
    assert first is resolve_retriever(tmp_path / "corpus.jsonl", TASKS, "default")
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(CorpusError):
        resolve_retriever(tmp_path / "corpus.jsonl", TASKS, "default")


def test_split_chooses_among_the_tasks(tmp_path):
    env = gym.make("MemOPD-WikiRAG", tasks=TASKS, split="test")
    assert [task.id for task in env.unwrapped.tasks] == ["b"]
    with pytest.raises(ConfigError, match="validation"):
        gym.make("MemOPD-WikiRAG", tasks=TASKS, split="validation")


def test_a_task_file_without_a_retriever_is_refused(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(TASKS, path)
    with pytest.raises(ConfigError, match="retriever="):
        gym.make("MemOPD-WikiRAG", tasks=str(path))


def test_max_turns_follows_the_longest_task():
    many = Task("many", [f"q{i}?" for i in range(5)], [["a"]] * 5)
    assert MemOPDEnv(tasks=TASKS).max_turns == 6
    assert MemOPDEnv(tasks=[*TASKS, many]).max_turns == 20


def test_an_id_refuses_tasks_of_another_number_of_questions():
    with pytest.raises(ConfigError, match=r"asks 2 question.*'a' has 1.*-n N"):
        gym.make("MemOPD-Q2", tasks=TASKS)
    assert len(gym.make("MemOPD-Q2", tasks=TASKS, num_questions=None).unwrapped.tasks) == 2


def test_the_built_in_world_is_made_once_and_its_splits_differ():
    train, again, held_out = (gym.make("MemOPD-Q2", split=split).unwrapped for split in ("train", "train", "test"))
    assert train.tasks is again.tasks and train.retriever is again.retriever
    assert train.tasks[0].split == "train" and held_out.tasks[0].split == "test"
    assert not {q for t in train.tasks for q in t.questions} & {q for t in held_out.tasks for q in t.questions}


def test_the_built_in_index_answers_for_its_own_world_and_survives_pickling():
    env = gym.make("MemOPD-Q2", world=WorldConfig(passages=200))
    task = env.unwrapped.tasks[0]
    retriever = pickle.loads(pickle.dumps(env.unwrapped.retriever))
    [found] = retriever.search([task.entities[0][0]], 1)
    assert found[0].title == task.entities[0][0]


def test_a_server_is_named_by_its_url():
    retriever = resolve_retriever("http://127.0.0.1:9", TASKS, "default")
    assert callable(retriever.search)


def test_an_unknown_world_is_refused():
    with pytest.raises(ConfigError, match="preset"):
        gym.make("MemOPD-Q2", world="atlantis")


def test_a_malformed_corpus_names_the_line(tmp_path):
    with pytest.raises(CorpusError, match="2"):
        resolve_retriever(
            corpus(tmp_path, [json.dumps({"id": "0", "contents": "x"}), "not json"]), TASKS, "default"
        ).search(["x"], 1)
