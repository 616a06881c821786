import pytest

from memopd_agents.policy import check_prompt
from memopd_agents.scripted import OracleAgent, RandomAgent
from memopd_env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval import Passage, SparseRetriever
from memopd_env.tasks.world import World
from memopd_train.alignpack import pack
from memopd_train.demonstrations import demonstrate, reading_exercises, sentence_exercises, word_exercises
from memopd_train.smallmodel import terse_world_tokenizer

TOKENIZER = terse_world_tokenizer()


@pytest.fixture(scope="module")
def world():
    return World("tiny")


@pytest.fixture(scope="module")
def env(world):
    retriever = SparseRetriever.from_passages(list(world.passages()))
    return MemOPDEnv(2, tasks=world.tasks(2, "train", 12), retriever=retriever, instructions="terse", top_k=1)


def test_a_demonstration_is_what_the_agent_saw_and_wrote(env):
    episodes = demonstrate(OracleAgent(env.tasks), env, TOKENIZER, range(12))
    assert [episode.reward for episode in episodes] == [2.0] * 12
    for episode in episodes:
        written = [call.action_ids for call in episode.calls]
        for number, call in enumerate(episode.calls):
            assert TOKENIZER.decode(call.action_ids) == call.text
            check_prompt(call.prompt_ids, call.segments, written[:number])
    text = TOKENIZER.decode(episodes[0].calls[1].prompt_ids, skip_special_tokens=True)
    assert text.startswith(f"Q: {env.tasks[0].questions[0]}")
    assert text.endswith("</information>")


def test_demonstrations_can_be_packed(env):
    episodes = demonstrate(OracleAgent(env.tasks), env, TOKENIZER, range(3))
    (packed,) = pack(episodes)
    assert packed.action_ids.tolist() == [i for e in episodes for call in e.calls for i in call.action_ids]


def test_failures_are_left_out_on_request(env):
    assert demonstrate(RandomAgent(), env, TOKENIZER, range(12), min_reward=1.0) == []


def test_an_exercise_repeats_every_fact_of_its_passages(world):
    for episode in reading_exercises(world, TOKENIZER, 20, passages=2, seed=3):
        (call,) = episode.calls
        passage, memory = TOKENIZER.decode(call.prompt_ids), TOKENIZER.decode(call.action_ids)
        lines = memory.removeprefix("<think> ").removesuffix("</think>").split("; ")
        assert len(lines) == 6
        for name, relation, value in (line.split(" ") for line in lines):
            assert f" {name}: " in passage
            assert f"{relation} {value}" in passage


def test_exercises_are_about_entities_of_their_split_only(world):
    allowed = {world.name(index) for index in world.indices("train")}
    for episode in reading_exercises(world, TOKENIZER, 50, seed=1):
        for line in TOKENIZER.decode(episode.calls[0].action_ids)[8:-8].split("; "):
            assert line.split(" ")[0] in allowed


def test_exercises_want_a_terse_world():
    with pytest.raises(ConfigError, match="terse"):
        reading_exercises(World("default"), TOKENIZER, 1)


def test_a_sentence_exercise_repeats_sentences_of_its_passage():
    passages = [Passage("0", "Zeno", "Zeno ran. Did he win? He lost! Then he slept."), Passage("1", "Dot", "")]
    exercises = sentence_exercises(passages, TOKENIZER, 30, sentences=2, seed=1)
    assert len(exercises) == 30
    repeated = set()
    for episode in exercises:
        (call,) = episode.calls
        passage = TOKENIZER.decode(call.prompt_ids)
        memory = TOKENIZER.decode(call.action_ids).removeprefix("<think> ").removesuffix("</think>")
        assert all(word in passage for word in memory.split())
        repeated.add(memory)
    assert "Then he slept. Did he win?" in repeated


def test_a_word_exercise_repeats_its_words_in_runs():
    passages = [Passage("0", "Zeno", "ran fast. Did he win?"), Passage("1", "Dot", "")]
    known = {"Zeno", "ran", "fast.", "Did", "he", "win?", "Dot"}
    exercises = word_exercises(passages, TOKENIZER, 40, words=9, seed=1)
    lengths = set()
    for episode in exercises:
        (call,) = episode.calls
        drawn = TOKENIZER.decode(call.prompt_ids).removeprefix("<information> ").removesuffix("</information>").split()
        runs = TOKENIZER.decode(call.action_ids).removeprefix("<think> ").removesuffix("</think>").split("; ")
        assert set(drawn) <= known
        assert sorted(" ".join(runs).split()) == sorted(drawn)
        assert all(f" {run} " in f" {' '.join(drawn)} " for run in runs)
        lengths.add(len(drawn))
    assert min(lengths) == 3 and max(lengths) == 9
    assert [e.calls for e in word_exercises(passages, TOKENIZER, 40, words=9, seed=1)] == [e.calls for e in exercises]


def test_word_exercises_want_words():
    with pytest.raises(ConfigError, match="corpus"):
        word_exercises([Passage("0", "", "")], TOKENIZER, 1)
