"""What is known of each sampled token before learning: every one once, weighted rightly, in its own state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_agents.episode import Call, Episode, SegmentSpan
from memopd_train.config import MemOPDConfig
from memopd_train.errors import EpisodeError
from memopd_train.experience import distillation_gate, estimate, gather, lay_out, persistent_history
from memopd_train.models import ActorCritic, Critic

CPU = torch.device("cpu")
IDS = st.lists(st.integers(3, 60), min_size=1, max_size=6)
EPISODES = st.lists(
    st.builds(
        Episode,
        calls=st.lists(st.builds(Call, prompt_ids=IDS, action_ids=IDS), min_size=1, max_size=3),
        reward=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=7,
)


def config(**options):
    return MemOPDConfig(**{"use_cpu": True, "episodes_per_iteration": 8, "mini_batch_episodes": 8, **options})


@settings(max_examples=40, deadline=None)
@given(EPISODES, st.integers(1, 4), st.integers(0, 5), st.sampled_from(["token", "episode"]))
def test_every_sampled_token_is_in_one_pack_of_one_mini_batch(episodes, mini_batches, seed, average):
    args = config(loss_average=average, max_pack_tokens=24)
    layout = lay_out(episodes, args, mini_batches=mini_batches, seed=seed, device=CPU)
    assert len(layout.mini_batches) == mini_batches
    where = torch.cat([p.flat_index for p in layout.packs])
    assert torch.equal(where.sort().values, torch.arange(len(layout.action_ids)))
    for packs in layout.mini_batches:
        for p in packs:
            assert torch.equal(p.action_ids, layout.action_ids[p.flat_index])
            assert torch.equal(p.episode_index, layout.episode_index[p.flat_index])
        if packs:
            assert float(sum(layout.weights[p.flat_index].sum() for p in packs)) == pytest.approx(1.0, abs=1e-5)


def test_an_average_per_episode_weighs_long_episodes_no_more():
    short, long = Episode([Call([3], [4])], 0.0), Episode([Call([3], [4, 5, 6])], 0.0)
    layout = lay_out([short, long], config(loss_average="episode"), mini_batches=1, seed=0, device=CPU)
    assert layout.weights.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    layout = lay_out([short, long], config(loss_average="token"), mini_batches=1, seed=0, device=CPU)
    assert layout.weights.tolist() == pytest.approx([1 / 4] * 4)


def test_ranks_together_average_over_all_their_tokens():
    # Two ranks: this one has 1 token, the other 3. Gradients are averaged over ranks, so each token must weigh 2/4.
    mine = lay_out(
        [Episode([Call([3], [4])], 0.0)],
        config(),
        mini_batches=1,
        seed=0,
        device=CPU,
        global_sum=lambda count: count + 3,
        ranks=2,
    )
    assert mine.weights.tolist() == pytest.approx([2 / 4])


def test_rollouts_of_one_task_share_a_mini_batch():
    episodes = [Episode([Call([number // 2], [4])], 0.0) for number in range(8)]
    layout = lay_out(episodes, config(rollouts_per_task=2), mini_batches=2, seed=1, device=CPU)
    for packs in layout.mini_batches:
        members = sorted({int(e) for p in packs for e in p.episode_index})
        assert members[::2] == [member - 1 for member in members[1::2]]


def test_the_reward_lands_on_the_last_token_and_is_passed_back():
    episodes = [Episode([Call([3], [4, 5]), Call([3], [6])], 2.0), Episode([Call([3], [7])], 0.0)]
    layout = lay_out(episodes, config(), mini_batches=1, seed=0, device=CPU)
    values = torch.zeros(4)
    advantages, returns = estimate(episodes, layout, values, config(whiten_advantages=False, gamma=0.5, lam=1.0))
    assert returns.tolist() == [0.5, 1.0, 2.0, 0.0]
    assert torch.equal(advantages, returns)


def test_the_gate_opens_where_it_should():
    episodes = [Episode([Call([3], [4, 5])], 1.0), Episode([Call([3], [6])], 0.0)]
    layout = lay_out(episodes, config(), mini_batches=1, seed=0, device=CPU)
    assert distillation_gate(episodes, layout, config()).tolist() == [1, 1, 1]
    assert distillation_gate(episodes, layout, config(opd_gate="failed_only")).tolist() == [0, 0, 1]
    assert distillation_gate(episodes, layout, config(opd_gate="failed_only", failed_below=2.0)).tolist() == [1, 1, 1]


def two_call_episode():
    task, act, info = [10, 11], [20, 21, 22], [30, 31]
    spans = [SegmentSpan("task", -1, 0, 2), SegmentSpan("action", 0, 2, 5), SegmentSpan("information", 0, 5, 7)]
    second = Call([*task, *act, *info], [23, 24], segments=spans)
    third_spans = [SegmentSpan("task", -1, 0, 2), SegmentSpan("action", 1, 2, 4), SegmentSpan("information", 1, 4, 5)]
    third = Call([*task, 23, 24, 32], [25], segments=third_spans)
    return Episode([Call(task, act, segments=spans[:1]), second, third], 1.0)


def test_the_persistent_history_is_everything_that_was_said():
    (seen,) = persistent_history([two_call_episode()])
    assert [call.prompt_ids for call in seen.calls] == [
        [10, 11],
        [10, 11, 20, 21, 22, 30, 31],
        [10, 11, 20, 21, 22, 30, 31, 23, 24, 32],
    ]
    assert [call.action_ids for call in seen.calls] == [[20, 21, 22], [23, 24], [25]]


def test_the_persistent_history_of_an_episode_built_by_hand_is_an_error():
    with pytest.raises(EpisodeError, match="call 0 has no segments"):
        persistent_history([Episode([Call([3], [4])], 0.0)])


def test_only_the_call_that_forgot_something_is_seen_otherwise_by_a_persistent_teacher(colours):
    episodes = [two_call_episode()]
    student, teacher = colours.stranger(0), colours.stranger(1)
    model = ActorCritic(student, Critic.copy_of(student))
    found = []
    for state in ("aligned", "persistent_history"):
        args = config(teacher_state=state)
        layout = lay_out(episodes, args, mini_batches=1, seed=0, device=CPU)
        found.append(gather(episodes, layout, args, model, 100, teacher=teacher, reference=None).teacher_hidden)
    gap = (found[0] - found[1]).abs().amax(1)
    assert gap[:5].max() < 1e-5
    assert gap[5] > 1e-2


def test_an_episode_without_a_sampled_token_is_an_error():
    with pytest.raises(EpisodeError, match="task 'empty'"):
        lay_out([Episode([Call([3], [])], 0.0, "empty")], config(), mini_batches=1, seed=0, device=CPU)
