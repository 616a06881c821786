"""Summaries and alarms."""

import logging

import pytest
import torch

from memopd_agents.episode import Call, Episode
from memopd_train import monitor
from memopd_train.config import MemOPDConfig


def test_episodes_are_summed_up():
    episodes = [
        Episode(
            [Call([1, 2], [3]), Call([1], [2, 3])],
            1.0,
            info={"em": 1.0, "f1": 1.5, "searches": 1, "invalid_actions": 1},
        ),
        Episode([Call([1], [2])], 0.0, info={"stop_reason": "answered", "invalid_actions": 0}),
    ]
    metrics = monitor.episode_metrics(episodes)
    assert metrics["reward"] == 0.5
    assert metrics["f1"] == 0.75
    assert metrics["turns"] == 1.5
    assert metrics["answered"] == 0.5
    assert metrics["invalid_rate"] == pytest.approx(1 / 3)
    assert metrics["peak_tokens"] == 2.5
    assert metrics["action_tokens"] == 2.0


def test_no_episodes_are_no_error():
    assert monitor.episode_metrics([])["reward"] == 0.0


def test_the_share_of_the_distillation_is_half_where_both_pull_alike():
    assert monitor.pull_metrics(4.0, 4.0) == {"opd_grad_share": 0.5}
    assert monitor.pull_metrics(1.0, 9.0) == {"opd_grad_share": 0.75}
    assert monitor.pull_metrics(0.0, 0.0) == {"opd_grad_share": 0.0}


def test_updates_are_averaged_but_the_largest_ratio_is_the_largest():
    assert monitor.summarise([{"ratio_max": 3.0, "opd": 1.0}, {"ratio_max": 2.0, "opd": 2.0}, {"opd": 3.0}]) == {
        "ratio_max": 3.0,
        "opd": 2.0,
    }


def test_the_gap_between_engine_and_trainer():
    gaps = monitor.mismatch_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert gaps == {"rollout_gap_mean": 0.25, "rollout_gap_p99": 0.5, "rollout_gap_max": 0.5}
    assert monitor.mismatch_metrics(torch.tensor([-1.0]), None) == {}


def test_a_perfect_critic_explains_everything():
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert monitor.value_metrics(returns, returns, returns)["explained_variance"] == 1.0
    assert monitor.value_metrics(torch.zeros(3), torch.ones(3), returns)["explained_variance"] == 0.0


def test_an_alarm_rings_when_a_limit_is_crossed_and_again_after_it_was_quiet(caplog):
    alarms = monitor.Alarms(MemOPDConfig(use_cpu=True, alarm_entropy=0.1, alarm_kl=0.0))
    with caplog.at_level(logging.WARNING):
        for number, entropy in enumerate([1.0, 0.05, 0.04, 1.0, 0.01]):
            alarms.check(number, {"entropy": entropy, "approx_kl": 9.0})
    assert [record.args[0] for record in caplog.records] == [1, 4]
