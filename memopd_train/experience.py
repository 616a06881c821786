"""From played episodes to what the update needs: everything known about each sampled token before learning starts.

All of it is indexed by one axis, the sampled tokens of the iteration in the order episode, call, token. Packs are built
once per iteration, one set per mini-batch, and point into that axis (``flat_index``); old log-probs, values and the
frozen models' hidden states are computed in those very packs, so the first update sees a ratio of exactly 1, and the
frozen models are asked once however many epochs follow.

Axes: A = sampled tokens of the iteration on this rank, E = episodes, H = hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memopd_agents.episode import Call, Episode
from memopd_train.advantages import gae, terminal_rewards, whiten
from memopd_train.alignpack import Pack, pack, sampled_tokens, unpack
from memopd_train.attention import CPU_MAX_TOKENS, Backend, hidden_states
from memopd_train.config import MemOPDConfig
from memopd_train.errors import EpisodeError
from memopd_train.losses import token_weights
from memopd_train.models import ActorCritic, project
from memopd_train.projection import token_scores

GPU_MAX_TOKENS = 8192
"""Unique tokens of a pack on a GPU, when ``max_pack_tokens`` is 0."""
GlobalSum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""


@dataclass(frozen=True)
class Layout:
    """How the episodes of an iteration are cut into mini-batches and packs.

    Attributes:
        mini_batches: For each mini-batch its packs; their ``flat_index`` and ``episode_index`` count over the
            iteration.
        action_ids: (A,) sampled tokens.
        episode_index: (A,) their episodes.
        rollout_logprobs: (A,) log-probs the engine reported, or None.
        weights: (A,) weight of each token in the mean over its mini-batch, all ranks together, times the number of
            ranks (gradients are averaged over ranks).
    """

    mini_batches: list[list[Pack]]
    action_ids: Tensor
    episode_index: Tensor
    rollout_logprobs: Tensor | None
    weights: Tensor

    @property
    def packs(self) -> list[Pack]:
        """All packs, mini-batch by mini-batch."""
        return [pack for packs in self.mini_batches for pack in packs]


@dataclass(frozen=True)
class Experience:
    """What is known of each sampled token, (A,) or (A, H) each, before the first update.

    Attributes:
        layout: Mini-batches and packs.
        old_logprobs: Log-probs under the student that played, recomputed in the packs.
        old_values: The critic's values.
        advantages: Whitened if asked for.
        returns: Targets of the critic.
        opd_weights: Gate of the distillation, zeros and ones.
        teacher_hidden: The teacher's hidden states, or None.
        reference_hidden: The reference's, or None.
    """

    layout: Layout
    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    opd_weights: Tensor
    teacher_hidden: Tensor | None
    reference_hidden: Tensor | None

    def exact_state(self) -> dict[str, Tensor]:
        """What depends on weights that no longer exist once learning has begun; the rest can be computed again."""
        names = ("old_logprobs", "old_values", "advantages", "returns")
        return {name: getattr(self, name).contiguous() for name in names}


def lay_out(
    episodes: Sequence[Episode],
    args: MemOPDConfig,
    *,
    mini_batches: int,
    seed: int,
    device: torch.device,
    global_sum: GlobalSum = lambda x: x,
    ranks: int = 1,
) -> Layout:
    """Cut episodes into mini-batches and packs.

    Rollouts of one task stay in one mini-batch, where they share the task's computation.

    Args:
        episodes: Of this rank.
        args: Options.
        mini_batches: How many; each gets a share of every rank's episodes.
        seed: Of the assignment of episodes to mini-batches.
        device: Where tensors go.
        global_sum: Sum over ranks.
        ranks: Number of ranks.

    Raises:
        EpisodeError: If an episode holds no sampled token.
        PackError: If a call is longer than ``args.max_pack_tokens``.
    """
    for episode in episodes:
        if not any(call.action_ids for call in episode.calls):
            raise EpisodeError(
                f"the episode of task {episode.task_id!r} has no sampled token: nothing can be learned from it"
            )
    max_tokens = _max_tokens(episodes, args, device)
    tokens = sampled_tokens(episodes)
    starts = torch.searchsorted(tokens.episode_index, torch.arange(len(episodes) + 1)).tolist()
    made: list[list[Pack]] = []
    weights = torch.zeros(len(tokens.action_ids))
    for members in _assign(len(episodes), args.rollouts_per_task, mini_batches, seed):
        chosen = torch.tensor(members, dtype=torch.int64)
        where = torch.cat([torch.arange(starts[e], starts[e + 1]) for e in members] or [chosen])
        packs = pack([episodes[e] for e in members], max_tokens=max_tokens, share_prefix=args.share_prefix)
        made.append(
            [
                replace(p, flat_index=where[p.flat_index], episode_index=chosen[p.episode_index]).to(device)
                for p in packs
            ]
        )
        per_episode = args.loss_average == "episode"
        count = torch.tensor(float(len(members) if per_episode else len(where)), device=device)
        share = ranks * float(count / global_sum(count.clone()).clamp(min=1.0))
        weights[where] = token_weights(tokens.episode_index[where], per_episode=per_episode) * share
    return Layout(
        mini_batches=made,
        action_ids=tokens.action_ids.to(device),
        episode_index=tokens.episode_index.to(device),
        rollout_logprobs=None if tokens.logprobs is None else tokens.logprobs.to(device),
        weights=weights.to(device),
    )


def nothing_to_learn(device: torch.device) -> Pack:
    """A pack without sampled tokens: its loss is a zero that can be differentiated."""
    one, none = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return Pack(one, one, one + 1, none, none, none, none)


def _max_tokens(episodes: Sequence[Episode], args: MemOPDConfig, device: torch.device) -> int:
    if args.max_pack_tokens:
        return args.max_pack_tokens
    if device.type != "cpu":
        return GPU_MAX_TOKENS
    return max(CPU_MAX_TOKENS, _longest_call(episodes))


def _longest_call(episodes: Sequence[Episode]) -> int:
    """Most tokens of one call, prompt and action."""
    return max(len(call.prompt_ids) + len(call.action_ids) for episode in episodes for call in episode.calls)


def _assign(episodes: int, group: int, mini_batches: int, seed: int) -> list[list[int]]:
    """Deal groups of consecutive episodes out to mini-batches, at random and evenly; each keeps its order."""
    groups = [list(range(start, min(start + group, episodes))) for start in range(0, episodes, group)]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    return [sorted(e for at in order[batch::mini_batches] for e in groups[at]) for batch in range(mini_batches)]


@torch.no_grad()
def score_policy(model: ActorCritic, layout: Layout, valid_vocab: int) -> tuple[Tensor, Tensor]:
    """Return old log-probs and values, (A,) each, computed in the packs that will be learned from."""
    logprobs, values = [], []
    for p in layout.packs:
        hidden, value = model(p)
        logprobs.append(token_scores(project(model.actor, hidden), p.action_ids, valid_vocab=valid_vocab).logprobs)
        values.append(value)
    return unpack(layout.packs, logprobs), unpack(layout.packs, values)


@torch.no_grad()
def score_frozen(model: PreTrainedModel, packs: Sequence[Pack], backend: Backend | str) -> Tensor:
    """Return a frozen model's hidden states at the sampled tokens, (A, H), each pack asked once."""
    return unpack(packs, [hidden_states(model, p, backend) for p in packs])


