"""Divergences and their closed-form gradients, against autograd and from first principles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopd_train.divergences import Divergence, divergence_and_gradient, forward_kl, jsd, reverse_kl, top_k_reverse_kl

FULL = [Divergence.REVERSE_KL, Divergence.FORWARD_KL, Divergence.JSD, Divergence.TOP_K]


def plain(kind: Divergence, logp: Tensor, logq: Tensor, beta: float, k: int) -> Tensor:
    """The definition, written with probabilities and left to autograd."""
    p, q = logp.exp(), logq.exp()
    if kind is Divergence.REVERSE_KL:
        return (p * (p / q).log()).sum(1)
    if kind is Divergence.FORWARD_KL:
        return (q * (q / p).log()).sum(1)
    if kind is Divergence.JSD:
        m = (1 - beta) * p + beta * q
        return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(1)
    top = q.topk(k, dim=1).indices
    top_p, top_q = p.gather(1, top), q.gather(1, top)
    tail_p, tail_q = 1 - top_p.sum(1), 1 - top_q.sum(1)
    return (top_p * (top_p / top_q).log()).sum(1) + tail_p * (tail_p / tail_q).log()


def two_models(seed: int, rows: int = 3, vocab: int = 9, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = scale * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    return student, torch.log_softmax(teacher, 1)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FULL), st.integers(0, 1000), st.floats(0.05, 0.95), st.integers(1, 8))
def test_value_and_gradient_equal_the_definition_under_autograd(kind, seed: int, beta: float, k: int) -> None:
    logits, logq = two_models(seed)
    logits.requires_grad_()
    logp = torch.log_softmax(logits, 1)
    expected = plain(kind, logp, logq, beta, k)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    with torch.no_grad():
        value, gradient = divergence_and_gradient(kind, logp, logp.exp(), logq, beta=beta, k=k)
    assert torch.allclose(value, expected, atol=1e-10)
    assert torch.allclose(gradient, expected_gradient, atol=1e-10)


@pytest.mark.parametrize("kind", FULL)
def test_equal_models_are_at_distance_zero(kind: Divergence) -> None:
    _, logp = two_models(0)
    value, gradient = divergence_and_gradient(kind, logp, logp.exp(), logp, beta=0.3, k=4)
    assert value.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


def test_reverse_kl_pays_for_student_mass_where_the_teacher_has_none_and_forward_kl_the_other_way_round() -> None:
    broad = torch.log(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    narrow = torch.log(torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64))
    student_too_broad, _ = reverse_kl(broad, broad.exp(), narrow)
    student_too_narrow, _ = reverse_kl(narrow, narrow.exp(), broad)
    assert float(student_too_broad) > 9 > 0.7 > float(student_too_narrow)
    assert (
        float(forward_kl(narrow, narrow.exp(), broad)[0]) > 9 > 0.7 > float(forward_kl(broad, broad.exp(), narrow)[0])
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_merging_the_tail_never_exceeds_the_full_divergence_and_grows_with_k(seed: int, k: int) -> None:
    logits, logq = two_models(seed)
    logp = torch.log_softmax(logits, 1)
    merged, _ = top_k_reverse_kl(logp, logp.exp(), logq, k)
    finer, _ = top_k_reverse_kl(logp, logp.exp(), logq, k + 1)
    full, _ = reverse_kl(logp, logp.exp(), logq)
    assert (merged >= -1e-12).all()
    assert (merged <= finer + 1e-12).all() and (finer <= full + 1e-12).all()


def test_jsd_is_bounded_however_far_apart_the_models_are() -> None:
    logits, logq = two_models(1, scale=200.0)
    logp = torch.log_softmax(logits, 1)
    value, gradient = jsd(logp, logp.exp(), logq, 0.5)
    assert (value <= torch.log(torch.tensor(2.0))).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", FULL)
def test_underflowing_probabilities_give_finite_values_and_gradients(kind: Divergence) -> None:
    logits, logq = two_models(2, scale=300.0)
    logp, logq = torch.log_softmax(logits.float(), 1), logq.float()
    assert (logp.exp() == 0).any() and (logq.exp() == 0).any()
    value, gradient = divergence_and_gradient(kind, logp, logp.exp(), logq, beta=0.5, k=2)
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()


def test_forms_without_a_vocabulary_are_refused() -> None:
    _, logp = two_models(0)
    with pytest.raises(ValueError, match="sampled_token"):
        divergence_and_gradient(Divergence.SAMPLED_TOKEN, logp, logp.exp(), logp, beta=0.5, k=1)
