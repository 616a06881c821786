from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopd_agents.engines.sampling import draw, sampling_logprobs, uniforms


def logprobs(logits: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    row = torch.tensor([logits])
    return sampling_logprobs(row, torch.tensor([temperature]), torch.tensor([top_p]), torch.tensor([top_k]))[0]


def test_uniform_numbers_do_not_depend_on_their_neighbours():
    seeds, counters = np.arange(50, dtype=np.uint64), np.arange(50)
    together = uniforms(seeds, counters)
    assert all(uniforms(seeds[i : i + 1], counters[i : i + 1])[0] == together[i] for i in range(50))


def test_uniform_numbers_are_uniform():
    values = uniforms(np.full(20000, 12345, dtype=np.uint64), np.arange(20000))
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150


def test_top_k_keeps_the_k_most_likely():
    kept = logprobs([1.0, 4.0, 2.0, 3.0], top_k=2)
    assert torch.isfinite(kept).tolist() == [False, True, False, True]
    torch.testing.assert_close(kept.exp().sum(), torch.tensor(1.0))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert torch.isfinite(logprobs(probabilities.log().tolist(), top_p=0.6)).tolist() == [True, True, False, False]
    assert torch.isfinite(logprobs(probabilities.log().tolist(), top_p=0.01)).tolist() == [True, False, False, False]


def test_draw_follows_the_distribution():
    row = torch.tensor([0.1, 0.0, 0.6, 0.3]).log()
    uniform = torch.from_numpy(uniforms(np.full(4000, 9, dtype=np.uint64), np.arange(4000)))
    shares = torch.bincount(draw(row.expand(4000, -1), uniform), minlength=4) / 4000
    assert shares[1] == 0
    torch.testing.assert_close(shares, row.exp(), atol=0.03, rtol=0)


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=20),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 1),
    st.integers(0, 25),
)
def test_a_token_that_was_cut_is_never_drawn(logits, uniform, top_p, top_k):
    row = logprobs(logits, top_p=top_p, top_k=top_k)
    token = draw(row[None], torch.tensor([uniform], dtype=torch.float64))[0]
    assert torch.isfinite(row[token])