def estimate(episodes: Sequence[Episode], layout: Layout, values: Tensor, args: MemOPDConfig) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, (A,) each: GAE, with the reward on the last sampled token of an episode."""
    rewards = torch.tensor([episode.reward for episode in episodes], device=values.device)
    rewards_A = terminal_rewards(rewards, layout.episode_index)
    advantages, returns = gae(rewards_A, values, layout.episode_index, args.gamma, args.lam)
    return (whiten(advantages) if args.whiten_advantages else advantages), returns


def distillation_gate(episodes: Sequence[Episode], layout: Layout, args: MemOPDConfig) -> Tensor:
    """Return (A,) ones where the teacher is followed: everywhere, or on the tokens of failed episodes (DGPO)."""
    failed = torch.tensor([float(episode.reward < args.failed_below) for episode in episodes])
    gate = failed if args.opd_gate == "failed_only" else torch.ones(len(episodes))
    return gate.to(layout.episode_index.device)[layout.episode_index]


def gather(
    episodes: Sequence[Episode],
    layout: Layout,
    args: MemOPDConfig,
    model: ActorCritic,
    valid_vocab: int,
    *,
    teacher: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    known: Mapping[str, Tensor] | None = None,
) -> Experience:
    """Ask student, critic and frozen models once for every sampled token, and estimate advantages.

    Args:
        episodes: What was played.
        layout: How it is packed.
        args: Options.
        model: Student and critic as they were when the episodes were played.
        valid_vocab: Number of token ids.
        teacher: The teacher, or None.
        reference: The reference, or None.
        known: `Experience.exact_state` of a checkpoint, when the student has already moved on.
    """
    if known is None:
        old_logprobs, old_values = score_policy(model, layout, valid_vocab)
        advantages, returns = estimate(episodes, layout, old_values, args)
        known = {
            "old_logprobs": old_logprobs,
            "old_values": old_values,
            "advantages": advantages,
            "returns": returns,
        }
    packs = layout.packs
    teacher_hidden = reference_hidden = None
    if teacher is not None and args.needs_teacher:
        seen = packs
        if args.teacher_state == "persistent_history":
            history = persistent_history(episodes)
            most = max(_max_tokens(history, args, teacher.device), _longest_call(history))
            seen = [p.to(teacher.device) for p in pack(history, max_tokens=most, share_prefix=args.share_prefix)]
        teacher_hidden = score_frozen(teacher, seen, model.backend)
    if reference is not None and args.reference_kl_coef > 0:
        reference_hidden = score_frozen(reference, packs, model.backend)
    return Experience(
        layout=layout,
        **known,
        opd_weights=distillation_gate(episodes, layout, args),
        teacher_hidden=teacher_hidden,
        reference_hidden=reference_hidden,
    )


def persistent_history(episodes: Sequence[Episode]) -> list[Episode]:
    """Rewrite each call's prompt as the whole history: the task, then every earlier action and the reply to it.

    This is the teacher state of the paper's comparison (arXiv 2608.07068): the teacher conditions on what the student
    could no longer see. The actions, and so the sampled tokens, stay as they are.

    Raises:
        EpisodeError: If calls do not say where their segments lie, as in episodes built by hand.
    """
    return [replace(episode, calls=_with_history(episode, number)) for number, episode in enumerate(episodes)]


def _with_history(episode: Episode, number: int) -> list[Call]:
    history: list[int] = []
    calls: list[Call] = []
    for turn, call in enumerate(episode.calls):
        where = f"episode {number} (task {episode.task_id!r}), call {turn}"
        if not call.segments:
            raise EpisodeError(
                f"{where} has no segments, which teacher_state='persistent_history' needs; play it with rollout()"
            )
        if turn == 0:
            history = list(call.prompt_ids)
        else:
            replies = [span for span in call.segments if span.kind == "information" and span.turn == turn - 1]
            history = [*history, *episode.calls[turn - 1].action_ids]
            for span in replies:
                history += call.prompt_ids[span.start : span.end]
        calls.append(replace(call, prompt_ids=list(history)))
    return calls
