from __future__ import annotations

import threading

import gymnasium as gym
import pytest

from memopd_agents import rollout
from memopd_agents.engines import HFEngine, SamplingParams
from memopd_agents.engines.base import Completion
from memopd_agents.episode import EpisodeFileError, read_episodes
from memopd_agents.policy import check_prompt
from memopd_agents.rollout import RolloutError
from memopd_agents.seeds import derive_seed, episode_seed
from memopd_env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval import RetrievalError

SAMPLING = SamplingParams(max_tokens=16)


@pytest.fixture
def make_env(tasks, retriever):
    return lambda **options: MemOPDEnv(**{"tasks": tasks, "retriever": retriever, "instructions": "terse", **options})


class SearchingEngine:
    """Searches twice, then answers with what the seed says; counts how many requests it held at once."""

    version = 0

    def __init__(self, tokenizer, batch: int = 3) -> None:
        self.tokenizer, self.batch = tokenizer, batch
        self.queue: list = []
        self.most = 0

    def submit(self, request) -> None:
        self.queue.append(request)
        self.most = max(self.most, len(self.queue))

    def poll(self) -> list[Completion]:
        # Newest first: the order in which calls finish is not the order in which they were submitted.
        done, self.queue = self.queue[-self.batch :], self.queue[: -self.batch]
        return [self._complete(request) for request in reversed(done)]

    def _complete(self, request) -> Completion:
        number, call = map(int, request.request_id.split(":"))
        text = f"<think>{request.seed % 97}</think><search>Bo {number}</search>"
        if call == 2:
            text = f"<answer>Rome; {request.seed}</answer>"
        ids = self.tokenizer.encode(text)
        return Completion(request.request_id, ids, [-0.5] * len(ids), "stop")

    def abort(self) -> None:
        self.queue = []


def test_episodes_come_back_in_task_order(tokenizer, make_env, tasks):
    indices = [3, 0, 1, 0, 2]
    episodes = rollout(SearchingEngine(tokenizer), tokenizer, make_env, indices, max_active=3)
    assert [episode.task_id for episode in episodes] == [tasks[index].id for index in indices]
    assert [episode.number for episode in episodes] == [0, 1, 2, 3, 4]
    assert [episode.info["searches"] for episode in episodes] == [2] * 5


@pytest.mark.parametrize("memory", ["consolidate", "full"])
def test_result_does_not_depend_on_who_is_played_beside(model, tokenizer, make_env, memory):
    def play(max_active: int, max_batch: int):
        engine = HFEngine(model, tokenizer, max_batch=max_batch)
        return rollout(
            engine,
            tokenizer,
            lambda: make_env(memory=memory, max_turns=3),
            [0, 1, 2, 3, 0, 1],
            sampling=SAMPLING,
            seed=5,
            max_active=max_active,
        )

    alone, together = play(1, 1), play(6, 4)
    assert [[call.action_ids for call in episode.calls] for episode in alone] == [
        [call.action_ids for call in episode.calls] for episode in together
    ]


def test_every_prompt_is_made_of_the_ids_that_were_sampled(model, tokenizer, make_env):
    engine = HFEngine(model, tokenizer, max_batch=4)
    for episode in rollout(engine, tokenizer, lambda: make_env(memory="full"), range(4), sampling=SAMPLING):
        actions = [call.action_ids for call in episode.calls]
        for number, call in enumerate(episode.calls):
            check_prompt(call.prompt_ids, call.segments, actions)
            assert sum(span.kind == "action" for span in call.segments) == number
            assert len(call.logprobs or ()) == len(call.action_ids)


def test_request_seeds_follow_from_run_seed_episode_and_call(tokenizer, make_env):
    first, second = rollout(SearchingEngine(tokenizer), tokenizer, make_env, [0, 0], seed=9)
    assert [call.seed for call in first.calls] == [derive_seed(episode_seed(9, 0), call) for call in range(3)]
    assert not {call.seed for call in first.calls} & {call.seed for call in second.calls}


def test_searches_of_waiting_environments_are_joined(tokenizer, make_env, retriever):
    sizes = []

    class Counting:
        def search(self, queries, k):
            assert threading.current_thread() is not threading.main_thread()
            sizes.append(len(queries))
            return retriever.search(queries, k)

    counting = Counting()
    episodes = rollout(SearchingEngine(tokenizer, 8), tokenizer, lambda: make_env(retriever=counting), [0] * 8)
    assert sum(sizes) == sum(episode.info["searches"] for episode in episodes) == 16
    assert max(sizes) == 8


