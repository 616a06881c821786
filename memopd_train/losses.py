r"""PPO and on-policy distillation from one pass over the head, in chunks of sampled tokens.

The one idea: everything the loss needs of the vocabulary (log-prob, entropy, divergence), and its gradient with respect
to the logits, are closed forms of one row of student logits and one of teacher logits. So a chunk of rows is projected,
reduced to scalars, turned into its gradient and projected back before the next chunk is looked at: logits of more than
one chunk never exist. As the weight of every token is known beforehand, this one pass already leaves the gradients of
hidden states and head behind, and the backward pass only scales them: nothing is projected twice.

With student p, teacher q, ratio rho to the behaviour policy, importance correction c and token weights w that sum to 1:

    loss = sum_t w_t [ -c_t min(rho_t A_t, clip(rho_t) A_t) - c_e H(p_t) + c_opd o_t D(p_t, q_t) + c_ref KL(p_t ||
    ref_t) ]

Axes: A = sampled tokens, C = tokens of a chunk, E = episodes, H = hidden width, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopd_env.errors import ConfigError, MemOPDError

from .divergences import Divergence, divergence_and_gradient, reverse_kl
from .projection import Projection, chunks

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before exp, so that no ratio overflows."""


class LossInputError(MemOPDError, ValueError):
    """Inputs of a loss do not fit together; the message says which and how."""


@dataclass(frozen=True)
class LossOptions:
    """Coefficients and forms of :func:`ppo_opd_loss`.

    Attributes:
        policy_coef: Factor of the PPO term; 0 leaves pure distillation.
        clip_low: Ratios below 1 - clip_low stop pushing down (arXiv 1707.06347).
        clip_high: Ratios above 1 + clip_high stop pushing up.
        importance_cap: Upper bound of exp(old - rollout), the correction where engine and trainer differ.
        entropy_coef: Reward of entropy.
        divergence: Form of the distillation term.
        opd_coef: Its factor.
        jsd_beta: Weight of the teacher in the mixture of ``jsd``.
        top_k: Number of tokens that ``top_k`` keeps apart.
        ref_coef: Factor of KL(student || reference), full vocabulary.
        valid_vocab: Number of ids the tokenizer knows; rows of the heads beyond it get probability zero. None is the
            narrowest head given.
        chunk_size: Sampled tokens per chunk; None chooses by :data:`memopd_train.projection.CHUNK_BYTES`.
    """

    policy_coef: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float = 2.0
    entropy_coef: float = 0.0
    divergence: Divergence | str = Divergence.REVERSE_KL
    opd_coef: float = 1.0
    jsd_beta: float = 0.5
    top_k: int = 16
    ref_coef: float = 0.0
    valid_vocab: int | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.divergence not in set(Divergence):
            raise ConfigError(f"divergence={self.divergence!r}: choose one of {', '.join(Divergence)}")
        if not 0.0 < self.jsd_beta < 1.0:
            raise ConfigError(f"jsd_beta={self.jsd_beta}: must lie in (0, 1); use forward_kl or reverse_kl at the ends")
        if self.top_k < 1 or (self.chunk_size is not None and self.chunk_size < 1):
            raise ConfigError(f"top_k={self.top_k}, chunk_size={self.chunk_size}: both must be at least 1")


