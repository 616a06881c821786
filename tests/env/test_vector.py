"""Many environments with one search a step."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from memopd_env import MemOPDVectorEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval import RetrievalError
from memopd_env.vector import batch_infos

SEARCH = "<search>capital of Spain</search>"
ANSWER = "<answer>Paris; Madrid</answer>"
SCRIPT = [
    [SEARCH, "bad", ANSWER, SEARCH],
    ["<search>Paris</search>", SEARCH, "ignored", ANSWER],
    [ANSWER, SEARCH, SEARCH, "ignored"],
    ["ignored", ANSWER, "<answer>Seine; Manzanares</answer>", SEARCH],
]


class Counting:
    """Counts the calls of a retriever."""

    def __init__(self, retriever):
        self.retriever, self.calls = retriever, []

    def search(self, queries, k):
        self.calls.append(list(queries))
        return self.retriever.search(queries, k)


@pytest.fixture
def make_vec(make, retriever):
    def build(num_envs=4, **kwargs):
        settings = {"tasks": make().unwrapped.tasks, "retriever": retriever} | kwargs
        return gym.make_vec("MemOPD-Q2", num_envs=num_envs, **settings)

    return build


def test_make_vec_gives_our_vector_environment_and_declares_autoreset(make_vec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_vec()
    assert isinstance(env.unwrapped, MemOPDVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_observations_are_in_the_batched_space_and_so_are_sampled_actions(make_vec):
    env = make_vec()
    observations, _ = env.reset(seed=0)
    assert observations in env.observation_space
    observations, *_ = env.step(env.action_space.sample())
    assert observations in env.observation_space
    assert len(observations["task"]) == 4 and observations["turns_left"].tolist() == [5] * 4


def test_one_search_a_step_with_the_queries_of_those_that_search(make_vec, retriever):
    counting = Counting(retriever)
    env = make_vec(retriever=counting)
    env.reset(seed=0)
    env.step([SEARCH, "bad", "<search>Paris</search>", ANSWER])
    env.step(["bad"] * 4)
    assert counting.calls == [["capital of Spain", "Paris"]]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_it_is_the_sync_vector_env_of_gymnasium_in_everything_but_the_searches(make_vec, make, mode):
    ours = make_vec(autoreset_mode=mode)
    theirs = SyncVectorEnv([make] * 4, autoreset_mode=mode)
    assert data_equivalence(ours.reset(seed=5), theirs.reset(seed=5))
    for actions in SCRIPT * 2:
        assert data_equivalence(ours.step(actions), theirs.step(actions))
    assert data_equivalence(ours.reset(seed=[9, 8, 7, 6]), theirs.reset(seed=[9, 8, 7, 6]))


def test_each_environment_is_a_single_one_with_its_seed(make_vec, make):
    vector = make_vec()
    _, infos = vector.reset(seed=11)
    for i in range(4):
        _, info = make().reset(seed=11 + i)
        assert infos["task_id"][i] == info["task_id"]
    assert vector.unwrapped.np_random_seed == (11, 12, 13, 14)


def test_disabled_autoreset_leaves_the_reset_to_the_caller(make_vec):
    env = make_vec(autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    _, _, terminations, _, _ = env.step([ANSWER, SEARCH, ANSWER, SEARCH])
    with pytest.raises(gym.error.ResetNeeded):
        env.step([SEARCH] * 4)
    observations, infos = env.reset(options={"reset_mask": terminations})
    assert infos["_task_id"].tolist() == [True, False, True, False]
    assert observations["turns_left"].tolist() == [6, 5, 6, 5]


def test_task_index_for_all_or_for_each(make_vec):
    env = make_vec()
    assert env.reset(options={"task_index": 1})[1]["task_id"].tolist() == ["rivers"] * 4
    assert env.reset(options={"task_index": [0, 1, 2, 0]})[1]["task_id"].tolist() == [
        "capitals",
        "rivers",
        "both",
        "capitals",
    ]


def test_a_retriever_failure_raises_before_any_environment_moves(make_vec, broken, retriever):
    env = make_vec(retriever=broken)
    env.reset(seed=0)
    with pytest.raises(RetrievalError):
        env.step([SEARCH, "bad", SEARCH, "bad"])
    for single in env.unwrapped.envs:
        single.retriever = retriever
    observations, *_ = env.step([SEARCH, "bad", SEARCH, "bad"])
    assert observations["turns_left"].tolist() == [5] * 4


def test_a_retriever_failure_ends_the_episodes_that_searched(make_vec, broken):
    env = make_vec(retriever=broken, on_retriever_error="truncate")
    env.reset(seed=0)
    _, _, _, truncations, infos = env.step([SEARCH, "bad", SEARCH, "bad"])
    assert truncations.tolist() == [True, False, True, False]
    assert infos["episode"]["excluded"].tolist() == [True, False, True, False]


def test_vector_wrappers_of_gymnasium_work(make_vec):
    env = gym.wrappers.vector.RecordEpisodeStatistics(make_vec(), stats_key="statistics")
    env = gym.wrappers.vector.TransformReward(env, lambda rewards: rewards / 2)
    env.reset(seed=0, options={"task_index": 0})
    _, rewards, _, _, infos = env.step([ANSWER, SEARCH, "bad", "<answer>Paris; x</answer>"])
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.5]
    assert infos["statistics"]["r"].tolist() == [2.0, 0.0, 0.0, 1.0]


def test_dict_info_wrapper_of_gymnasium_works(make_vec):
    env = gym.wrappers.vector.DictInfoToList(make_vec())
    env.reset(seed=0)
    infos = env.step([ANSWER, SEARCH, "bad", ANSWER])[4]
    assert [("episode" in info) for info in infos] == [True, False, False, True]


@pytest.mark.slow
def test_async_vector_env_of_gymnasium_works_without_shared_memory(make, make_vec):
    theirs = AsyncVectorEnv([make] * 4, shared_memory=False)
    ours = make_vec()
    try:
        assert data_equivalence(ours.reset(seed=5), theirs.reset(seed=5))
        for actions in SCRIPT:
            assert data_equivalence(ours.step(actions), theirs.step(actions))
    finally:
        theirs.close()


def test_call_get_attr_render_and_close(make_vec):
    env = make_vec(render_mode="ansi").unwrapped
    env.reset(options={"task_index": 0})
    assert env.get_attr("max_turns") == (6,) * 4
    assert [task.id for task in env.call("task")] == ["capitals"] * 4
    assert all("capital of France" in text for text in env.render())
    env.close()


@pytest.mark.parametrize(
    "act",
    [
        lambda make_vec: make_vec(num_envs=0),
        lambda make_vec: make_vec().reset(seed=[1, 2]),
        lambda make_vec: make_vec().reset(options={"reset_mask": [True] * 4}),
        lambda make_vec: make_vec().step([SEARCH]),
    ],
)
def test_mismatched_lengths_are_refused(make_vec, act):
    with pytest.raises(ConfigError):
        act(make_vec)


def test_infos_are_batched_as_gymnasium_does_it():
    infos = [{"a": 1, "d": {"x": 0.5, "t": (1,)}}, {}, {"a": 3, "b": True}]
    batch = batch_infos(infos)
    assert batch["a"].tolist() == [1, 0, 3] and batch["_a"].tolist() == [True, False, True]
    assert batch["b"].dtype == np.bool_ and batch["_b"].tolist() == [False, False, True]
    assert batch["d"]["x"].tolist() == [0.5, 0, 0] and batch["d"]["t"].tolist() == [(1,), None, None]
