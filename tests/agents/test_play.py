from __future__ import annotations

import threading

import pytest

from memopd_agents import FunctionAgent, OracleAgent, RandomAgent, play_episode, play_episodes
from memopd_agents.episode import read_episodes
from memopd_agents.rollout import RolloutError
from memopd_env import MemOPDEnv


@pytest.fixture
def make_env(tasks, retriever):
    return lambda **options: MemOPDEnv(**{"tasks": tasks, "retriever": retriever, **options})


def test_episode_records_what_was_seen_and_written(make_env, tasks):
    episode = play_episode(OracleAgent(tasks), make_env(), 2, seed=0)
    assert (episode.task_id, episode.reward, episode.info["em"]) == ("t2", 2.0, 2.0)
    assert [len(call.context) for call in episode.calls] == [1, 3, 3]
    kind, turn, text = episode.calls[2].context[1]
    assert (kind, turn, text) == ("action", 1, episode.calls[1].text)
    assert all(call.prompt_ids == [] for call in episode.calls)
    assert episode.seconds > 0


def test_usage_of_every_call_is_recorded(make_env):
    class Metered:
        usage: dict[str, int] | None = None

        def reset(self, seed=None):
            self.usage = None

        def act(self, observation, info):
            self.usage = {"prompt_tokens": 10 + observation["turns_left"], "completion_tokens": 2}
            return "<search>Bo</search>" if observation["turns_left"] > 1 else "<answer>a; b</answer>"

    episode = play_episode(Metered(), make_env(max_turns=3), 0)
    assert [call.usage["prompt_tokens"] for call in episode.calls] == [13, 12, 11]


@pytest.mark.parametrize("workers", [1, 4])
def test_episodes_do_not_depend_on_the_number_of_threads(make_env, workers):
    episodes = play_episodes(RandomAgent, make_env, [0, 1, 2, 3, 0], seed=3, workers=workers)
    assert episodes == play_episodes(RandomAgent, make_env, [0, 1, 2, 3, 0], seed=3)
    assert [episode.task_id for episode in episodes] == ["t0", "t1", "t2", "t3", "t0"]
    assert episodes[0].calls[0].text != episodes[4].calls[0].text


def test_every_worker_has_its_own_agent_and_environment(make_env):
    barrier = threading.Barrier(3, timeout=20)
    made = []

    class Alone:
        def __init__(self):
            made.append(self)
            self.lock = threading.Lock()

        def reset(self, seed=None):
            barrier.wait()

        def act(self, observation, info):
            assert self.lock.acquire(blocking=False)
            self.lock.release()
            return "<answer>a; b</answer>"

    play_episodes(Alone, make_env, [0, 1, 2], workers=3)
    assert len(made) == 3


def test_failure_names_the_task_and_keeps_what_was_finished(make_env, tmp_path):
    def faulty(observation, info):
        if info["task_id"] == "t2":
            raise ValueError("model is away")
        return "<answer>a; b</answer>"

    path = tmp_path / "episodes.jsonl"
    with pytest.raises(RolloutError, match="episode 2, task 't2', turn 0: model is away"):
        play_episodes(lambda: FunctionAgent(faulty), make_env, [0, 1, 2, 3], path=path)
    assert [episode.number for episode in read_episodes(path)] == [0, 1]


def test_resumed_run_plays_only_what_is_missing(make_env, tmp_path):
    path = tmp_path / "episodes.jsonl"
    whole = play_episodes(RandomAgent, make_env, [0, 1, 2], seed=1, path=path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    played = []
    again = play_episodes(
        RandomAgent,
        make_env,
        [0, 1, 2],
        seed=1,
        path=path,
        on_episode=lambda episode, *_: played.append(episode.number),
    )
    assert again == whole
    assert played == [1, 2]


def test_action_that_is_no_string_is_refused(make_env):
    with pytest.raises(RolloutError, match="act\\(\\) returned NoneType, not a string"):
        play_episode(FunctionAgent(lambda observation, info: None), make_env(), 0)  # type: ignore[arg-type, return-value]


def test_an_agent_that_cannot_begin_is_a_failed_episode(make_env):
    class Sleepy(RandomAgent):
        def reset(self, seed=None):
            raise OSError("no server")

    with pytest.raises(RolloutError, match="episode 3: the agent cannot begin: OSError: no server"):
        play_episode(Sleepy(), make_env(), 0, number=3)