@dataclass(frozen=True)
class LossMetrics:
    """What happened, detached. Scalars are weighted like the loss, so micro-batches add up; ``ratio_*`` do not.

    Attributes:
        policy_loss: Clipped PPO term.
        opd: Divergence from the teacher before its coefficient, zero where gated off (``sampled_token``: log p - log
            q).
        entropy: Entropy of the student in nats.
        ref_kl: KL(student || reference).
        clip_fraction: Share of tokens whose policy gradient was clipped.
        outside_fraction: Share of ratios outside the clip range, whatever the advantage.
        approx_kl: KL(behaviour || student) by the k3 estimator, rho - 1 - log rho.
        ratio_max: Largest ratio.
        ratio_p99: 99 % quantile of the ratios.
        importance: Truncated importance weight; 1 without rollout log-probs.
        importance_capped: Share of tokens at the cap.
        policy_pull: Squared length of the PPO term's gradient with respect to all logits, after its coefficient.
        opd_pull: The same of the distillation; the two tell whether a coefficient drowns the other term.
        logprobs: (A,) student log-probs of the sampled tokens.
        entropies: (A,) student entropies.
        divergences: (A,) divergence from the teacher. The three arrays mean nothing where the weight is zero.
    """

    policy_loss: Tensor
    opd: Tensor
    entropy: Tensor
    ref_kl: Tensor
    clip_fraction: Tensor
    outside_fraction: Tensor
    approx_kl: Tensor
    ratio_max: Tensor
    ratio_p99: Tensor
    importance: Tensor
    importance_capped: Tensor
    policy_pull: Tensor
    opd_pull: Tensor
    logprobs: Tensor
    entropies: Tensor
    divergences: Tensor

    def scalars(self) -> dict[str, float]:
        """Return the scalar fields by name, for logging."""
        return {name: float(value) for name, value in vars(self).items() if value.dim() == 0}


