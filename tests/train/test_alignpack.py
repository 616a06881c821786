"""The structure of packs: what is in a row, who sees whom, and where each sampled token is predicted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from memopd_agents.episode import Call, Episode
from memopd_train.alignpack import FLEX_BLOCK, Pack, PackError, pack, sampled_tokens, unpack

# A small vocabulary makes calls collide, so that prefixes are shared in ways nobody planned.
ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)
empty_or_ids = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def played_episodes(draw: st.DrawFn) -> list[Episode]:
    """Episodes under consolidate, full, window:k or arbitrary rewriting, several of them from the same task."""
    tasks = draw(st.lists(ids, min_size=1, max_size=3))
    return [draw(one_episode(draw(st.sampled_from(tasks)))) for _ in range(draw(st.integers(1, 4)))]


@st.composite
def one_episode(draw: st.DrawFn, task: list[int]) -> Episode:
    turns = draw(st.lists(st.tuples(empty_or_ids, empty_or_ids), min_size=1, max_size=5))
    memory = draw(st.sampled_from(["consolidate", "full", "window", "rewrite"]))
    calls = []
    for k, (action, _) in enumerate(turns):
        if memory == "rewrite":
            prompt = task + draw(empty_or_ids)
        else:
            kept = {"consolidate": turns[k - 1 : k] if k else [], "full": turns[:k], "window": turns[max(0, k - 2) : k]}
            prompt = task + [token for turn in kept[memory] for part in turn for token in part]
        calls.append(Call(prompt, action))
    return Episode(calls, reward=0.0)


def path_of(p: Pack, position: int) -> list[int]:
    """Ids that the row position sees, itself last."""
    return p.input_ids[p.attention_mask()[position]].tolist()


def all_calls(episodes: list[Episode]) -> list[tuple[int, int, Call]]:
    return [
        (e, c, call) for e, episode in enumerate(episodes) for c, call in enumerate(episode.calls) if call.action_ids
    ]


def longest_call(episodes: list[Episode]) -> int:
    return max([len(call.prompt_ids) + len(call.action_ids) for *_, call in all_calls(episodes)], default=1)


def test_call_0_lies_inside_call_1_of_a_consolidating_episode() -> None:
    episode = Episode([Call([1, 2], [5]), Call([1, 2, 5, 7], [6, 8]), Call([1, 2, 6, 8, 9], [4])], reward=1.0)
    (p,) = pack([episode])
    assert p.input_ids.tolist() == [1, 2, 5, 7, 6, 8, 6, 8, 9, 4]
    assert p.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert p.subtree_end.tolist() == [10, 10, 6, 6, 6, 6, 10, 10, 10, 10]
    assert p.action_index.tolist() == [1, 3, 4, 8]
    assert p.action_ids.tolist() == [5, 6, 8, 4]
    assert p.call_index.tolist() == [0, 1, 1, 2]
    assert p.episode_index.tolist() == [0, 0, 0, 0]
    assert p.raw_tokens == 3 + 6 + 6


def test_an_append_only_history_is_the_usual_causal_row() -> None:
    history, calls = [1, 2], []
    for turn in range(4):
        calls.append(Call(list(history), [3, turn]))
        history += [3, turn, 9]
    (p,) = pack([Episode(calls, 0.0)])
    assert p.position_ids.tolist() == list(range(p.num_tokens))
    assert torch.equal(p.attention_mask(), torch.ones(p.num_tokens, p.num_tokens).tril().bool())


def test_tasks_without_a_common_prefix_do_not_see_each_other() -> None:
    (p,) = pack([Episode([Call([1, 2], [3])], 0.0), Episode([Call([4, 5], [6])], 0.0)])
    expected = torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool()
    assert torch.equal(p.attention_mask(), expected)


def test_equal_calls_share_every_token_and_keep_their_own_losses() -> None:
    (p,) = pack([Episode([Call([1], [2, 3])], 0.0), Episode([Call([1], [2, 3])], 1.0)])
    assert p.num_tokens == 3
    assert p.action_index.tolist() == [0, 1, 0, 1]
    assert p.episode_index.tolist() == [0, 0, 1, 1]


@settings(max_examples=150, deadline=None)
@given(played_episodes(), st.booleans(), st.none() | st.integers(0, 12))
def test_every_sampled_token_is_predicted_once_from_exactly_the_ids_its_call_saw(
    episodes: list[Episode], share: bool, slack: int | None
) -> None:
    limit = None if slack is None else longest_call(episodes) + slack
    packs = pack(episodes, max_tokens=limit, share_prefix=share)
    seen = []
    for p in packs:
        assert limit is None or p.num_tokens <= limit
        for a in range(p.num_actions):
            at = int(p.action_index[a])
            context = path_of(p, at)
            assert int(p.position_ids[at]) == len(context) - 1
            seen.append((int(p.episode_index[a]), int(p.call_index[a]), len(context), int(p.action_ids[a]), context))
    expected = [
        (e, c, len(call.prompt_ids) + t, token, call.prompt_ids + call.action_ids[:t])
        for e, c, call in all_calls(episodes)
        for t, token in enumerate(call.action_ids)
    ]
    assert sorted(seen) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(played_episodes(), st.booleans(), st.none() | st.integers(0, 12))
def test_the_action_axis_is_ordered_by_episode_call_token_and_flat_index_points_into_the_batch(
    episodes: list[Episode], share: bool, slack: int | None
) -> None:
    limit = None if slack is None else longest_call(episodes) + slack
    batch = sampled_tokens(episodes)
    packs = pack(episodes, max_tokens=limit, share_prefix=share)
    for p in packs:
        order = torch.stack([p.episode_index, p.call_index, p.flat_index], 1).tolist()
        assert order == sorted(order)
        for name in ("action_ids", "call_index", "episode_index"):
            assert torch.equal(getattr(batch, name)[p.flat_index], getattr(p, name))
    if packs:
        assert torch.equal(unpack(packs, [p.action_ids for p in packs]), batch.action_ids)


@settings(max_examples=100, deadline=None)
@given(played_episodes())
def test_sharing_stores_each_distinct_prefix_once(episodes: list[Episode]) -> None:
    prefixes = {
        tuple((call.prompt_ids + call.action_ids)[:n])
        for *_, call in all_calls(episodes)
        for n in range(1, len(call.prompt_ids) + len(call.action_ids) + 1)
    }
    packs = pack(episodes)
    assert sum(p.num_tokens for p in packs) == len(prefixes)
    assert sum(p.raw_tokens for p in packs) == sum(
        len(c.prompt_ids) + len(c.action_ids) for *_, c in all_calls(episodes)
    )


@settings(max_examples=60, deadline=None)
@given(played_episodes(), st.randoms(use_true_random=False))
def test_permuting_episodes_leaves_the_rows_as_they_are(episodes: list[Episode], random) -> None:
    shuffled = random.sample(episodes, len(episodes))
    for before, after in zip(pack(episodes), pack(shuffled), strict=True):
        assert torch.equal(before.input_ids, after.input_ids)
        assert torch.equal(before.subtree_end, after.subtree_end)


@settings(max_examples=100, deadline=None)
@given(played_episodes())
def test_without_sharing_calls_lie_side_by_side_in_order(episodes: list[Episode]) -> None:
    calls = [call.prompt_ids + call.action_ids for *_, call in all_calls(episodes)]
    packs = pack(episodes, share_prefix=False)
    assert [i for p in packs for i in p.input_ids.tolist()] == [i for call in calls for i in call]
    assert [p.input_ids[seen].tolist() for p in packs for seen in p.runs()] == calls


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 700])
@pytest.mark.parametrize("share", [True, False])
def test_the_block_mask_is_the_attention_mask(num_tokens: int, share: bool) -> None:
    p = random_row(num_tokens, share)
    block_mask, mask = p.block_mask(), p.attention_mask()
    ours, reference = (
        block_mask.to_dense()[0, 0].bool(),
        create_block_mask(block_mask.mask_mod, None, None, *mask.shape, "cpu"),
    )
    assert torch.equal(ours, reference.to_dense()[0, 0].bool())
    position = torch.arange(num_tokens)
    assert torch.equal(block_mask.mask_mod(None, None, position[:, None], position[None, :]), mask)
    # Tiles called full skip the mask function, so each must be all True where it exists.
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None
    for row, count in enumerate(block_mask.full_kv_num_blocks[0, 0].tolist()):
        for column in block_mask.full_kv_indices[0, 0, row, :count].tolist():
            tile = (
                slice(row * FLEX_BLOCK, (row + 1) * FLEX_BLOCK),
                slice(column * FLEX_BLOCK, (column + 1) * FLEX_BLOCK),
            )
            assert mask[tile].all()


def random_row(num_tokens: int, share: bool) -> Pack:
    """A pack of about ``num_tokens`` tokens that branches near and far, cut to the exact length."""
    rng = np.random.default_rng(num_tokens)
    calls = [Call([1, *rng.integers(0, 2, rng.integers(1, 150)).tolist()], [1]) for _ in range(2 + num_tokens // 40)]
    (p,) = pack([Episode(calls, 0.0)], share_prefix=share)
    assert p.num_tokens >= num_tokens
    return dataclasses.replace(
        p,
        input_ids=p.input_ids[:num_tokens],
        position_ids=p.position_ids[:num_tokens],
        subtree_end=p.subtree_end[:num_tokens].clamp(max=num_tokens),
    )


def test_padding_sees_and_is_seen_by_only_itself() -> None:
    (p,) = pack([Episode([Call([1, 2], [3]), Call([1, 4], [5])], 0.0)])
    mask = p.padded(p.num_tokens + 3).attention_mask()
    assert torch.equal(mask[: p.num_tokens, : p.num_tokens], p.attention_mask())
    assert torch.equal(mask[p.num_tokens :, p.num_tokens :], torch.eye(3).bool())
    assert not mask[: p.num_tokens, p.num_tokens :].any() and not mask[p.num_tokens :, : p.num_tokens].any()
    with pytest.raises(PackError, match="cannot pad"):
        p.padded(p.num_tokens - 1)


def test_a_call_over_the_limit_is_an_error_that_names_episode_and_call() -> None:
    episodes = [Episode([Call([1], [2])], 0.0), Episode([Call([1], [2]), Call([1, 2, 3], [4, 5])], 0.0, task_id="q7")]
    assert sum(p.num_actions for p in pack(episodes, max_tokens=5)) == 4
    with pytest.raises(PackError, match=r"episode 1 \(task 'q7'\), call 1: 5 tokens, over max_tokens=4"):
        pack(episodes, max_tokens=4)


def test_an_empty_prompt_is_an_error_because_nothing_predicts_its_first_token() -> None:
    with pytest.raises(PackError, match="episode 0, call 1: empty prompt"):
        pack([Episode([Call([1], [2]), Call([], [3])], 0.0)])


def test_calls_without_sampled_tokens_are_left_out() -> None:
    assert pack([]) == []
    assert pack([Episode([], 0.0), Episode([Call([1, 2], [])], 0.0)]) == []
    (p,) = pack([Episode([Call([8, 8, 8], []), Call([1], [2])], 0.0)])
    assert p.input_ids.tolist() == [1, 2]
    assert p.call_index.tolist() == [1]


def test_a_pack_made_by_hand_needs_no_flat_index() -> None:
    one = torch.tensor([0])
    p = Pack(torch.tensor([4, 5]), torch.tensor([0, 1]), torch.tensor([2, 2]), one, torch.tensor([5]), one, one)
    assert p.flat_index.tolist() == [0]
    assert p.to("cpu").num_tokens == 2


@settings(max_examples=100, deadline=None)
@given(played_episodes(), st.booleans())
def test_runs_cover_the_row_and_see_what_the_mask_lets_them_see(episodes: list[Episode], share: bool) -> None:
    for p in pack(episodes, share_prefix=share):
        mask, start = p.attention_mask(), 0
        for seen in p.runs():
            end = int(seen[-1]) + 1
            for position in range(start, end):
                visible = seen[: len(seen) - (end - 1 - position)]
                assert torch.equal(mask[position].nonzero()[:, 0], visible)
            start = end
        assert start == p.num_tokens


def test_unpack_refuses_packs_that_do_not_cover_the_batch() -> None:
    packs = pack([Episode([Call([1, 2], [3]), Call([4, 4], [5])], 0.0)], max_tokens=3)
    assert len(packs) == 2
    with pytest.raises(PackError, match="cover one batch"):
        unpack(packs[1:], [packs[1].action_ids])


def test_engine_logprobs_come_along_when_every_call_has_them() -> None:
    calls = [Call([1], [2, 3], logprobs=[-0.5, -1.0]), Call([1], [4], logprobs=[-2.0])]
    logprobs = sampled_tokens([Episode(calls, 0.0)]).logprobs
    assert logprobs is not None and logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert sampled_tokens([Episode([*calls, Call([1], [5])], 0.0)]).logprobs is None
    with pytest.raises(PackError, match="episode 0, call 0: 1 log-probabilities for 2"):
        sampled_tokens([Episode([Call([1], [2, 3], logprobs=[-0.5])], 0.0)])


@pytest.mark.parametrize("wrong", [-1, 1.5, "7", None, 2**32])
def test_what_is_no_token_id_is_refused_and_shown(wrong):
    with pytest.raises(PackError, match="episode 0, call 0: token ids are whole numbers"):
        pack([Episode([Call([1, 2], [3, wrong])], 1.0)])