def test_no_more_episodes_than_asked_for_are_active(tokenizer, make_env):
    engine = SearchingEngine(tokenizer)
    made = []

    def counted():
        made.append(make_env())
        return made[-1]

    rollout(engine, tokenizer, counted, [0] * 12, max_active=4)
    assert engine.most <= 4 and len(made) == 4


def test_killed_run_goes_on_where_it_stopped(tokenizer, make_env, tmp_path):
    path = tmp_path / "episodes.jsonl"
    expected = rollout(SearchingEngine(tokenizer), tokenizer, make_env, [0, 1, 2, 3], seed=2)

    def stop(episode, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(
            SearchingEngine(tokenizer, 1),
            tokenizer,
            make_env,
            [0, 1, 2, 3],
            seed=2,
            path=path,
            on_episode=stop,
            max_active=2,
        )
    kept = list(read_episodes(path))
    assert len(kept) == 2
    path.write_bytes(path.read_bytes() + b'{"calls": [{"prom')
    played = []
    engine = SearchingEngine(tokenizer)
    again = rollout(
        engine,
        tokenizer,
        make_env,
        [0, 1, 2, 3],
        seed=2,
        path=path,
        on_episode=lambda *news: played.append(news[0].number),
    )
    assert again == expected
    assert not set(played) & {episode.number for episode in kept}
    assert sorted(episode.number for episode in read_episodes(path)) == [0, 1, 2, 3]


def test_file_of_another_run_is_refused(tokenizer, make_env, tmp_path):
    path = tmp_path / "episodes.jsonl"
    rollout(SearchingEngine(tokenizer), tokenizer, make_env, [0], seed=2, path=path)
    with pytest.raises(EpisodeFileError, match=r"episode 0 was not played by this run \(seed 3"):
        rollout(SearchingEngine(tokenizer), tokenizer, make_env, [0], seed=3, path=path)


def test_interrupted_run_leaves_nothing_in_the_engine(model, tokenizer, make_env):
    engine = HFEngine(model, tokenizer, max_batch=2)

    def stop(*news):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(engine, tokenizer, lambda: make_env(max_turns=1), range(4), sampling=SAMPLING, on_episode=stop)
    assert engine.poll() == []


class Broken:
    def search(self, queries, k):
        raise RetrievalError("index is gone")


def test_retriever_failure_ends_the_episode_marked_where_the_environment_says_so(tokenizer, make_env):
    episodes = rollout(
        SearchingEngine(tokenizer),
        tokenizer,
        lambda: make_env(retriever=Broken(), on_retriever_error="truncate"),
        [0, 1],
    )
    assert [episode.info["stop_reason"] for episode in episodes] == ["retriever_error"] * 2
    assert all(episode.info["excluded"] for episode in episodes)


def test_failure_names_the_task(tokenizer, make_env):
    with pytest.raises(RolloutError, match=r"episode \d, task 't2': index is gone"):
        rollout(SearchingEngine(tokenizer), tokenizer, lambda: make_env(retriever=Broken()), [2])


def test_prompt_too_long_names_the_task(model, tokenizer, make_env):
    engine = HFEngine(model, tokenizer)
    with pytest.raises(RolloutError, match=r"task 't0': .*exceeds the model's window"):
        rollout(engine, tokenizer, make_env, [0], sampling=SamplingParams(max_tokens=5000))


def test_wrapper_that_would_be_bypassed_is_refused(tokenizer, make_env):
    with pytest.raises(ConfigError, match="TimeLimit, whose step would be bypassed"):
        rollout(SearchingEngine(tokenizer), tokenizer, lambda: gym.wrappers.TimeLimit(make_env(), 3), [0])


def test_environment_made_by_gymnasium_is_played(tokenizer, tasks, retriever):
    def make():
        return gym.make("memopd_env:MemOPD-Q2", tasks=tasks, retriever=retriever)

    (episode,) = rollout(SearchingEngine(tokenizer), tokenizer, make, [1])
    assert episode.info["turns"] == 3


def test_text_is_kept_on_request(tokenizer, make_env):
    (episode,) = rollout(SearchingEngine(tokenizer), tokenizer, make_env, [1], keep_text=True)
    assert tokenizer.decode(episode.calls[1].prompt_ids) == "".join(text for _, _, text in episode.calls[1].context)
    assert episode.calls[1].context[1][:2] == ("action", 0)
