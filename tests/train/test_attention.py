"""The invariants of packing on a real decoder: what a pack computes is what each call computed alone (fp32)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from memopd_agents.episode import Call, Episode
from memopd_train.alignpack import Pack, pack, sampled_tokens, unpack
from memopd_train.attention import BackendError, call_hidden_states, hidden_states, output_head, use_backend
from memopd_train.losses import LossOptions, ppo_opd_loss, token_weights, value_loss
from memopd_train.projection import Projection, token_scores

VOCAB = 7
POLICIES = ["consolidate", "full", "window"]


def config(hidden: int, **changes) -> Qwen2Config:
    # Large initial weights: attention that depends strongly on what it sees, so that a leak shows.
    return Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
        **changes,
    )


@pytest.fixture(scope="module")
def student() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config(32))


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(config(48)).requires_grad_(False)


class Critic(nn.Module):
    """A backbone of its own with one value a position."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Qwen2Model(config(32))
        self.head = nn.Linear(32, 1)


@pytest.fixture(scope="module")
def critic() -> Critic:
    torch.manual_seed(2)
    return Critic()


def play(seed: int, memory: str, tasks: int = 2, rollouts: int = 2) -> list[Episode]:
    """Episodes as a memory policy makes them, several rollouts of each task; few ids, so that actions collide too."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(low, high)).tolist()

    episodes = []
    for task in [some(2, 6) for _ in range(tasks)]:
        for _ in range(rollouts):
            turns: list[list[int]] = []
            calls = []
            for _ in range(rng.integers(1, 5)):
                kept = {"consolidate": turns[-1:], "full": turns, "window": turns[-2:]}[memory]
                action = some(1, 4)
                calls.append(Call([*task, *(token for turn in kept for token in turn)], action))
                turns.append(action + some(0, 4))
            episodes.append(Episode(calls, reward=float(rng.integers(0, 3))))
    return episodes


batches = st.builds(play, st.integers(0, 10_000), st.sampled_from(POLICIES))
layouts = st.sampled_from([{}, {"max_tokens": 48}, {"max_tokens": 48, "share_prefix": False}, {"share_prefix": False}])


def packed(model: PreTrainedModel, packs: Sequence[Pack]) -> Tensor:
    return unpack(packs, [hidden_states(model, p) for p in packs])


def logprobs(model: PreTrainedModel, hidden: Tensor, action_ids: Tensor) -> Tensor:
    return torch.log_softmax(model.get_output_embeddings()(hidden), -1).gather(1, action_ids[:, None])[:, 0]


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    used = [p for p in module.parameters() if p.requires_grad]
    return [g for g in torch.autograd.grad(loss, used, allow_unused=True) if g is not None]


def close(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a - b).detach().abs().max() <= tolerance * max(1.0, b.detach().abs().max().item())


def close_gradients(module: nn.Module, left: Tensor, right: Tensor) -> None:
    """Both losses pull every weight alike, up to 1e-4 of the strongest pull."""
    ours, theirs = gradients(module, left), gradients(module, right)
    strongest = max(g.abs().max() for g in theirs)
    assert strongest > 1e-2
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-4 * strongest


def loss_of(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    critic: Critic,
    episodes: Sequence[Episode],
    hidden_of: Callable[[PreTrainedModel], Tensor],
    part: Tensor | None = None,
) -> Tensor:
    """The whole objective with made-up, but fixed, old log-probs, advantages and returns; ``part`` is a micro-batch."""
    batch = sampled_tokens(episodes)
    part = torch.arange(len(batch.action_ids)) if part is None else part
    generator = torch.Generator().manual_seed(len(batch.action_ids))
    old, advantages, returns = torch.randn(3, len(batch.action_ids), generator=generator)
    weights = token_weights(batch.episode_index)[part]
    loss, _ = ppo_opd_loss(
        Projection(hidden_of(student), *output_head(student)),
        batch.action_ids[part],
        (old - 2.0)[part],
        advantages[part],
        teacher=Projection(hidden_of(teacher), *output_head(teacher)),
        weights=weights,
        options=LossOptions(entropy_coef=0.01, clip_low=1.0, clip_high=10.0),
    )
    values = critic.head(hidden_of(critic.backbone))[:, 0]
    return loss + value_loss(values, torch.zeros_like(values), returns[part], weights=weights)[0]


# I2: equal to per-call scoring


def check_equivalence(model: PreTrainedModel, episodes: Sequence[Episode], packs: Sequence[Pack]) -> None:
    action_ids = sampled_tokens(episodes).action_ids
    ours = logprobs(model, packed(model, packs), action_ids)
    alone = logprobs(model, call_hidden_states(model, episodes), action_ids)
    close([ours], [alone], 1e-5)
    close_gradients(model, ours.sum(), alone.sum())


@settings(max_examples=25, deadline=None)
@given(batches, layouts)
def test_student_logprobs_and_gradients_equal_per_call_scoring(student, episodes: list[Episode], layout: dict) -> None:
    check_equivalence(student, episodes, pack(episodes, **layout))


@settings(max_examples=10, deadline=None)
@given(batches, layouts)
def test_teacher_logprobs_equal_per_call_scoring(teacher, episodes: list[Episode], layout: dict) -> None:
    action_ids = sampled_tokens(episodes).action_ids
    ours = logprobs(teacher, packed(teacher, pack(episodes, **layout)), action_ids)
    close([ours], [logprobs(teacher, call_hidden_states(teacher, episodes), action_ids)], 1e-5)


@settings(max_examples=10, deadline=None)
@given(batches, layouts)
def test_critic_values_and_gradients_equal_per_call_scoring(critic, episodes: list[Episode], layout: dict) -> None:
    ours = critic.head(packed(critic.backbone, pack(episodes, **layout)))
    alone = critic.head(call_hidden_states(critic.backbone, episodes))
    close([ours], [alone], 1e-5)
    close_gradients(critic, ours.square().sum(), alone.square().sum())


# I3: no leak


def check_no_leak(model: PreTrainedModel, p: Pack) -> None:
    """Change every token that some call does not see, and look whether that call notices."""
    mask = p.attention_mask()
    with torch.no_grad():
        before = hidden_states(model, p)
        for e, c in {(int(e), int(c)) for e, c in zip(p.episode_index, p.call_index, strict=True)}:
            rows = (p.episode_index == e) & (p.call_index == c)
            outside = ~call_path(p, rows)
            assert not mask[p.action_index[rows]][:, outside].any()
            changed = dataclasses.replace(p, input_ids=torch.where(outside, (p.input_ids + 1) % VOCAB, p.input_ids))
            close([hidden_states(model, changed)[rows]], [before[rows]], 1e-5)


def call_path(p: Pack, rows: Tensor) -> Tensor:
    """Row positions of one call up to its last prediction, found by walking parents, not through the mask."""
    parent = [-1] * p.num_tokens
    stack: list[int] = []
    for position, depth in enumerate(p.position_ids.tolist()):
        del stack[depth:]
        parent[position] = stack[-1] if stack else -1
        stack.append(position)
    on_path = torch.zeros(p.num_tokens, dtype=torch.bool)
    position = int(p.action_index[rows][-1])
    while position >= 0:
        on_path[position] = True
        position = parent[position]
    return on_path


@settings(max_examples=10, deadline=None)
@given(batches, st.booleans())
def test_no_call_notices_a_change_of_what_it_did_not_see(student, episodes: list[Episode], share: bool) -> None:
    for p in pack(episodes, share_prefix=share):
        check_no_leak(student, p)


@settings(max_examples=10, deadline=None)
@given(batches)
def test_no_gradient_reaches_what_a_call_did_not_see(student, episodes: list[Episode]) -> None:
    (p,) = pack(episodes)
    rows = (p.episode_index == p.episode_index[-1]) & (p.call_index == p.call_index[-1])
    outside = ~call_path(p, rows)
    assume(outside.any())
    embedded = student.get_input_embeddings()(p.input_ids)[None].detach().requires_grad_()
    output = student.get_decoder()(
        inputs_embeds=embedded,
        position_ids=p.position_ids[None],
        attention_mask=p.attention_mask()[None, None],
        use_cache=False,
    )
    (gradient,) = torch.autograd.grad(output.last_hidden_state[0, p.action_index[rows]].sum(), embedded)
    assert (gradient[0, outside] == 0).all()
    assert gradient[0, ~outside].abs().max() > 0


# The checks themselves: a wrong structure must not pass


def branching() -> list[Episode]:
    return play(seed=3, memory="consolidate", tasks=2, rollouts=3)


MUTATIONS = {
    "plain causal mask": lambda p: dataclasses.replace(p, subtree_end=torch.full_like(p.subtree_end, p.num_tokens)),
    "one subtree too long": lambda p: dataclasses.replace(
        p, subtree_end=torch.where(p.subtree_end == p.subtree_end.min(), p.subtree_end + 1, p.subtree_end)
    ),
    "positions of the row": lambda p: dataclasses.replace(p, position_ids=torch.arange(p.num_tokens)),
    "one shifted position": lambda p: dataclasses.replace(
        p, position_ids=p.position_ids + (torch.arange(p.num_tokens) == p.action_index[-1])
    ),
    "action index one to the right": lambda p: dataclasses.replace(p, action_index=p.action_index + 1),
    "action index one to the left": lambda p: dataclasses.replace(p, action_index=p.action_index - 1),
}


def test_the_equivalence_check_passes_on_the_pack_that_is_mutated(student) -> None:
    check_equivalence(student, branching(), pack(branching()))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_equivalence_check_detects(student, mutation: str) -> None:
    (p,) = pack(branching())
    with pytest.raises(AssertionError):
        check_equivalence(student, branching(), [MUTATIONS[mutation](p)])


@pytest.mark.parametrize("mutation", ["plain causal mask", "one subtree too long"])
def test_the_leak_check_detects(student, mutation: str) -> None:
    (p,) = pack(branching())
    with pytest.raises(AssertionError):
        check_no_leak(student, MUTATIONS[mutation](p))


# I5 and I6: layout, order, split and sharing change nothing


@settings(max_examples=10, deadline=None)
@given(batches, layouts)
def test_the_whole_loss_and_its_gradients_do_not_depend_on_the_layout(
    student, teacher, critic, episodes: list[Episode], layout: dict
) -> None:
    models = nn.ModuleList([student, critic])
    alone = loss_of(student, teacher, critic, episodes, lambda m: call_hidden_states(m, episodes))
    packs = pack(episodes, **layout)
    together = loss_of(student, teacher, critic, episodes, lambda m: packed(m, packs))
    close([together], [alone], 1e-5)
    close_gradients(models, together, alone)


@settings(max_examples=10, deadline=None)
@given(batches)
def test_micro_batches_add_up_to_the_whole_batch(student, teacher, critic, episodes: list[Episode]) -> None:
    models = nn.ModuleList([student, critic])
    whole = loss_of(student, teacher, critic, episodes, lambda m: packed(m, pack(episodes)))
    parts = []
    for p in pack(episodes, max_tokens=40):
        parts.append(loss_of(student, teacher, critic, episodes, lambda m, p=p: hidden_states(m, p), p.flat_index))
    close([torch.stack(parts).sum()], [whole], 1e-5)
    close_gradients(models, torch.stack(parts).sum(), whole)


@settings(max_examples=10, deadline=None)
@given(batches, st.randoms(use_true_random=False))
def test_permuting_episodes_only_permutes_the_scores(student, episodes: list[Episode], random) -> None:
    order = random.sample(range(len(episodes)), len(episodes))
    shuffled = [episodes[i] for i in order]
    with torch.no_grad():
        before, after = packed(student, pack(episodes)), packed(student, pack(shuffled))
    owner, new_owner = sampled_tokens(episodes).episode_index, sampled_tokens(shuffled).episode_index
    for new, old in enumerate(order):
        assert torch.equal(after[new_owner == new], before[owner == old])


# I7: nothing to learn, nothing learnt


@settings(max_examples=10, deadline=None)
@given(batches, layouts)
def test_step_0_ratio_is_one_and_a_teacher_equal_to_the_student_teaches_nothing(
    student, episodes: list[Episode], layout: dict
) -> None:
    action_ids = sampled_tokens(episodes).action_ids
    packs = pack(episodes, **layout)
    with torch.no_grad():
        old = token_scores(Projection(packed(student, packs), *output_head(student)), action_ids).logprobs
    projection = Projection(packed(student, packs), *output_head(student))
    teacher = Projection(*(None if x is None else x.detach().clone() for x in projection))  # type: ignore[arg-type]
    loss, metrics = ppo_opd_loss(projection, action_ids, old, torch.zeros(len(old)), teacher=teacher)
    assert metrics.ratio_max == 1.0 and metrics.approx_kl == 0.0 and metrics.clip_fraction == 0.0
    assert metrics.divergences.abs().max() < 1e-6
    assert max(g.abs().max() for g in gradients(student, loss)) < 1e-6


def test_a_step_without_advantages_towards_an_equal_teacher_leaves_the_weights_alone(student) -> None:
    torch.manual_seed(0)
    model, twin = Qwen2ForCausalLM(config(32)), Qwen2ForCausalLM(config(32))
    twin.load_state_dict(model.state_dict())
    before = {name: p.clone() for name, p in model.named_parameters()}
    (p,) = pack([Episode([Call([1, 2], [3, 4]), Call([1, 2, 3, 4, 5], [6])], reward=1.0)])
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        teacher = Projection(hidden_states(twin, p), *output_head(twin))
        old = token_scores(teacher, p.action_ids).logprobs
    loss, _ = ppo_opd_loss(
        Projection(hidden_states(model, p), *output_head(model)), p.action_ids, old, torch.zeros(3), teacher=teacher
    )
    loss.backward()
    optimiser.step()
    assert all((before[name] - p).abs().max() < 1e-6 for name, p in model.named_parameters())


# I8: a rank without work of its own


def test_weights_of_zero_make_a_differentiable_zero_that_reaches_every_weight(student, teacher) -> None:
    (p,) = pack(play(seed=1, memory="consolidate", tasks=1, rollouts=1))
    student.zero_grad()
    loss, _ = ppo_opd_loss(
        Projection(hidden_states(student, p), *output_head(student)),
        p.action_ids,
        torch.full((p.num_actions,), torch.nan),
        torch.full((p.num_actions,), torch.nan),
        teacher=Projection(hidden_states(teacher, p), *output_head(teacher)),
        weights=torch.zeros(p.num_actions),
    )
    loss.backward()
    assert loss == 0
    assert all(w.grad is not None and (w.grad == 0).all() for w in student.parameters())
    student.zero_grad()


# Back ends


@settings(max_examples=15, deadline=None)
@given(batches, layouts)
def test_varlen_equals_per_call_scoring_values_and_gradients(student, episodes: list[Episode], layout: dict) -> None:
    packs, action_ids = pack(episodes, **layout), sampled_tokens(episodes).action_ids
    alone = call_hidden_states(student, episodes)
    use_backend(student, "varlen")
    try:
        ours = unpack(packs, [hidden_states(student, p, "varlen") for p in packs])
        close([ours, call_hidden_states(student, episodes)], [alone, alone], 1e-5)
    finally:
        use_backend(student, "sdpa")
    # Through the head: the last norm fixes the length of a hidden state, so a loss of the length alone has no gradient.
    close_gradients(student, logprobs(student, ours, action_ids).sum(), logprobs(student, alone, action_ids).sum())


def test_a_model_set_to_varlen_still_scores_padded_batches_and_generates(student) -> None:
    ids = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def outputs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            tokens = student.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
            return student(ids, attention_mask=mask).logits, tokens

    logits, tokens = outputs()
    use_backend(student, "varlen")
    try:
        ours = outputs()
    finally:
        use_backend(student, "sdpa")
    assert torch.equal(ours[0], logits) and torch.equal(ours[1], tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_scores_equal_per_call_scoring(student) -> None:
    episodes = play(seed=5, memory="consolidate", tasks=3, rollouts=4)
    (p,) = pack(episodes)
    use_backend(student, "flex")
    try:
        # Eager: the mathematics of the block mask, without minutes of compilation.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            ours = hidden_states(student, p, "flex")
    finally:
        use_backend(student, "sdpa")
    assert p.num_tokens > 128
    close([ours], [call_hidden_states(student, episodes)], 1e-5)


def test_a_back_end_that_cannot_run_here_or_does_not_fit_the_model_says_what_can(student) -> None:
    (p,) = pack(branching())
    with pytest.raises(BackendError, match=r"use_backend\(model, 'flex'\)"):
        hidden_states(student, p, "flex")
    use_backend(student, "flex")
    try:
        with pytest.raises(BackendError, match="no backward pass on a CPU: use back end 'sdpa'"):
            hidden_states(student, p, "flex")
        with pytest.raises(BackendError, match=r"use_backend\(model, 'sdpa'\)"):
            hidden_states(student, p)
    finally:
        use_backend(student, "sdpa")
    with pytest.raises(ValueError, match="warp"):
        hidden_states(student, p, "warp")


def test_layers_that_would_ignore_the_structure_are_refused() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = Qwen2ForCausalLM(config(32, **changes))
    short, long = pack([Episode([Call([1, 2], [3])], 0.0)]), pack([Episode([Call([1, 2, 3, 4], [5])], 0.0)])
    hidden_states(model, short[0])
    with pytest.raises(BackendError, match="sliding_attention"):
        hidden_states(model, long[0])


def test_a_head_that_is_not_linear_is_refused(student) -> None:
    weight, bias = output_head(student)
    assert weight.shape == (VOCAB, 32) and bias is None
    model = Qwen2ForCausalLM(config(32, final_logit_softcapping=30.0))
    with pytest.raises(BackendError, match="final_logit_softcapping"):
        output_head(model)
    with pytest.raises(BackendError, match="no output head"):
        output_head(Qwen2Model(config(32)))