def ppo_opd_loss(
    student: Projection,
    action_ids: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    teacher: Projection | None = None,
    reference: Projection | None = None,
    weights: Tensor | None = None,
    opd_weights: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    options: LossOptions | None = None,
) -> tuple[Tensor, LossMetrics]:
    """PPO plus on-policy distillation over the sampled tokens; the module's docstring holds the formula.

    Gradients flow to ``student`` alone. A token of weight zero takes no part, whatever its other inputs hold (also
    NaN). With no tokens the loss is a zero that can be differentiated. The loss can be back-propagated once.

    Args:
        student: Hidden states (A, H) and head of the policy being trained.
        action_ids: (A,) sampled token ids.
        old_logprobs: (A,) log-probs under the behaviour policy, as recomputed by the trainer.
        advantages: (A,), already whitened if that is wanted.
        teacher: Frozen teacher; needed unless ``divergence`` is ``none``. Its width may differ.
        reference: Frozen reference; needed if ``ref_coef`` is not 0.
        weights: (A,) weight of each token in the mean; None is 1/A. See :func:`token_weights`.
        opd_weights: (A,) factor on the distillation of each token, e.g. a gate of zeros and ones; None is 1.
        rollout_logprobs: (A,) log-probs reported by the engine, for the truncated importance correction; None is no
            correction.
        options: Coefficients and forms.

    Returns:
        The scalar loss in float32 (float64 if the hidden states are), and the metrics.

    Raises:
        LossInputError: If shapes disagree, a token id is outside the vocabulary, or a needed model is missing.
    """
    options = options or LossOptions()
    distils = options.divergence != Divergence.NONE
    if distils and teacher is None:
        raise LossInputError(f"divergence {options.divergence!s} needs a teacher: pass teacher=, or divergence='none'")
    if options.ref_coef != 0 and reference is None:
        raise LossInputError(f"ref_coef={options.ref_coef} needs a reference: pass reference=, or set it to 0")
    teacher, reference = teacher if distils else None, reference if options.ref_coef != 0 else None

    def per_token(given: Tensor | None, default: float) -> Tensor:
        dtype = torch.promote_types(student.hidden.dtype, torch.float32)
        made = torch.full((len(action_ids),), default) if given is None else given.detach()
        return made.to(student.hidden.device, dtype)

    old = per_token(old_logprobs, 0.0)
    importance = torch.ones_like(old)
    if rollout_logprobs is not None:
        importance = _bounded_exp(old - per_token(rollout_logprobs, 0.0)).clamp(max=options.importance_cap)
    tokens = _Tokens(
        action_ids=action_ids.to(student.hidden.device),
        old_logprobs=old,
        advantages=per_token(advantages, 0.0),
        weights=per_token(weights, 1.0 / max(len(action_ids), 1)),
        opd_weights=per_token(opd_weights, 1.0),
        importance=importance,
    )
    models = {"student": student, "teacher": teacher, "reference": reference}
    vocab = _check(tokens, options, {name: model for name, model in models.items() if model is not None})
    with_grad = torch.is_grad_enabled()
    loss, values = _Fused.apply(*student, tokens, teacher, reference, options, vocab, with_grad)  # type: ignore[misc]
    return loss, _metrics(tokens, values, options)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_range: float | None = 0.2,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the critic, with steps clipped to ``clip_range`` from its old values.

    Args:
        values: (A,) current values, with gradient.
        old_values: (A,) values at rollout time.
        returns: (A,) targets.
        clip_range: Largest useful change of a value; None turns clipping off.
        weights: (A,) weight of each token in the mean; None is 1/A.

    Returns:
        The scalar loss and the weighted share of clipped tokens (detached).
    """
    weights = torch.full_like(values, 1.0 / max(len(values), 1)) if weights is None else weights.to(values)
    error = torch.where(weights != 0, values - returns, 0.0).square()
    clipped = torch.zeros_like(error)
    if clip_range is not None:
        near = old_values + (values - old_values).clamp(-clip_range, clip_range)
        clipped_error = torch.where(weights != 0, near - returns, 0.0).square()
        clipped = (clipped_error > error).to(error.dtype)
        error = torch.maximum(error, clipped_error)
    return 0.5 * (weights * error).sum(), (weights * clipped).sum().detach()


def token_weights(episode_index: Tensor, *, per_episode: bool = False) -> Tensor:
    """Weights that average the loss over a whole batch; micro-batches take their slices, and the parts add up.

    Args:
        episode_index: (A,) episode of every sampled token of the *global* batch.
        per_episode: Average within each episode first, so that long episodes do not weigh more.

    Returns:
        (A,) float32 weights that sum to 1.
    """
    count = len(episode_index)
    if not per_episode:
        return torch.full((count,), 1.0 / max(count, 1), device=episode_index.device)
    _, inverse, lengths = torch.unique(episode_index, return_inverse=True, return_counts=True)
    return 1.0 / (len(lengths) * lengths[inverse].float())


class _Tokens(NamedTuple):
    """Everything known of each sampled token before its logits, (A,) each."""

    action_ids: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    opd_weights: Tensor
    importance: Tensor

    def rows(self, rows: slice) -> _Tokens:
        return _Tokens(*(x[rows] for x in self))


class _Values(NamedTuple):
    """Everything found out about each sampled token, (A,) each."""

    logprobs: Tensor
    entropies: Tensor
    divergences: Tensor
    ref_kls: Tensor
    policy_losses: Tensor
    clipped: Tensor
    policy_pulls: Tensor
    """Length of the gradient with respect to the token's logits, before its weight."""
    opd_pulls: Tensor


