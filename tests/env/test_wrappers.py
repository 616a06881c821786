"""Other shapes of the same episode."""

import json

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from memopd_env.memory import Segment, SegmentKind
from memopd_env.spaces import UnicodeText
from memopd_env.wrappers import ChatObservation, RecordEpisodes, TextObservation, context_messages

SEARCH = "<think>n</think><search>Spain</search>"
ANSWER = "<answer>Paris; Madrid</answer>"


def test_text_observation_is_the_whole_context(make):
    env = TextObservation(make(memory="full"))
    text, _ = env.reset(seed=0)
    plain, *_ = (lambda e: (e.reset(seed=0), e.step(SEARCH))[1])(make(memory="full"))
    after, *_, info = env.step(SEARCH)
    assert env.observation_space == UnicodeText() and text in env.observation_space
    assert after == plain["task"] + plain["memory"] + plain["information"] == "".join(s.text for s in info["context"])


def test_chat_observation_alternates_roles(make):
    env = ChatObservation(make(memory="full"))
    messages, _ = env.reset(seed=0)
    assert [message["role"] for message in messages] == ["user"] and messages in env.observation_space
    messages, *_ = env.step(SEARCH)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == SEARCH


def test_neighbours_of_one_role_join_and_empty_segments_vanish():
    context = [
        Segment(SegmentKind.TASK, "t"),
        Segment(SegmentKind.INFORMATION, "i", 0),
        Segment(SegmentKind.ACTION, "", 1),
        Segment(SegmentKind.INFORMATION, "j", 1),
    ]
    assert context_messages(context) == [{"role": "user", "content": "tij"}]


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")
def test_observation_wrappers_keep_gymnasiums_contract(make):
    for wrapper in (TextObservation, ChatObservation):
        check_env(wrapper(make()), skip_render_check=True)
        assert wrapper(make()).spec is not None


def test_finished_episodes_are_appended_and_odd_text_comes_back(make, tmp_path):
    path = tmp_path / "deep" / "episodes.jsonl"
    env = RecordEpisodes(make(), path)
    odd = "\x00\ud800\u2028 שלום \U0001f600"
    for seed in (3, 4):
        env.reset(seed=seed, options={"task_index": 0})
        env.step(odd)
        env.step(SEARCH)
        env.step(ANSWER)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["seed"] for record in records] == [3, 4]
    assert [turn["action"] for turn in records[0]["turns"]] == [odd, SEARCH, ANSWER]
    assert records[0]["reward"] == 2.0 and records[0]["episode"]["stop_reason"] == "answered"
    assert [segment["kind"] for segment in records[0]["turns"][2]["context"]] == ["task", "action", "information"]
    assert records[0]["turns"][1]["context"][1]["text"] == odd


def test_unfinished_episodes_are_not_written(make, tmp_path):
    path = tmp_path / "episodes.jsonl"
    env = RecordEpisodes(make(), path)
    env.reset(seed=0)
    env.step(SEARCH)
    env.reset(seed=1)
    assert not path.exists()


def test_an_episode_ended_by_a_time_limit_is_written_without_a_record(make, tmp_path):
    path = tmp_path / "episodes.jsonl"
    env = RecordEpisodes(gym.wrappers.TimeLimit(make(), 1), path)
    env.reset(seed=0)
    env.step(SEARCH)
    record = json.loads(path.read_text())
    assert record["truncated"] and record["episode"] is None


def test_wrappers_stack(make, tmp_path):
    env = RecordEpisodes(TextObservation(make()), tmp_path / "e.jsonl")
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, str) and env.step(ANSWER)[2]
