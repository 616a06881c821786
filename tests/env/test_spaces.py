"""Spaces of text and of chat messages."""

import pickle

import pytest
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.spaces import ChatMessages, UnicodeText


@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_every_string_is_in_the_space(x):
    assert x in UnicodeText()


@pytest.mark.parametrize("x", [None, 1, b"bytes", ["a"], ("a",)])
def test_nothing_but_strings_is_in_the_space(x):
    assert x not in UnicodeText()


def test_samples_are_members_and_repeat_with_the_seed():
    space, other = UnicodeText(seed=3), UnicodeText(seed=3)
    samples = [space.sample() for _ in range(20)]
    assert samples == [other.sample() for _ in range(20)]
    assert all(sample in space for sample in samples) and len(set(samples)) > 10


def test_a_text_space_has_no_mask():
    with pytest.raises(ValueError, match="mask"):
        UnicodeText().sample(mask=[1])


def test_spaces_are_equal_by_value_and_survive_pickling_and_batching():
    for space in (UnicodeText(), ChatMessages()):
        assert pickle.loads(pickle.dumps(space)) == space
        assert batch_space(space, 3).sample()[2] in space
    assert UnicodeText() != ChatMessages()


def test_chat_messages_contain_what_they_sample_and_no_malformed_message():
    space = ChatMessages(seed=0)
    assert all(space.sample() in space for _ in range(5))
    assert [{"role": "user"}] not in space
    assert [{"role": "nobody", "content": "x"}] not in space
    assert "text" not in space