class _Fused(torch.autograd.Function):
    """The loss and, found in the same pass, its gradients with respect to hidden states, head and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: _Tokens,
        teacher: Projection | None,
        reference: Projection | None,
        options: LossOptions,
        vocab: int,
        with_grad: bool,
    ) -> tuple[Tensor, _Values]:
        student = Projection(hidden, weight, bias)
        loss = tokens.weights.new_zeros(())
        needs_hidden, needs_weight, needs_bias = (with_grad and needed for needed in ctx.needs_input_grad[:3])
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Summing chunk after chunk in half precision drifts, so the head's gradient grows in full precision.
        grad_weight = torch.zeros_like(weight, dtype=loss.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=loss.dtype) if needs_bias and bias is not None else None
        values = _Values(*(torch.empty_like(tokens.weights) for _ in _Values._fields))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(len(tokens.weights), vocab, hidden.device, options.chunk_size):
                chunk = tokens.rows(rows)
                part, found, grad_logits = _chunk(student, rows, chunk, teacher, reference, options, vocab)
                loss += part
                for column, piece in zip(values, found, strict=True):
                    column[rows] = piece
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_logits.to(weight.dtype) @ weight[:vocab]).to(hidden.dtype)
                if grad_weight is not None:
                    active_hidden = torch.where(chunk.weights[:, None] != 0, hidden[rows].to(loss.dtype), 0.0)
                    grad_weight[:vocab].addmm_(grad_logits.t(), active_hidden)
                if grad_bias is not None:
                    grad_bias[:vocab] += grad_logits.sum(0)
        ctx.grads = [
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        ]
        return loss, values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("this loss was already back-propagated: its gradients are handed over once, not copied")
        # Handing over the only reference lets autograd adopt the (V, H) gradient instead of copying it.
        grads, ctx.grads = ctx.grads, None
        scaled = [None if grad is None else grad.mul_(grad_outputs[0].to(grad.dtype)) for grad in grads]
        grads.clear()
        return (*scaled, *(None,) * 6)


def _chunk(
    student: Projection,
    rows: slice,
    tokens: _Tokens,
    teacher: Projection | None,
    reference: Projection | None,
    options: LossOptions,
    vocab: int,
) -> tuple[Tensor, _Values, Tensor]:
    """Loss, findings, and the (C, V) gradient with respect to the student's logits, of one chunk."""
    active = tokens.weights != 0
    logp = student.log_softmax(rows, vocab, active)
    p = logp.exp()
    chosen = tokens.action_ids[:, None]
    logprob = logp.gather(1, chosen)[:, 0]
    entropy = -(p * logp).sum(1)
    total = -options.entropy_coef * entropy
    grad_logits = torch.zeros_like(logp)

    def pull(gradient: Tensor, strength: Tensor | float) -> None:
        """Add a term's unit gradient (C, V), times its strength (C,) and the token weights."""
        grad_logits.addcmul_(gradient, _weighted(tokens.weights, strength)[:, None])

    # Distillation: as a loss of its own, or (sampled token) as a part of the advantage.
    advantages = tokens.advantages
    divergence, opd_pull = torch.zeros_like(logprob), torch.zeros_like(logprob)
    if teacher is not None:
        distils = active & (tokens.opd_weights != 0)
        strength = torch.where(distils, options.opd_coef * tokens.opd_weights, 0.0)
        logq = teacher.log_softmax(rows, vocab, distils)
        kind = Divergence(options.divergence)
        if kind is Divergence.SAMPLED_TOKEN:
            divergence = torch.where(distils, logprob - logq.gather(1, chosen)[:, 0], 0.0)
            advantages = advantages - strength * divergence
        else:
            divergence, gradient = divergence_and_gradient(kind, logp, p, logq, beta=options.jsd_beta, k=options.top_k)
            divergence = torch.where(distils, divergence, 0.0)
            total = total + strength * divergence
            opd_pull = (strength * torch.linalg.vector_norm(gradient, dim=1)).abs()
            pull(gradient, strength)
            del gradient
        del logq

    # Policy: the pessimistic one of the plain and the clipped ratio.
    log_ratio = logprob - tokens.old_logprobs
    ratio = _bounded_exp(log_ratio)
    bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    policy_loss = -tokens.importance * torch.minimum(ratio * advantages, bounded * advantages)
    clipped = bounded * advantages < ratio * advantages
    total = total + options.policy_coef * policy_loss
    moves = ~clipped & (log_ratio.abs() <= LOG_RATIO_LIMIT)
    per_advantage = torch.where(moves, -options.policy_coef * tokens.importance * ratio, 0.0)
    slope = per_advantage * advantages
    # The gradient of a log-prob is one-hot - p; what distillation added to the advantage is its share of the pull.
    length = (1.0 - 2.0 * p.gather(1, chosen)[:, 0] + torch.linalg.vector_norm(p, dim=1).square()).clamp(min=0).sqrt()
    policy_pull = (per_advantage * tokens.advantages).abs() * length
    opd_pull = opd_pull + (per_advantage * (advantages - tokens.advantages)).abs() * length
    pull(p, -slope)
    grad_logits.scatter_add_(1, chosen, _weighted(tokens.weights, slope)[:, None])

    if options.entropy_coef != 0:
        pull((logp + entropy[:, None]).mul_(p), options.entropy_coef)
    ref_kl = torch.zeros_like(logprob)
    if reference is not None:
        ref_kl, gradient = reverse_kl(logp, p, reference.log_softmax(rows, vocab, active))
        total = total + options.ref_coef * ref_kl
        pull(gradient, options.ref_coef)

    values = _Values(
        logprob, entropy, divergence, ref_kl, policy_loss, clipped.to(logprob.dtype), policy_pull, opd_pull
    )
    return _weighted(tokens.weights, total).sum(), values, grad_logits


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _weighted(weights: Tensor, x: Tensor | float) -> Tensor:
    """Weights times x, and exactly zero where the weight is: NaN * 0 would be NaN."""
    return torch.where(weights != 0, weights * x, 0.0)


