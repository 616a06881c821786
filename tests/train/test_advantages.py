"""Advantages over sampled tokens: equal to a slow walk through the calls of each episode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopd_agents.episode import Call, Episode
from memopd_train.advantages import AdvantageError, gae, terminal_rewards, whiten
from memopd_train.alignpack import sampled_tokens

episodes_of_calls = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4), min_size=1, max_size=4
)


def walk_the_calls(episodes: list[Episode], values: Tensor, gamma: float, lam: float) -> Tensor:
    """A[t] = sum over l of (gamma lam)^l delta[t + l], by definition, asking each call for the next."""
    advantages, cursor = [], 0
    for episode in episodes:
        sampled = []  # (call, token) of this episode, in time order
        for c, call in enumerate(episode.calls):
            sampled += [(c, t) for t in range(len(call.action_ids))]
        value_of = {key: float(values[cursor + n]) for n, key in enumerate(sampled)}

        def next_sampled(c: int, t: int, episode: Episode = episode) -> tuple[int, int] | None:
            if t + 1 < len(episode.calls[c].action_ids):
                return c, t + 1
            later = [k for k in range(c + 1, len(episode.calls)) if episode.calls[k].action_ids]
            return (later[0], 0) if later else None

        def delta(key: tuple[int, int], episode: Episode = episode, value_of: dict = value_of) -> float:
            following = next_sampled(*key)
            reward = episode.reward if following is None else 0.0
            bootstrap = 0.0 if following is None else gamma * value_of[following]
            return reward + bootstrap - value_of[key]

        for key in sampled:
            total, factor, step = 0.0, 1.0, key
            while step is not None:
                total += factor * delta(step)
                factor *= gamma * lam
                step = next_sampled(*step)
            advantages.append(total)
        cursor += len(sampled)
    return torch.tensor(advantages, dtype=values.dtype)


@settings(max_examples=100, deadline=None)
@given(episodes_of_calls, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 1000))
def test_gae_equals_a_slow_walk_through_the_calls(shape, gamma: float, lam: float, seed: int) -> None:
    # Prompts of any length: information and memory tokens have no place on the axis, so they cannot matter.
    episodes = [
        Episode([Call([1] * prompt, [2] * action) for prompt, action in calls], reward=float(e + 1))
        for e, calls in enumerate(shape)
    ]
    batch = sampled_tokens(episodes)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(batch.action_ids), generator=generator, dtype=torch.float64)
    rewards = terminal_rewards(torch.tensor([e.reward for e in episodes], dtype=torch.float64), batch.episode_index)
    advantages, returns = gae(rewards, values, batch.episode_index, gamma, lam)
    expected = walk_the_calls(episodes, values, gamma, lam)
    assert torch.allclose(advantages, expected, atol=1e-10)
    assert torch.allclose(returns, expected + values, atol=1e-10)


def test_the_last_token_of_a_call_bootstraps_from_the_first_of_the_next() -> None:
    values = torch.tensor([0.1, 0.2, 0.4])  # call 0: two tokens, call 1: one token
    advantages, _ = gae(torch.zeros(3), values, torch.zeros(3, dtype=torch.int64), gamma=0.5, lam=0.0)
    assert torch.allclose(advantages, torch.tensor([0.5 * 0.2 - 0.1, 0.5 * 0.4 - 0.2, -0.4]))


def test_an_episode_is_unaffected_by_its_neighbours() -> None:
    owner = torch.tensor([0, 0, 1, 1, 1])
    values, rewards = torch.randn(5), terminal_rewards(torch.tensor([1.0, 2.0]), owner)
    both, _ = gae(rewards, values, owner, 0.9, 0.8)
    alone, _ = gae(rewards[2:], values[2:], owner[2:], 0.9, 0.8)
    assert torch.equal(both[2:], alone)


def test_without_discount_and_at_lambda_1_every_return_is_the_episode_reward() -> None:
    owner = torch.tensor([0, 0, 0, 1])
    values = torch.randn(4, requires_grad=True)
    advantages, returns = gae(terminal_rewards(torch.tensor([3.0, 1.0]), owner), values, owner, 1.0, 1.0)
    assert torch.allclose(returns, torch.tensor([3.0, 3.0, 3.0, 1.0]), atol=1e-6)
    assert not advantages.requires_grad and not returns.requires_grad


def test_the_reward_lands_on_the_last_sampled_token_and_nowhere_else() -> None:
    placed = terminal_rewards(torch.tensor([2.0, 7.0, 5.0]), torch.tensor([0, 0, 2, 2, 2]))
    assert placed.tolist() == [0.0, 2.0, 0.0, 0.0, 5.0]  # episode 1 sampled nothing


def test_no_tokens_give_no_advantages() -> None:
    none = torch.zeros(0)
    owner = torch.zeros(0, dtype=torch.int64)
    assert [len(x) for x in gae(none, none, owner, 1.0, 0.95)] == [0, 0]
    assert len(terminal_rewards(torch.ones(1), owner)) == 0
    assert len(whiten(none)) == 0


def test_scattered_episodes_and_uneven_lengths_are_errors() -> None:
    with pytest.raises(AdvantageError, match="scattered"):
        gae(torch.zeros(3), torch.zeros(3), torch.tensor([0, 1, 0]), 1.0, 1.0)
    with pytest.raises(AdvantageError, match=r"values has shape \(2,\)"):
        gae(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.int64), 1.0, 1.0)


def test_whitening_gives_zero_mean_and_unit_variance() -> None:
    white = whiten(5.0 + 3.0 * torch.randn(1000))
    assert abs(float(white.mean())) < 1e-5
    assert abs(float(white.var(correction=0)) - 1.0) < 1e-4
    assert whiten(torch.full((4,), 2.5)).tolist() == [0.0] * 4


# Rank 1 has no tokens: it must neither hang nor count.
WHITEN_ON_RANK = """
import sys, torch
from torch import distributed as dist
from memopd_train.advantages import whiten
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
torch.save(whiten(torch.arange(10.0) if rank == 0 else torch.zeros(0)), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_whitening_covers_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", WHITEN_ON_RANK, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(torch.cat(shares), whiten(torch.arange(10.0)))
