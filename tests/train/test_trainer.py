"""The loop: it learns, it starts on policy, and what must not matter does not."""

import copy
import logging
import random
import time
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2ForCausalLM, TrainerCallback

from memopd_agents.engines import EngineError, HFEngine
from memopd_agents.episode import read_episodes
from memopd_env.errors import ConfigError
from memopd_train.errors import CheckpointError, VocabularyError
from memopd_train.progress import read_metrics

PROMISED = (
    "reward",
    "em",
    "invalid_rate",
    "turns",
    "policy_loss",
    "value_loss",
    "opd",
    "entropy",
    "clip_fraction",
    "approx_kl",
    "ratio_max",
    "ratio_p99",
    "rollout_gap_mean",
    "rollout_gap_p99",
    "rollout_gap_max",
    "grad_norm",
    "critic_grad_norm",
    "unique_tokens",
    "raw_tokens",
    "tokens_per_second_play",
    "tokens_per_second_learn",
    "seconds_play",
    "seconds_prepare",
    "seconds_learn",
    "opd_coef",
    "opd_grad_share",
)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def largest_difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def lines(out):
    return read_metrics(out / "metrics.jsonl")


def test_the_student_learns_what_is_rewarded(colours, tmp_path):
    options = {"episodes_per_iteration": 32, "mini_batch_episodes": 16, "learning_rate": 3e-3, "ppo_epochs": 2}
    colours.trainer(tmp_path, iterations=12, **options).train()
    rewards = [line["reward"] for line in lines(tmp_path)]
    assert rewards[0] < 0.8
    assert sum(rewards[-3:]) / 3 > 0.9


def test_what_is_written_says_what_happened(colours, tmp_path):
    seen = []
    trainer = colours.trainer(
        tmp_path,
        teacher=colours.stranger(),
        divergence="reverse_kl",
        eval_every=2,
        eval_tasks=colours.tasks[:3],
        log_episodes=True,
        on_progress=seen.append,
    )
    trainer.train()
    written = lines(tmp_path)
    assert [line["iteration"] for line in written] == [1, 2]
    assert [line["step"] for line in written] == [2, 4]
    assert set(PROMISED) <= set(written[0])
    assert "eval_em" in written[1] and "eval_em" not in written[0]
    assert written[0]["opd"] > 0
    assert written[0]["raw_tokens"] >= written[0]["unique_tokens"]
    episodes = list(read_episodes(tmp_path / "episodes" / "000001-0.jsonl"))
    assert len(episodes) == 8
    assert {call.policy_version for episode in episodes for call in episode.calls} == {2}
    assert {progress.stage for progress in seen} == {"play", "learn", "evaluate", "measured"}
    assert Qwen2ForCausalLM.from_pretrained(tmp_path / "model").config.use_cache is True
    assert not list(tmp_path.rglob("*.bin"))


def test_the_first_update_is_on_policy_to_the_last_bit(colours, tmp_path):
    colours.trainer(tmp_path, mini_batch_episodes=8).train()
    for line in lines(tmp_path):
        assert line["ratio_max"] == 1.0
        assert line["clip_fraction"] == 0.0
        assert line["rollout_gap_max"] < 1e-4


def test_nothing_moves_when_there_is_nothing_to_learn(colours, tmp_path):
    student = colours.student()
    before = weights(student)
    trainer = colours.trainer(
        tmp_path,
        model=student,
        teacher=copy.deepcopy(student),
        divergence="reverse_kl",
        whiten_advantages=False,
        entropy_coef=0.0,
        max_new_tokens=2,  # no call can answer, so every reward is zero
    )
    trainer.train()
    assert lines(tmp_path)[0]["reward"] == 0.0
    assert largest_difference(before, weights(student)) == 0.0


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd", "top_k", "sampled_token"])
def test_distillation_pulls_the_student_to_the_teacher(colours, tmp_path, divergence):
    teacher = colours.stranger()
    trainer = colours.trainer(
        tmp_path,
        teacher=teacher,
        divergence=divergence,
        iterations=6,
        episodes_per_iteration=16,
        mini_batch_episodes=16,
        max_new_tokens=4,
        whiten_advantages=False,
        learning_rate=3e-3,
        ppo_epochs=2,
    )
    trainer.train()
    gaps = [line["opd"] for line in lines(tmp_path)]
    assert gaps[-1] < 0.85 * gaps[0]


