"""Student and critic as one module, and what a vocabulary check finds."""

import copy

import pytest
import torch

from memopd_agents.episode import Call, Episode
from memopd_train.alignpack import pack
from memopd_train.errors import VocabularyError
from memopd_train.models import ActorCritic, Critic, valid_vocabulary

PACK = pack([Episode([Call([10, 11, 12], [13, 14]), Call([10, 11], [15])], 1.0)])[0]


def test_a_new_critic_values_everything_at_zero_and_can_learn(colours):
    student = colours.stranger()
    for critic in (Critic.copy_of(student), Critic(student.config.hidden_size)):
        model = ActorCritic(student, critic)
        _, values = model(PACK)
        assert values.tolist() == [0.0, 0.0, 0.0]
        values.sum().backward()
        assert critic.head.weight.grad.abs().sum() > 0


def test_a_critic_of_its_own_shares_nothing_with_the_student(colours):
    student = colours.stranger()
    critic = Critic.copy_of(student)
    assert not {p.data_ptr() for p in student.parameters()} & {p.data_ptr() for p in critic.parameters()}


def test_without_the_actor_no_gradient_reaches_it(colours):
    student = colours.stranger()
    for critic in (Critic.copy_of(student), Critic(student.config.hidden_size)):
        critic.head.weight.data.fill_(1.0)
        _, values = ActorCritic(student, critic)(PACK, actor=False)
        values.sum().backward()
        assert all(parameter.grad is None for parameter in student.parameters())


def test_a_wider_head_is_padding_and_a_narrower_one_an_error(colours):
    student, wide, narrow = colours.stranger(), colours.stranger(), colours.stranger()
    size = len(colours.tokenizer)
    wide.resize_token_embeddings(size + 64)
    narrow.resize_token_embeddings(size - 1)
    assert valid_vocabulary(colours.tokenizer, student, wide) == size
    with pytest.raises(VocabularyError, match=f"teacher's head has {size - 1} rows"):
        valid_vocabulary(colours.tokenizer, student, narrow)


def test_the_first_id_that_differs_is_named(colours):
    other = copy.deepcopy(colours.tokenizer)
    assert valid_vocabulary(colours.tokenizer, colours.stranger(), None, other) == len(other)
    mine = dict(colours.tokenizer.get_vocab())
    one, two = sorted(mine, key=mine.get)[40:42]

    class Swapped:
        def get_vocab(self):
            return {**mine, one: mine[two], two: mine[one]}

    with pytest.raises(VocabularyError, match=f"token id {mine[one]}: "):
        valid_vocabulary(colours.tokenizer, colours.stranger(), None, Swapped())


def test_values_are_those_of_each_call_alone(colours):
    student = colours.stranger()
    critic = Critic.copy_of(student)
    torch.nn.init.normal_(critic.head.weight)
    model = ActorCritic(student, critic)
    calls = [Call([10, 11, 12], [13, 14]), Call([10, 11], [15])]
    alone = torch.cat([model(pack([Episode([call], 0.0)])[0])[1] for call in calls])
    assert torch.allclose(model(PACK)[1], alone, atol=1e-5)
