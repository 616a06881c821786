"""Logits that are never written out: hidden states, the head that would make them, and log-probs one chunk at a time.

With 150,000 ids a row of logits is a hundred times larger than the hidden state it comes from. So models hand over
hidden states at the sampled positions together with their head, and whoever needs the vocabulary projects a few rows,
reduces them, and forgets them.

Axes: A = sampled tokens, C = tokens of a chunk, H = hidden width, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Size of one chunk of log-probs when no chunk size is given: small on a CPU for its caches, larger to fill a GPU."""


class Projection(NamedTuple):
    """Hidden states at the sampled positions and the head that turns them into logits.

    Attributes:
        hidden: (A, H) hidden states at ``action_index``.
        weight: (V, H) head.
        bias: (V,) or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def log_softmax(self, rows: slice, vocab: int, active: Tensor | None = None) -> Tensor:
        """Return the (C, vocab) log-probs of some rows in float32 (float64 for float64 hidden states).

        Args:
            rows: Which sampled tokens.
            vocab: Ids in use; the head's rows beyond it are padding and get no probability.
            active: (C,) rows that matter. The others are computed from zeros, so that nothing in them can spread.
        """
        hidden, weight = self.hidden[rows], self.weight[:vocab]
        if active is not None:
            hidden = torch.where(active[:, None], hidden, 0.0)
        if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
            logits = torch.mm(hidden, weight.to(hidden.dtype).t(), out_dtype=torch.float32)
        else:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            logits = hidden.to(dtype) @ weight.to(dtype).t()
        if self.bias is not None:
            logits += self.bias[:vocab]
        return torch.log_softmax(logits, dim=1)


class TokenScores(NamedTuple):
    """Per-token scores without gradients: each (A,).

    Attributes:
        logprobs: Log-prob of the given token.
        entropies: Entropy in nats.
        top1: Most likely token id.
    """

    logprobs: Tensor
    entropies: Tensor
    top1: Tensor


@torch.no_grad()
def token_scores(
    projection: Projection, action_ids: Tensor, *, valid_vocab: int | None = None, chunk_size: int | None = None
) -> TokenScores:
    """Score given tokens in chunks: old log-probs, entropies, top-1 agreement.

    Args:
        projection: Hidden states (A, H) and head.
        action_ids: (A,) token ids to score.
        valid_vocab: Number of ids the tokenizer knows; None is all rows of the head.
        chunk_size: Rows projected at a time; None chooses by :data:`CHUNK_BYTES`.

    Returns:
        Log-probs, entropies and most likely ids.
    """
    vocab = projection.weight.shape[0] if valid_vocab is None else valid_vocab
    action_ids = action_ids.to(projection.hidden.device)
    dtype = torch.promote_types(projection.hidden.dtype, torch.float32)
    logprobs, entropies = (torch.empty(len(action_ids), dtype=dtype, device=action_ids.device) for _ in range(2))
    top1 = torch.empty_like(action_ids)
    with torch.autocast(projection.hidden.device.type, enabled=False):
        for rows in chunks(len(action_ids), vocab, projection.hidden.device, chunk_size):
            logp = projection.log_softmax(rows, vocab)
            logprobs[rows] = logp.gather(1, action_ids[rows, None])[:, 0]
            entropies[rows] = -(logp.exp() * logp).sum(1)
            top1[rows] = logp.argmax(1)
    return TokenScores(logprobs, entropies, top1)


def chunks(count: int, vocab: int, device: torch.device, chunk_size: int | None) -> list[slice]:
    """Cut ``count`` rows of ``vocab`` log-probs into chunks of ``chunk_size``, or of :data:`CHUNK_BYTES` if None."""
    if chunk_size is None:
        chunk_size = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocab))
    return [slice(start, min(start + chunk_size, count)) for start in range(0, count, chunk_size)]