def test_two_teachers_make_two_students(colours, tmp_path):
    made = []
    for seed in (1, 2):
        student = colours.student()
        out = tmp_path / str(seed)
        options = {"divergence": "reverse_kl", "iterations": 1}
        colours.trainer(out, model=student, teacher=colours.stranger(seed), **options).train()
        made.append(weights(student))
    assert largest_difference(*made) > 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"share_prefix": False},
        {"max_pack_tokens": 48},
        {"attention": "sdpa"},
        {"share_prefix": False, "attention": "varlen"},
        {"max_active": 3},
    ],
    ids=lambda change: "-".join(change),
)
def test_the_layout_changes_nothing(colours, tmp_path, change):
    made = []
    for number, options in enumerate(({}, change)):
        student = colours.student()
        trainer = colours.trainer(
            tmp_path / str(number),
            model=student,
            teacher=colours.stranger(),
            divergence="reverse_kl",
            iterations=1,
            optim="sgd",
            learning_rate=0.1,
            rollouts_per_task=2,
            **options,
        )
        trainer.train()
        made.append(weights(student))
    assert largest_difference(*made) < 1e-6


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_only_the_critic_learns_during_its_warm_up(colours, tmp_path, critic):
    student = colours.student()
    before = weights(student)
    trainer = colours.trainer(tmp_path, model=student, critic_warmup_iterations=2, critic=critic)
    head = trainer.actor_critic.critic.head.weight.detach().clone()
    trainer.train()
    assert largest_difference(before, weights(student)) == 0.0
    assert not torch.equal(head, trainer.actor_critic.critic.head.weight)


def test_a_task_comes_again_only_after_all_others(colours, tmp_path):
    trainer = colours.trainer(tmp_path, episodes_per_iteration=8, rollouts_per_task=2)
    drawn = [trainer.task_indices(iteration) for iteration in range(3)]
    assert all(indices[::2] == indices[1::2] for indices in drawn)
    order = [index for indices in drawn for index in indices[::2]]
    assert sorted(order[:6]) == sorted(order[6:12]) == list(range(6))
    assert order[:6] != order[6:12]


def test_playing_repeats_to_the_last_bit_however_fast_searches_are(colours, tmp_path):
    class Moody:
        def search(self, queries, k):
            time.sleep(random.random() * 0.02)
            return colours.retriever.search(queries, k)

    played = []
    for number in range(3):
        moody = replace(colours, retriever=Moody())
        trainer = moody.trainer(tmp_path / str(number), episodes_per_iteration=48, max_active=16)
        trainer.begin(None)
        played.append([(c.action_ids, c.logprobs) for e in trainer.play() for c in e.calls])
    assert len(played[0]) > 48, "nobody searched"
    assert played[0] == played[1] == played[2]


def test_an_engine_of_its_own_gets_the_new_weights(colours, tmp_path):
    engine = HFEngine(colours.student(), colours.tokenizer, max_batch=8)
    trainer = colours.trainer(tmp_path, engine=engine, mini_batch_episodes=8, iterations=3)
    trainer.train()
    assert engine.version == 2
    assert all(line["rollout_gap_max"] < 1e-4 for line in lines(tmp_path))


def test_an_engine_that_keeps_old_weights_is_found_out(colours, tmp_path):
    class Stale(HFEngine):
        def update_weights(self, weights, version):
            self.version = version

    trainer = colours.trainer(tmp_path, engine=Stale(colours.student(), colours.tokenizer), iterations=2)
    with pytest.raises(EngineError, match="checksum"):
        trainer.train()


def test_the_reference_holds_the_student_back(colours, tmp_path):
    moved = []
    for number, coefficient in enumerate((0.0, 10.0)):
        student = colours.student()
        before = weights(student)
        trainer = colours.trainer(
            tmp_path / str(number),
            model=student,
            ref_model=colours.student(),
            reference_kl_coef=coefficient,
            iterations=6,
            optim="sgd",
            learning_rate=0.05,
        )
        trainer.train()
        moved.append(largest_difference(before, weights(student)))
    assert moved[1] < moved[0]


def test_collapse_rings_an_alarm_once(colours, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="memopd_train.monitor"):
        colours.trainer(tmp_path, max_new_tokens=2, iterations=3, alarm_invalid=0.5).train()
    assert len([record for record in caplog.records if "invalid_rate" in record.message]) == 1


def test_callbacks_count_optimiser_steps_and_can_stop(colours, tmp_path):
    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    trainer = colours.trainer(tmp_path, iterations=5, callbacks=[StopAt()])
    trainer.train()
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3").is_dir()


def test_the_time_budget_ends_the_run_with_a_model(colours, tmp_path):
    colours.trainer(tmp_path, iterations=10_000, max_seconds=0.5).train()
    assert (tmp_path / "model").is_dir()


def test_what_does_not_fit_together_is_named(colours, tmp_path):
    with pytest.raises(ConfigError, match="needs a teacher"):
        colours.trainer(tmp_path, divergence="jsd")
    with pytest.raises(ConfigError, match="ref_model"):
        colours.trainer(tmp_path, reference_kl_coef=0.1)
    with pytest.raises(ConfigError, match="eval_tasks"):
        colours.trainer(tmp_path, eval_every=1)
    small = colours.stranger()
    small.resize_token_embeddings(100)
    with pytest.raises(VocabularyError, match="teacher's head has 100 rows"):
        colours.trainer(tmp_path, teacher=small, divergence="reverse_kl")


def test_a_run_is_never_overwritten(colours, tmp_path):
    colours.trainer(tmp_path, iterations=1).train()
    with pytest.raises(CheckpointError, match="already holds a run"):
        colours.trainer(tmp_path, iterations=1).train()
