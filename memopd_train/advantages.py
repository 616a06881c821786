"""Generalised advantage estimation over the sampled tokens of an episode, in the order in which they were sampled.

The one idea: an episode is one chain of sampled tokens, however often its context was rewritten. Prompts, memory copies
and information are not links of the chain. So the last token of call k bootstraps from the value at the first action
position of call k+1, which the critic computed in *that* call's context, and nothing here needs to know where a call
ends.

Axes: A = sampled tokens of the batch (order: episode, call, token), E = episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from memopd_env.errors import MemOPDError


class AdvantageError(MemOPDError, ValueError):
    """The arrays over sampled tokens do not belong together; the message says which and why."""


def gae(rewards: Tensor, values: Tensor, episode_index: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns (arXiv 1506.02438, eq. 16), one chain an episode.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where t+1 is the next *sampled*
    token of the same episode. Every episode ends its chain: beyond the last token value and advantage are zero, also if
    turns ran out.

    Args:
        rewards: (A,) reward received for each sampled token; see :func:`terminal_rewards`.
        values: (A,) critic value of the state each token was sampled in, i.e. at its ``action_index``.
        episode_index: (A,) episode of each token; the tokens of an episode are contiguous.
        gamma: Discount per sampled token.
        lam: Exponential weight of longer estimates; 1 is Monte Carlo.

    Returns:
        Advantages and returns (advantage + value), both (A,), detached, in the dtype and on the device of ``values``.

    Raises:
        AdvantageError: If lengths differ or an episode's tokens are not contiguous.
    """
    _check_axis(episode_index, rewards=rewards, values=values)
    # The recursion is serial and cheap: plain doubles on the host beat A launches of a kernel.
    reward_list, value_list, episode_list = (x.detach().cpu().tolist() for x in (rewards, values, episode_index))
    advantages = [0.0] * len(value_list)
    next_advantage = next_value = 0.0
    next_episode = None
    for t in range(len(value_list) - 1, -1, -1):
        if episode_list[t] != next_episode:
            next_advantage = next_value = 0.0
        delta = reward_list[t] + gamma * next_value - value_list[t]
        next_advantage = advantages[t] = delta + gamma * lam * next_advantage
        next_value, next_episode = value_list[t], episode_list[t]
    advantages_A = torch.tensor(advantages, dtype=values.dtype, device=values.device)
    return advantages_A, advantages_A + values.detach()


def terminal_rewards(rewards: Tensor, episode_index: Tensor) -> Tensor:
    """Place each episode's reward on its last sampled token.

    Args:
        rewards: (E,) episode rewards. An episode without sampled tokens has no place for one.
        episode_index: (A,) episode of each sampled token; the tokens of an episode are contiguous.

    Returns:
        (A,) rewards, zero everywhere else.
    """
    _check_axis(episode_index)
    placed = torch.zeros(len(episode_index), dtype=rewards.dtype, device=rewards.device)
    last = torch.nonzero(torch.diff(episode_index, append=episode_index.new_tensor([-1]))).flatten()
    placed[last] = rewards[episode_index[last]]
    return placed


def whiten(advantages: Tensor, *, eps: float = 1e-8, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale to zero mean and unit variance over all sampled tokens of the batch, on all ranks together.

    Every rank of ``group`` must call it, also with no tokens. Without ``torch.distributed`` the batch is local.

    Args:
        advantages: (A,) this rank's tokens.
        eps: Added to the variance; equal advantages become zeros.
        group: Ranks that share the batch; None is all of them.

    Returns:
        (A,) whitened advantages.
    """
    x = advantages.double()
    count_and_sum = _all_sum(torch.stack([x.new_tensor(float(x.numel())), x.sum()]), group)
    count = count_and_sum[0].clamp(min=1.0)
    centred = x - count_and_sum[1] / count
    variance = _all_sum(centred.square().sum(), group) / count
    return (centred * torch.rsqrt(variance + eps)).to(advantages.dtype)


def _all_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x, group=group)
    return x


def _check_axis(episode_index: Tensor, **arrays: Tensor) -> None:
    for name, array in arrays.items():
        if array.shape != episode_index.shape:
            raise AdvantageError(
                f"{name} has shape {tuple(array.shape)}, episode_index {tuple(episode_index.shape)}: both need one "
                "entry for each sampled token"
            )
    runs = torch.unique_consecutive(episode_index)
    if len(runs) != len(runs.unique()):
        raise AdvantageError(
            "tokens of one episode are scattered: order them by episode, call, token (see alignpack.unpack)"
        )
