"""The fused loss: equal to naive full logits and to TRL's kernels, in values and gradients, and safe at its edges."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from memopd_env.errors import ConfigError
from memopd_train.divergences import Divergence
from memopd_train.losses import LossInputError, LossOptions, ppo_opd_loss, token_weights, value_loss
from memopd_train.projection import Projection

VOCAB = 29


class Inputs:
    """A student, a wider teacher over a padded head, a reference, and one token after another sampled from nobody."""

    def __init__(self, seed: int = 0, count: int = 17, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.student = Projection(normal(count, 8), normal(VOCAB, 8), normal(VOCAB))
        for x in self.student:
            assert x is not None
            x.requires_grad_()
        self.teacher = Projection(normal(count, 12), normal(VOCAB + 3, 12), normal(VOCAB + 3))
        self.reference = Projection(normal(count, 8), normal(VOCAB, 8))
        self.action_ids = torch.randint(0, VOCAB - 2, (count,), generator=generator)
        logp = torch.log_softmax(logits(self.student, VOCAB), 1).detach()
        chosen = logp.gather(1, self.action_ids[:, None])[:, 0]
        # Ratios on both sides of the clip range, so that every branch of the policy loss is taken.
        self.old_logprobs = chosen + 0.3 * normal(count)
        self.rollout_logprobs = self.old_logprobs + 0.5 * normal(count)
        self.advantages = normal(count)
        self.weights = torch.rand(count, generator=generator, dtype=dtype) / count
        self.opd_weights = torch.rand(count, generator=generator, dtype=dtype)

    def call(self, options: LossOptions, **changes: Any):
        arguments = {
            "teacher": self.teacher,
            "reference": self.reference,
            "weights": self.weights,
            "opd_weights": self.opd_weights,
            "rollout_logprobs": self.rollout_logprobs,
        }
        return ppo_opd_loss(
            changes.pop("student", self.student),
            changes.pop("action_ids", self.action_ids),
            changes.pop("old_logprobs", self.old_logprobs),
            changes.pop("advantages", self.advantages),
            **(arguments | changes),
            options=options,
        )

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, [x for x in self.student if x is not None])


def logits(p: Projection, vocab: int) -> Tensor:
    product = p.hidden @ p.weight[:vocab].t()
    return product if p.bias is None else product + p.bias[:vocab]


def naive(x: Inputs, o: LossOptions) -> Tensor:
    """The formula on full logits, left to autograd."""
    vocab = VOCAB if o.valid_vocab is None else o.valid_vocab
    logp = torch.log_softmax(logits(x.student, vocab), 1)
    logq = torch.log_softmax(logits(x.teacher, vocab), 1)
    logr = torch.log_softmax(logits(x.reference, vocab), 1)
    p, q = logp.exp(), logq.exp()
    chosen, chosen_q = (y.gather(1, x.action_ids[:, None])[:, 0] for y in (logp, logq))
    advantages = x.advantages
    match o.divergence:
        case Divergence.REVERSE_KL:
            opd = (p * (logp - logq)).sum(1)
        case Divergence.FORWARD_KL:
            opd = (q * (logq - logp)).sum(1)
        case Divergence.JSD:
            logm = ((1 - o.jsd_beta) * p + o.jsd_beta * q).log()
            opd = o.jsd_beta * (q * (logq - logm)).sum(1) + (1 - o.jsd_beta) * (p * (logp - logm)).sum(1)
        case Divergence.TOP_K:
            top = q.topk(o.top_k, 1).indices
            kept_p, kept_q = p.gather(1, top), q.gather(1, top)
            tail_p, tail_q = 1 - kept_p.sum(1), 1 - kept_q.sum(1)
            opd = (kept_p * (kept_p / kept_q).log()).sum(1) + tail_p * (tail_p / tail_q).log()
        case _:
            opd = torch.zeros_like(chosen)
    if o.divergence == Divergence.SAMPLED_TOKEN:
        advantages = advantages + o.opd_coef * x.opd_weights * (chosen_q - chosen).detach()
    ratio = (chosen - x.old_logprobs).exp()
    importance = (x.old_logprobs - x.rollout_logprobs).exp().clamp(max=o.importance_cap)
    policy = -importance * torch.minimum(ratio * advantages, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * advantages)
    entropy = -(p * logp).sum(1)
    ref_kl = (p * (logp - logr)).sum(1)
    terms = o.policy_coef * policy - o.entropy_coef * entropy + o.opd_coef * x.opd_weights * opd + o.ref_coef * ref_kl
    return (x.weights * terms).sum()


def all_terms(divergence: str, **changes: Any) -> LossOptions:
    options = LossOptions(
        divergence=divergence, opd_coef=0.7, entropy_coef=0.03, ref_coef=0.2, policy_coef=0.9, top_k=5
    )
    return dataclasses.replace(options, jsd_beta=0.3, clip_low=0.1, clip_high=0.25, importance_cap=1.2, **changes)


@pytest.mark.parametrize("chunk_size", [1, 5, None])
@pytest.mark.parametrize("valid_vocab", [VOCAB, VOCAB - 2])
@pytest.mark.parametrize("divergence", Divergence)
def test_loss_and_gradients_equal_naive_full_logits(divergence: str, valid_vocab: int, chunk_size: int | None) -> None:
    x, options = Inputs(), all_terms(divergence, valid_vocab=valid_vocab, chunk_size=chunk_size)
    loss, _ = x.call(options)
    expected = naive(x, options)
    assert torch.allclose(loss, expected, atol=1e-5)
    for ours, theirs in zip(x.gradients(loss), x.gradients(expected), strict=True):
        assert (ours - theirs).abs().max() < 1e-5
        assert theirs.abs().max() > 1e-3


@pytest.mark.parametrize("divergence", [d for d in Divergence if d is not Divergence.SAMPLED_TOKEN])
def test_gradients_equal_finite_differences_in_double_precision(divergence: str) -> None:
    x, options = Inputs(seed=4, count=3, dtype=torch.float64), all_terms(divergence, chunk_size=2)
    gradients = x.gradients(x.call(options)[0])
    step = 1e-6
    for tensor, gradient in zip(x.student, gradients, strict=True):
        assert tensor is not None
        flat = tensor.data.view(-1)
        numeric = torch.empty_like(flat)
        for i in range(len(flat)):
            sides = []
            for sign in (1, -1):
                flat[i] += sign * step
                sides.append(x.call(options)[0].item())
                flat[i] -= sign * step
            numeric[i] = (sides[0] - sides[1]) / (2 * step)
        assert torch.allclose(gradient.view(-1), numeric, atol=1e-7)


@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0.0), ("jsd", 0.3), ("reverse_kl", 1.0)])
def test_distillation_equals_the_kernel_of_trl(divergence: str, beta: float) -> None:
    x = Inputs()
    teacher = Projection(x.teacher.hidden, x.teacher.weight[:VOCAB], x.teacher.bias[:VOCAB])  # type: ignore[index]
    per_token, entropy = ChunkedDivergenceFunction.apply(*x.student, *teacher, beta)
    expected = x.gradients((x.weights * x.opd_weights * per_token).sum())
    options = LossOptions(divergence=divergence, policy_coef=0.0, jsd_beta=beta if divergence == "jsd" else 0.5)
    loss, metrics = x.call(options)
    assert torch.allclose(metrics.divergences, per_token, atol=1e-5)
    assert torch.allclose(metrics.entropies, entropy, atol=1e-5)
    for ours, theirs in zip(x.gradients(loss), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_the_policy_term_equals_the_chunked_log_probs_of_trl() -> None:
    x = Inputs()
    logprobs, *_ = ChunkedLogProbFunction.apply(*x.student, x.action_ids, 1.0, 8)
    ratio = (logprobs - x.old_logprobs).exp()
    surrogate = torch.minimum(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages)
    expected = x.gradients(-(x.weights * surrogate).sum())
    loss, metrics = x.call(LossOptions(divergence="none"), rollout_logprobs=None)
    assert torch.allclose(metrics.logprobs, logprobs, atol=1e-5)
    for ours, theirs in zip(x.gradients(loss), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


GOLDEN = {
    "reverse_kl": 2.583791746614,
    "forward_kl": 2.557443099152,
    "jsd": 2.303207511601,
    "top_k": 2.477809797445,
    "sampled_token": 2.657104414653,
    "none": 2.225819870980,
}


@pytest.mark.parametrize("divergence", Divergence)
def test_the_loss_is_what_it_was_in_the_first_release(divergence: str) -> None:
    """Made of arithmetic alone, without random numbers, so that only a change of the loss can change it."""
    grid = torch.arange(4 * 3, dtype=torch.float64).view(4, 3)
    student = Projection((grid * 0.7).sin(), (torch.arange(15.0).double() * 1.3).cos().view(5, 3))
    teacher = Projection((grid * 0.4).cos(), (torch.arange(18.0).double() * 0.9).sin().view(6, 3))
    loss, _ = ppo_opd_loss(
        student,
        torch.tensor([0, 3, 4, 1]),
        torch.tensor([-1.5, -1.9, -1.0, -2.2]),
        torch.tensor([1.0, -0.5, 0.25, -2.0]),
        teacher=teacher,
        options=LossOptions(divergence=divergence, opd_coef=0.5, entropy_coef=0.01, top_k=2),
    )
    assert float(loss) == pytest.approx(GOLDEN[divergence], abs=1e-9)


def other_teacher(x: Inputs) -> Projection:
    return x.teacher._replace(hidden=x.teacher.hidden.flip(0))


@pytest.mark.parametrize("divergence", [d for d in Divergence if d is not Divergence.NONE])
def test_two_teachers_give_two_gradients(divergence: str) -> None:
    x, options = Inputs(), LossOptions(divergence=divergence, clip_low=0.9, clip_high=9.0)
    one, other = (x.gradients(x.call(options, teacher=t)[0]) for t in (x.teacher, other_teacher(x)))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(one, other, strict=True))


def test_back_propagating_the_sampled_token_instead_would_lose_the_teacher() -> None:
    x = Inputs()

    def k1(teacher: Projection) -> Tensor:
        logp, logq = (torch.log_softmax(logits(p, VOCAB), 1) for p in (x.student, teacher))
        return (logp - logq).gather(1, x.action_ids[:, None]).sum()

    one, other = (x.gradients(k1(t)) for t in (x.teacher, other_teacher(x)))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("divergence", Divergence)
def test_a_teacher_equal_to_the_student_and_no_advantage_give_no_gradient(divergence: str) -> None:
    x = Inputs()
    twin = Projection(*(None if y is None else y.detach().clone() for y in x.student))  # type: ignore[arg-type]
    options = LossOptions(divergence=divergence)
    loss, metrics = x.call(options, teacher=twin, advantages=torch.zeros(17))
    assert metrics.divergences.abs().max() < 1e-6
    assert all(g.abs().max() < 1e-6 for g in x.gradients(loss))


@pytest.mark.parametrize("divergence", [d for d in Divergence if d is not Divergence.NONE])
def test_the_pulls_are_the_lengths_of_the_two_gradients_at_the_logits(divergence: str) -> None:
    x = Inputs()
    hidden = logits(x.student, VOCAB).detach().requires_grad_()  # under a head of ones these are the logits
    x.student = Projection(hidden, torch.eye(VOCAB, requires_grad=True), None)
    wide = {"clip_low": 0.99, "clip_high": 100.0}  # so that the advantage cannot change which token is clipped
    both = dataclasses.replace(all_terms(divergence), entropy_coef=0.0, ref_coef=0.0, **wide)
    with_both, policy = (x.gradients(naive(x, o))[0] for o in (both, dataclasses.replace(both, opd_coef=0.0)))
    _, metrics = x.call(both)
    assert float(metrics.policy_pull) == pytest.approx(float(policy.square().sum()), rel=1e-4)
    assert float(metrics.opd_pull) == pytest.approx(float((with_both - policy).square().sum()), rel=1e-4)
    assert float(metrics.policy_pull) > 0 < float(metrics.opd_pull)


def test_a_clipped_token_gets_no_policy_gradient_and_an_unclipped_one_does() -> None:
    x, options = Inputs(count=4), LossOptions(divergence="none")
    logp = torch.log_softmax(logits(x.student, VOCAB), 1).detach().gather(1, x.action_ids[:, None])[:, 0]
    old = logp - torch.tensor([1.5, 0.5, 1.5, 0.5]).log()  # ratios
    gains = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, metrics = x.call(options, old_logprobs=old, advantages=gains)
    moved = x.gradients(loss)[0].abs().sum(1) > 0
    assert moved.tolist() == [False, True, True, False]
    assert float(metrics.clip_fraction) == pytest.approx(float(x.weights[0] + x.weights[3]))
    assert float(metrics.outside_fraction) == pytest.approx(float(x.weights.sum()))
    assert float(metrics.ratio_max) == pytest.approx(1.5, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(Divergence)), st.integers(0, 17), st.booleans())
def test_micro_batches_add_up_to_the_batch(divergence: str, cut: int, per_episode: bool) -> None:
    x, options = Inputs(), all_terms(divergence)
    weights = token_weights(torch.arange(17) // 5, per_episode=per_episode)
    whole, whole_metrics = x.call(options, weights=weights)
    expected = x.gradients(whole)
    losses, metrics = [], []
    for part in (slice(0, cut), slice(cut, 17)):
        loss, m = ppo_opd_loss(
            x.student._replace(hidden=x.student.hidden[part]),
            x.action_ids[part],
            x.old_logprobs[part],
            x.advantages[part],
            teacher=x.teacher._replace(hidden=x.teacher.hidden[part]),
            reference=x.reference._replace(hidden=x.reference.hidden[part]),
            weights=weights[part],
            opd_weights=x.opd_weights[part],
            rollout_logprobs=x.rollout_logprobs[part],
            options=options,
        )
        losses.append(loss)
        metrics.append(m.scalars())
    assert torch.allclose(losses[0] + losses[1], whole, atol=1e-6)
    for ours, theirs in zip(x.gradients(losses[0] + losses[1]), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-6
    for name, value in whole_metrics.scalars().items():
        if not name.startswith("ratio_"):
            assert metrics[0][name] + metrics[1][name] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("divergence", Divergence)
def test_nothing_that_a_weightless_token_holds_can_spread(divergence: str) -> None:
    x, options = Inputs(), all_terms(divergence)
    weights = x.weights.clone()
    weights[3] = 0.0
    clean, clean_metrics = x.call(options, weights=weights)
    expected = x.gradients(clean)
    with torch.no_grad():
        for row in (x.student.hidden, x.teacher.hidden, x.reference.hidden, x.advantages, x.opd_weights):
            row[3] = torch.nan
        x.old_logprobs[3], x.rollout_logprobs[3] = -torch.inf, torch.nan
    loss, metrics = x.call(options, weights=weights)
    assert torch.equal(loss, clean)
    assert metrics.scalars() == clean_metrics.scalars()
    assert all(torch.equal(a, b) for a, b in zip(x.gradients(loss), expected, strict=True))


@pytest.mark.parametrize("divergence", Divergence)
def test_a_token_gated_off_does_not_look_at_its_teacher(divergence: str) -> None:
    x, options = Inputs(), LossOptions(divergence=divergence)
    gate = torch.ones(17)
    gate[5] = 0.0
    clean, _ = x.call(options, opd_weights=gate)
    expected = x.gradients(clean)
    with torch.no_grad():
        x.teacher.hidden[5] = torch.nan
    loss, metrics = x.call(options, opd_weights=gate)
    assert torch.equal(loss, clean) and metrics.divergences[5] == 0
    assert all(torch.equal(a, b) for a, b in zip(x.gradients(loss), expected, strict=True))


def test_no_tokens_give_a_differentiable_zero() -> None:
    x = Inputs(count=0)
    loss, metrics = x.call(all_terms("reverse_kl"))
    assert loss == 0 and len(metrics.logprobs) == 0
    assert all(torch.isfinite(torch.tensor(list(metrics.scalars().values()))))
    assert all((g == 0).all() for g in x.gradients(loss))


def test_extreme_ratios_stay_finite() -> None:
    x = Inputs()
    old = torch.where(torch.arange(17) % 2 == 0, -1e4, 0.0)
    loss, _ = x.call(LossOptions(divergence="none"), old_logprobs=old, rollout_logprobs=None)
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in x.gradients(loss))


def test_a_frozen_head_or_no_grad_costs_no_head_gradient() -> None:
    x, options = Inputs(), all_terms("reverse_kl")
    full = x.gradients(x.call(options)[0])
    frozen = Projection(x.student.hidden, *(y.detach() for y in x.student[1:] if y is not None))
    loss, _ = x.call(options, student=frozen)
    assert torch.equal(torch.autograd.grad(loss, x.student.hidden)[0], full[0])
    with torch.no_grad():
        scored, _ = x.call(options)
    assert not scored.requires_grad and torch.equal(scored, loss)


def test_the_gradient_is_handed_over_once_and_scaled_by_what_comes_from_above() -> None:
    x, options = Inputs(), all_terms("reverse_kl")
    once = x.gradients(x.call(options)[0])
    loss, _ = x.call(options)
    (3.0 * loss).backward(retain_graph=True)
    assert x.student.hidden.grad is not None
    assert torch.allclose(x.student.hidden.grad, 3.0 * once[0])
    with pytest.raises(RuntimeError, match="already back-propagated"):
        loss.backward()


def test_half_precision_models_keep_their_types_and_come_close() -> None:
    x, options = Inputs(), all_terms("reverse_kl")
    half = Projection(*(y.detach().bfloat16().requires_grad_() for y in x.student if y is not None))
    exact = Projection(*(y.detach().float().requires_grad_() for y in half if y is not None))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = x.call(options, student=half)
    expected, _ = x.call(options, student=exact)
    assert loss.dtype == torch.float32 and torch.allclose(loss, expected, atol=1e-5)
    loss.backward()
    expected.backward()
    for a, b in zip(half, exact, strict=True):
        assert a is not None and b is not None and a.grad is not None and b.grad is not None
        assert a.grad.dtype == torch.bfloat16
        assert (a.grad.float() - b.grad).abs().max() < 0.01 * b.grad.abs().max()


def test_inputs_that_do_not_fit_are_errors_that_say_which() -> None:
    x = Inputs()
    with pytest.raises(LossInputError, match="needs a teacher"):
        x.call(LossOptions(), teacher=None)
    with pytest.raises(LossInputError, match="needs a reference"):
        x.call(LossOptions(ref_coef=0.1), reference=None)
    with pytest.raises(LossInputError, match="'advantages': 16"):
        x.call(LossOptions(), advantages=x.advantages[:-1])
    with pytest.raises(LossInputError, match="valid_vocab=30 exceeds"):
        x.call(LossOptions(valid_vocab=VOCAB + 1))
    with pytest.raises(LossInputError, match="was sampled, but ids end at 4"):
        x.call(LossOptions(valid_vocab=5))
    for wrong in (x.action_ids - VOCAB, x.action_ids.float()):
        with pytest.raises(LossInputError, match="whole numbers from 0"):
            x.call(LossOptions(), action_ids=wrong)
    with pytest.raises(LossInputError, match="the teacher's hidden states"):
        x.call(LossOptions(), teacher=Projection(x.teacher.hidden[:, 1:], x.teacher.weight))


def test_options_that_make_no_sense_are_errors() -> None:
    for wrong in ({"divergence": "kl"}, {"jsd_beta": 1.0}, {"top_k": 0}, {"chunk_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LossOptions(**wrong)  # type: ignore[arg-type]


def test_weights_average_over_tokens_or_over_episodes() -> None:
    owner = torch.tensor([4, 4, 4, 9])
    assert token_weights(owner).tolist() == [0.25] * 4
    assert torch.allclose(token_weights(owner, per_episode=True), torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    assert len(token_weights(owner[:0])) == len(token_weights(owner[:0], per_episode=True)) == 0


def test_the_value_loss_is_the_larger_of_plain_and_clipped_error() -> None:
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.tensor([2.0, 0.0, 0.0]), clip_range=0.2)
    # Far from its target by clipping, not yet clipped by the maximum, inside the range.
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 1.0**2 + 0.1**2) / 3)
    assert float(clipped) == pytest.approx(1 / 3)
    (gradient,) = torch.autograd.grad(loss, values)
    assert torch.allclose(gradient, torch.tensor([0.0, 1.0, 0.1]) / 3)


def test_the_value_loss_without_clipping_is_half_the_squared_error_and_ignores_weightless_tokens() -> None:
    values = torch.tensor([3.0, torch.nan], requires_grad=True)
    weights = torch.tensor([1.0, 0.0])
    for clip_range in (None, 10.0):
        loss, clipped = value_loss(values, torch.zeros(2), torch.ones(2), clip_range=clip_range, weights=weights)
        assert loss.item() == 2.0 and float(clipped) == 0.0
        assert torch.autograd.grad(loss, values)[0].tolist() == [2.0, 0.0]
    empty = torch.zeros(0, requires_grad=True)
    loss, _ = value_loss(empty, empty.detach(), empty.detach())
    loss.backward()
    assert loss == 0