def _check(tokens: _Tokens, options: LossOptions, models: dict[str, Projection]) -> int:
    """Check that everything fits, and return the number of vocabulary rows in use."""
    lengths = {name: len(x) for name, x in tokens._asdict().items()}
    lengths |= {f"{name} hidden": len(model.hidden) for name, model in models.items()}
    if len(set(lengths.values())) > 1:
        raise LossInputError(f"every input needs one entry for each sampled token, but the lengths are {lengths}")
    widths = {name: model.weight.shape[0] for name, model in models.items()}
    vocab = min(widths.values()) if options.valid_vocab is None else options.valid_vocab
    if vocab > min(widths.values()):
        raise LossInputError(f"valid_vocab={vocab} exceeds a head of {widths}: use the number of ids in the tokenizer")
    for name, model in models.items():
        if model.hidden.shape[1:] != model.weight.shape[1:]:
            raise LossInputError(
                f"the {name}'s hidden states {tuple(model.hidden.shape)} do not fit its head "
                f"{tuple(model.weight.shape)}: both end in the model's width"
            )
    if tokens.action_ids.is_floating_point() or (tokens.action_ids < 0).any():
        raise LossInputError("action_ids must be whole numbers from 0: they are the sampled token ids")
    highest = int(tokens.action_ids.max()) if len(tokens.action_ids) else 0
    if highest >= vocab:
        raise LossInputError(
            f"token {highest} was sampled, but ids end at {vocab - 1} (heads {widths}): same tokenizer?"
        )
    return vocab


def _metrics(tokens: _Tokens, values: _Values, options: LossOptions) -> LossMetrics:
    active = tokens.weights != 0
    log_ratio = torch.where(active, values.logprobs - tokens.old_logprobs, 0.0)
    ratio = _bounded_exp(log_ratio)
    outside = (ratio < 1.0 - options.clip_low) | (ratio > 1.0 + options.clip_high)
    tail = ratio[active] if active.any() else ratio.new_ones(1)

    def mean(x: Tensor) -> Tensor:
        return _weighted(tokens.weights, x).sum()

    return LossMetrics(
        policy_loss=mean(values.policy_losses),
        opd=mean(values.divergences),
        entropy=mean(values.entropies),
        ref_kl=mean(values.ref_kls),
        clip_fraction=mean(values.clipped),
        outside_fraction=mean(outside.to(ratio.dtype)),
        approx_kl=mean(ratio - 1.0 - log_ratio),
        ratio_max=tail.max(),
        ratio_p99=tail.quantile(0.99),
        importance=mean(tokens.importance),
        importance_capped=mean((tokens.importance >= options.importance_cap).to(ratio.dtype)),
        policy_pull=_weighted(tokens.weights, values.policy_pulls).square().sum(),
        opd_pull=_weighted(tokens.weights, values.opd_pulls).square().sum(),
        logprobs=values.logprobs,
        entropies=values.entropies,
        divergences=values.divergences,
    )
