"""What is measured of every iteration, and when to shout.

Small students collapse in three known ways: entropy goes to zero, the policy runs away from the one that played, or it
stops writing valid actions. Each has an alarm, logged as a warning when it starts, not at every step.

A line of ``metrics.jsonl`` (one per iteration; what no function below describes):

==============================  ========================================================================================
``step``, ``iteration``         optimiser steps and iterations done
``policy_loss``, ``value_loss`` clipped PPO term; half the squared error of the critic
``opd``, ``opd_coef``           divergence from the teacher before its coefficient; the coefficient
``opd_grad_share``              |g_opd| / (|g_opd| + |g_ppo|), gradients at the logits: 0.5 is equal strength
``entropy``, ``ref_kl``         nats per sampled token; KL(student || reference)
``approx_kl``, ``ratio_max``,   how far the updates moved the policy from the one that played: k3 estimate, largest and
``ratio_p99``                   99 % quantile of the ratio
``clip_fraction``,              share of tokens whose gradient was clipped; whose ratio is outside the clip range; whose
``outside_fraction``,           value was clipped
``value_clip_fraction``
``importance``,                 mean correction for engine and trainer disagreeing; share of tokens at its cap
``importance_capped``
``grad_norm``,                  norms before clipping; share of steps skipped because the gradient was not finite
``critic_grad_norm``,
``skipped``
``excluded``                    episodes left out because the retriever failed
``seconds_play``, ``_prepare``, wall-clock seconds per stage; ``seconds`` is that of the whole run, all sessions
``_learn``, ``_evaluate``
``tokens_per_second_play``,     sampled tokens; unique tokens through the updates
``tokens_per_second_learn``
``eval_...``                    the episode metrics on held-out tasks
==============================  ========================================================================================
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from memopd_agents.episode import Episode
from memopd_train.alignpack import Pack
from memopd_train.config import MemOPDConfig

logger = logging.getLogger(__name__)

COUNTS = (
    "episodes",
    "eval_episodes",
    "excluded",
    "packs",
    "unique_tokens",
    "raw_tokens",
    "tokens_per_second_play",
    "tokens_per_second_learn",
)
"""Metrics that add up over ranks; of all others the mean over ranks is logged."""
MAXIMA = ("ratio_max",)
"""Metrics of which the largest counts; of all others the mean."""


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Summarise played episodes.

    Returns:
        Means per episode: ``reward``, ``em``, ``f1`` (sums over questions), ``turns``, ``searches``, ``answered``
        (share), ``peak_tokens`` (longest prompt plus action), ``action_tokens``; and ``invalid_rate`` per action.
    """
    infos = [episode.info for episode in episodes]
    turns = sum(len(episode.calls) for episode in episodes)

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values) if values else 0.0

    return {
        "episodes": float(len(episodes)),
        "reward": mean([episode.reward for episode in episodes]),
        "em": mean([float(info.get("em", 0.0)) for info in infos]),
        "f1": mean([float(info.get("f1", 0.0)) for info in infos]),
        "turns": mean([float(len(episode.calls)) for episode in episodes]),
        "searches": mean([float(info.get("searches", 0)) for info in infos]),
        "answered": mean([float(info.get("stop_reason") == "answered") for info in infos]),
        "invalid_rate": sum(float(info.get("invalid_actions", 0)) for info in infos) / max(turns, 1),
        "peak_tokens": mean(
            [float(max(len(c.prompt_ids) + len(c.action_ids) for c in e.calls)) for e in episodes if e.calls]
        ),
        "action_tokens": mean([float(sum(len(call.action_ids) for call in episode.calls)) for episode in episodes]),
    }


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor | None) -> dict[str, float]:
    """How far engine and trainer disagree on the same tokens: mean, p99 and largest |Δ log-prob|; empty if unknown."""
    if rollout_logprobs is None or not len(old_logprobs):
        return {}
    gap = (old_logprobs - rollout_logprobs).abs().float()
    return {
        "rollout_gap_mean": float(gap.mean()),
        "rollout_gap_p99": quantile(gap, 0.99),
        "rollout_gap_max": float(gap.max()),
    }


