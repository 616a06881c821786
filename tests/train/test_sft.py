"""The cold start: rows are recorded ids, the loss sits where it should, runs resume exactly, bad input is named."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl.trainer.utils import add_fused_lm_head

from memopd_agents.episode import Call, Episode
from memopd_train.attention import BackendError
from memopd_train.config import MemOPDSFTConfig
from memopd_train.errors import CallTooLongError, CheckpointError, EpisodeError, TrainingInterrupted, VocabularyError
from memopd_train.progress import read_metrics
from memopd_train.sft import IGNORED, call_rows, score_labels_at_once, train_sft

VOCAB = 40


def tiny_model(seed=0, window=64):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=window,
            tie_word_embeddings=False,
        )
    )


def tiny_tokenizer():
    vocab = {f"t{number}": number for number in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t0")), pad_token="t1", eos_token="t2"
    )


def copying_episodes(count=24):
    generator = torch.Generator().manual_seed(5)
    episodes = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (4 + number % 5,), generator=generator).tolist()
        episodes.append(
            Episode(calls=[Call(ids, ids), Call([*ids, 3], [*ids, 2])], reward=1.0, task_id=f"task-{number}")
        )
    return episodes


@pytest.mark.parametrize("most_bytes", [2**30, 0])
def test_scoring_labels_at_once_gives_the_scores_and_gradients_of_trl(most_bytes):
    labels = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": labels.clone(), "attention_mask": torch.ones_like(labels)}
    labels[0, :5] = labels[2] = IGNORED  # a prompt, and a row without any label
    scored = []
    for at_once in (False, True):
        model = tiny_model()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if at_once:
            score_labels_at_once(model, most_bytes)
        scores = model(**inputs, labels=labels, fused_lm_head=True)
        (scores.log_probs * torch.arange(8)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        scored.append([scores.log_probs, scores.entropy, scores.is_top1, scores.label_mask, *gradients])
        assert model(**inputs).logits.shape == (3, 9, VOCAB)
    for theirs, ours in zip(*scored, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-5, rtol=1e-5)


def test_a_head_that_is_not_linear_is_left_to_trl():
    model = tiny_model()
    model.config.logit_scale = 2.0
    with pytest.raises(BackendError):
        score_labels_at_once(model)


def config(**options):
    return MemOPDSFTConfig(
        **{
            "use_cpu": True,
            "per_device_train_batch_size": 8,
            "max_steps": 12,
            "save_steps": 5,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            **options,
        }
    )


class Kill(TrainerCallback):
    """Stands for a crash: raises in the middle of a step, after `step` steps."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("killed")


class PressCtrlC(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_labels_cover_the_action_or_everything():
    episode = Episode(calls=[Call([4, 5, 6], [7, 8])], reward=0.0)
    assert call_rows([episode], tiny_model(), "action") == {
        "input_ids": [[4, 5, 6, 7, 8]],
        "labels": [[-100] * 3 + [7, 8]],
    }
    assert call_rows([episode], tiny_model(), "all")["labels"] == [[4, 5, 6, 7, 8]]


def test_training_learns_and_writes_what_it_promises(tmp_path):
    seen = []
    folder = train_sft(
        tiny_model(),
        tiny_tokenizer(),
        copying_episodes(),
        tmp_path / "run",
        config(max_steps=30),
        on_progress=seen.append,
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["tokens"] > lines[0]["tokens"] > 0
    assert seen[-1].step == seen[-1].total == 30
    assert (folder / "model.safetensors").exists()
    assert not list((tmp_path / "run").rglob("*.bin"))
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    reloaded = Qwen2ForCausalLM.from_pretrained(folder)
    assert reloaded(torch.tensor([[4, 5]])).logits.shape == (1, 2, VOCAB)


def test_the_model_is_usable_afterwards_and_only_actions_are_learned(tmp_path):
    model = tiny_model()
    train_sft(model, tiny_tokenizer(), copying_episodes(), tmp_path, config())
    assert "forward" not in model.__dict__
    assert model(torch.tensor([[4, 5]])).logits is not None


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    episodes = copying_episodes()
    whole = train_sft(tiny_model(), tiny_tokenizer(), episodes, tmp_path / "whole", config())
    with pytest.raises(RuntimeError, match="killed"):
        train_sft(tiny_model(), tiny_tokenizer(), episodes, tmp_path / "cut", config(), callbacks=[Kill(8)])
    resumed = train_sft(tiny_model(seed=9), tiny_tokenizer(), episodes, tmp_path / "cut", config())
    one, other = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [[line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_ctrl_c_saves_and_says_how_to_continue(tmp_path):
    with pytest.raises(TrainingInterrupted, match="--resume"):
        train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config(), callbacks=[PressCtrlC()])
    assert (tmp_path / "checkpoint-4").is_dir()
    assert not (tmp_path / "model").exists()
    train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config())
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 12


def test_a_torn_checkpoint_is_never_picked_up(tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config(), callbacks=[Kill(7)])
    torn = tmp_path / ".saving" / "checkpoint-99"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"half")
    train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config())
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 12


def test_the_time_budget_ends_the_run_with_a_model(tmp_path):
    folder = train_sft(
        tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config(max_steps=100_000, max_seconds=0.5)
    )
    assert folder.is_dir()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] < 100_000


def test_a_finished_run_is_returned_and_never_overwritten(tmp_path):
    folder = train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert train_sft(tiny_model(seed=1), tiny_tokenizer(), copying_episodes(), tmp_path, config()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="already holds a run"):
        train_sft(tiny_model(), tiny_tokenizer(), copying_episodes(), tmp_path, config(), resume=False)


@pytest.mark.parametrize(
    ("episodes", "error", "message"),
    [
        ([], EpisodeError, "no calls"),
        ([Episode(calls=[Call([3], [])], reward=0.0, task_id="a")], EpisodeError, "task 'a'.*call 0.*no action"),
        (
            [Episode(calls=[Call([3], [4]), Call([3] * 60, [4] * 5)], reward=0.0)],
            CallTooLongError,
            "episode 0.*call 1.*65",
        ),
        ([Episode(calls=[Call([3], [VOCAB])], reward=0.0)], VocabularyError, "token id 40"),
    ],
)
def test_bad_demonstrations_are_named(tmp_path, episodes, error, message):
    with pytest.raises(error, match=message):
        train_sft(tiny_model(), tiny_tokenizer(), episodes, tmp_path, config())
