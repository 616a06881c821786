"""Divergences between student and teacher over the whole vocabulary, each with its gradient in closed form.

Every function takes log-probs of the student p and of the teacher q, (C, V) each, and returns the divergence (C,) and
its gradient with respect to the student's *logits* (C, V). Since log-softmax only shifts a row, a divergence with
derivative ``f_v`` by ``log p_v`` has the gradient ``f_v - p_v sum_u f_u``; written out for each, that is one line.

All are finite where p or q underflow, as long as the log-probs are finite.

Axes: C = sampled tokens of a chunk, V = vocabulary.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor


class Divergence(StrEnum):
    """Distance between student p and teacher q at the sampled positions."""

    REVERSE_KL = "reverse_kl"
    """KL(p || q), full vocabulary: mode seeking, the default."""
    FORWARD_KL = "forward_kl"
    """KL(q || p), full vocabulary: mass covering."""
    JSD = "jsd"
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q (GKD, arXiv 2306.13649)."""
    TOP_K = "top_k"
    """KL(p || q) with all but the teacher's k most likely tokens merged into one tail; never above ``reverse_kl``."""
    SAMPLED_TOKEN = "sampled_token"
    """log q - log p of the sampled token, added to its advantage. Never back-propagated as a loss: that gradient is the
    same for every teacher."""
    NONE = "none"
    """No distillation."""


def divergence_and_gradient(
    kind: Divergence, logp: Tensor, p: Tensor, logq: Tensor, *, beta: float, k: int
) -> tuple[Tensor, Tensor]:
    """Return value (C,) and logit gradient (C, V) of a full-vocabulary ``kind``; p is ``logp.exp()``."""
    match kind:
        case Divergence.REVERSE_KL:
            return reverse_kl(logp, p, logq)
        case Divergence.FORWARD_KL:
            return forward_kl(logp, p, logq)
        case Divergence.JSD:
            return jsd(logp, p, logq, beta)
        case Divergence.TOP_K:
            return top_k_reverse_kl(logp, p, logq, k)
        case _:
            raise ValueError(f"{kind.value} is not a divergence over the vocabulary")


def reverse_kl(logp: Tensor, p: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q), student first: sum p (log p - log q); gradient p (log p - log q - KL)."""
    gap = logp - logq
    kl = (p * gap).sum(1)
    return kl, gap.sub_(kl[:, None]).mul_(p)


def forward_kl(logp: Tensor, p: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p), teacher first: sum q (log q - log p); gradient p - q."""
    q = logq.exp()
    return (q * (logq - logp)).sum(1), p - q


def jsd(logp: Tensor, p: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon, beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q.

    As m moves along with p, most terms cancel: the gradient is (1 - beta) p (log p - log m - KL(p || m)).
    """
    logm = torch.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
    teacher_kl = (logq.exp() * (logq - logm)).sum(1)
    student_kl, gradient = reverse_kl(logp, p, logm)
    return beta * teacher_kl + (1 - beta) * student_kl, gradient.mul_(1 - beta)


def top_k_reverse_kl(logp: Tensor, p: Tensor, logq: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """KL(p || q) over k + 1 outcomes: the teacher's k most likely tokens, and all others as one.

    Merging outcomes can only lower a KL, so this is a valid divergence, unlike a sum cut off after k tokens. The
    gradient is that of the reverse KL with the log-ratio of the outcome that each token belongs to.
    """
    if k >= logp.shape[1]:
        return reverse_kl(logp, p, logq)
    top = logq.topk(k, dim=1).indices
    tail_p, tail_q = (x.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True) for x in (logp, logq))
    tail_gap, top_gap = tail_p - tail_q, (logp - logq).gather(1, top)
    kl = (p.gather(1, top) * top_gap).sum(1) + (tail_p.exp() * tail_gap)[:, 0]
    gap = tail_gap.expand_as(logp).scatter(1, top, top_gap)
    return kl, gap.sub_(kl[:, None]).mul_(p)
