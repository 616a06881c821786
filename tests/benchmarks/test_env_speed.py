"""The environment's speed benchmarks run and report what they say they do; nothing here depends on how fast."""

import gymnasium as gym

from memopd_benchmarks.speed import env_step, vector

QUERIES = ["year", "book", "city"]


def test_a_step_a_query_and_a_first_observation_are_measured():
    result = env_step.measure("MemOPD-Q2", repeats=2)
    assert result["step_us"] > 0 and result["query_us"] > 0 and result["first_observation_s"] > 0
    assert result["ratio"] > 0 and result["target_ratio"] == env_step.TARGET_RATIO


def test_vector_and_loop_are_stepped_with_different_queries():
    asked = []

    class Asked:
        def search(self, queries, k):
            asked.append(list(queries))
            return [[] for _ in queries]

    together = gym.make_vec("memopd_env:MemOPD-Q16", num_envs=3, retriever=Asked())
    assert vector.steps_per_second(together, 3, QUERIES, 0.01) > 0
    assert {len(queries) for queries in asked} == {3} and set(asked[0]) == set(QUERIES)
    asked.clear()
    singles = [gym.make("memopd_env:MemOPD-Q16", retriever=Asked()) for _ in range(3)]
    assert vector.loop_steps_per_second(singles, QUERIES, 0.01) > 0
    assert all(len(queries) == 1 for queries in asked)
