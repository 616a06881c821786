"""Weights reach the engine, or nobody plays."""

import pytest
import torch

from memopd_agents.engines import EngineError, HFEngine
from memopd_train.weights import ALIGNMENT, align, sync_engine


def test_an_engine_that_shares_the_student_only_learns_the_version(colours):
    student = colours.stranger()
    engine = HFEngine(student, colours.tokenizer)
    sync_engine(engine, student, 7)
    assert engine.version == 7


def test_another_engine_gets_the_values(colours):
    student, engine = colours.stranger(1), HFEngine(colours.stranger(2), colours.tokenizer)
    sync_engine(engine, student, 3)
    for mine, its in zip(student.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert engine.version == 3


def test_one_changed_bit_is_noticed(colours):
    class Careless(HFEngine):
        def update_weights(self, weights, version):
            super().update_weights(weights, version)
            with torch.no_grad():
                next(self.model.parameters())[0, 0] += 1e-3

    with pytest.raises(EngineError, match="step 3"):
        sync_engine(Careless(colours.stranger(2), colours.tokenizer), colours.stranger(1), 3)


def test_weights_at_odd_addresses_move_and_keep_their_values_and_ties():
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)])
    odd = torch.arange(65.0)[1:].view(8, 8)
    model[0].weight = model[1].weight = torch.nn.Parameter(odd)
    assert model[0].weight.data_ptr() % ALIGNMENT
    align(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.data_ptr() % ALIGNMENT == 0
    assert torch.equal(model[0].weight, odd)