def value_metrics(values: Tensor, returns: Tensor, advantages: Tensor) -> dict[str, float]:
    """Mean value and return, and the share of the returns' variance that the critic explains."""
    spread = returns.var(unbiased=False)
    explained = 1.0 - (returns - values).var(unbiased=False) / spread.clamp(min=1e-8)
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": float(explained) if float(spread) > 1e-8 else 0.0,
        "advantage_max": float(advantages.abs().max()),
    }


def pack_metrics(packs: Sequence[Pack]) -> dict[str, float]:
    """Tokens computed, tokens without sharing, and the share of computed tokens that is trained on."""
    unique = sum(pack.num_tokens for pack in packs)
    return {
        "packs": float(len(packs)),
        "unique_tokens": float(unique),
        "raw_tokens": float(sum(pack.raw_tokens for pack in packs)),
        "trained_share": sum(pack.num_actions for pack in packs) / max(unique, 1),
    }


def quantile(values: Tensor, q: float) -> float:
    """The q-quantile of any number of values (``torch.quantile`` stops at 16 million)."""
    return float(values.flatten().kthvalue(max(1, round(q * values.numel()))).values)


def summarise(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of several updates to one set: largest where that is what counts, else the mean."""
    names = {name: None for update in updates for name in update}
    return {
        name: (max if name in MAXIMA else statistics.fmean)([update[name] for update in updates if name in update])
        for name in names
    }


def ratio_metrics(logprobs: Sequence[Tensor], old_logprobs: Sequence[Tensor]) -> dict[str, float]:
    """Largest and p99 of the policy ratio over the tokens of an update."""
    if not logprobs:
        return {}
    ratio = (torch.cat(list(logprobs)) - torch.cat(list(old_logprobs))).clamp(-20, 20).exp()
    return {"ratio_max": float(ratio.max()), "ratio_p99": quantile(ratio, 0.99)}


def pull_metrics(policy_pull: float, opd_pull: float) -> dict[str, float]:
    """Share of the distillation in the gradient at the logits; coefficients do not carry over, this figure does.

    Args:
        policy_pull: Squared length of the PPO term's gradient (:class:`memopd_train.losses.LossMetrics`).
        opd_pull: The same of the distillation.
    """
    policy, opd = policy_pull**0.5, opd_pull**0.5
    return {"opd_grad_share": opd / (opd + policy) if opd + policy > 0 else 0.0}


class Alarms:
    """Warns when a metric crosses its limit, once per crossing."""

    def __init__(self, args: MemOPDConfig) -> None:
        self._limits = {
            "entropy": (args.alarm_entropy, "below", "the policy is becoming deterministic; raise entropy_coef"),
            "approx_kl": (args.alarm_kl, "above", "updates are too large; lower learning_rate or ppo_epochs"),
            "invalid_rate": (args.alarm_invalid, "above", "the policy forgets the protocol; strengthen the cold start"),
            "rollout_gap_p99": (args.alarm_gap, "above", "engine and trainer disagree; check the precision of both"),
        }
        self.ringing: set[str] = set()

    def check(self, iteration: int, metrics: Mapping[str, float]) -> set[str]:
        """Look at the metrics of an iteration; return the names of those that are beyond their limits."""
        beyond = set()
        for name, (limit, side, advice) in self._limits.items():
            if limit <= 0 or name not in metrics:
                continue
            if metrics[name] < limit if side == "below" else metrics[name] > limit:
                beyond.add(name)
                if name not in self.ringing:
                    logger.warning(
                        "iteration %d: %s is %.3g, %s %.3g: %s", iteration, name, metrics[name], side, limit, advice
                    )
        self.ringing = beyond
        return beyond
