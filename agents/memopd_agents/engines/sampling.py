"""Sampling where every request owns its randomness.

The uniform number behind token ``t`` of a request is a hash of (the request's seed, ``t``): a counter, not a
generator with a state. So what a request samples depends on nothing else in the batch, and a whole batch is drawn in
a few vector operations.

Axes: B requests in the batch, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds_B: NDArray[np.uint64], counters_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each request the ``counter``-th number in [0, 1) of its splitmix64 stream (Steele et al., 2014).

    Args:
        seeds_B: One 64-bit stream seed per request.
        counters_B: How many tokens the request has sampled already.
    """
    with np.errstate(over="ignore"):
        z = seeds_B + (counters_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_logprobs(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities of the distribution that is sampled: tempered, then cut by top-k, then by top-p.

    A temperature of 0 (greedy) leaves the model's own distribution; a top_k of 0 and a top_p of 1 cut nothing. Tokens
    that were cut have log-probability ``-inf`` and the rest sums to one again.
    """
    tempered = logits_BV / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    if bool((top_k_B > 0).any()):
        vocabulary = tempered.shape[1]
        kept = torch.where(top_k_B > 0, top_k_B, vocabulary).clamp(max=vocabulary)
        threshold = tempered.sort(dim=-1, descending=True).values.gather(1, kept[:, None] - 1)
        tempered = tempered.masked_fill(tempered < threshold, -torch.inf)
    if bool((top_p_B < 1).any()):
        probabilities, order = tempered.softmax(-1).sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p, so the most likely one always stays.
        cut = (probabilities.cumsum(-1) - probabilities) >= top_p_B[:, None]
        cut[:, 0] = False
        cut &= (top_p_B < 1)[:, None]
        tempered = tempered.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf)
    return tempered.log_softmax(-1)


def draw(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the token at which the cumulative probability first exceeds the uniform number (inverse CDF)."""
    cumulative = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    # Scaling by the total keeps a number just below 1 inside the support when rounding makes the total fall short.
    target = uniform_B[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs_BV.shape[1] - 1)
