"""Scores of sampled tokens without ever holding all logits."""

from __future__ import annotations

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from memopd_train.projection import CHUNK_BYTES, Projection, chunks, token_scores


def projection(dtype: torch.dtype = torch.float32) -> tuple[Projection, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator)
    weight, bias = torch.randn(31, 8, generator=generator), torch.randn(31, generator=generator)
    return Projection(*(x.to(dtype) for x in (hidden, weight, bias))), torch.randint(0, 29, (23,), generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 7, 23, None])
def test_scores_equal_those_of_full_logits(chunk_size: int | None) -> None:
    p, ids = projection()
    assert p.bias is not None
    logp = torch.log_softmax(p.hidden @ p.weight.t() + p.bias, 1)
    scores = token_scores(p, ids, chunk_size=chunk_size)
    assert torch.allclose(scores.logprobs, logp.gather(1, ids[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(scores.entropies, torch.distributions.Categorical(logits=logp).entropy(), atol=1e-5)
    assert torch.equal(scores.top1, logp.argmax(1))


def test_scores_equal_those_of_trl() -> None:
    p, ids = projection()
    logprobs, entropies, *_ = ChunkedLogProbFunction.apply(*p, ids, 1.0, 4)
    scores = token_scores(p, ids, chunk_size=5)
    assert torch.allclose(scores.logprobs, logprobs, atol=1e-5)
    assert torch.allclose(scores.entropies, entropies, atol=1e-5)


def test_rows_beyond_the_tokenizer_get_no_probability() -> None:
    p, ids = projection()
    assert p.bias is not None
    narrow = Projection(p.hidden, p.weight[:29], p.bias[:29])
    padded, plain = token_scores(p, ids, valid_vocab=29), token_scores(narrow, ids)
    assert all(torch.equal(a, b) for a, b in zip(padded, plain, strict=True))
    assert padded.top1.max() < 29


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_are_at_least_full_precision(dtype: torch.dtype) -> None:
    p, ids = projection(dtype)
    exact = Projection(*(None if x is None else x.double() for x in p))  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        scores = token_scores(p, ids)
    assert scores.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(scores.logprobs.double(), token_scores(exact, ids).logprobs, atol=1e-5)


def test_inactive_rows_cannot_spread_what_they_hold() -> None:
    p, _ = projection()
    p.hidden[3] = torch.nan
    active = torch.arange(23) != 3
    assert torch.isfinite(p.log_softmax(slice(0, 23), 31, active)).all()


def test_no_tokens_give_no_scores() -> None:
    p, ids = projection()
    assert [len(x) for x in token_scores(p._replace(hidden=p.hidden[:0]), ids[:0])] == [0, 0, 0]


def test_chunks_cover_all_rows_and_stay_within_their_bytes() -> None:
    parts = chunks(2048, 151_936, torch.device("cpu"), None)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(2048))
    assert all((part.stop - part.start) * 151_936 * 4 <= CHUNK_BYTES["cpu"] for part in parts)
    assert [(c.start, c.stop) for c in chunks(2, 2**40, torch.device("cpu"), None)] == [(0, 1), (1, 2)]
