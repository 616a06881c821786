"""Whole or absent, and a signal is a request."""

import os
import signal

import pytest
from transformers import TrainerState

from memopd_train.checkpoint import checkpoint_to_resume, last_checkpoint, publish, stop_on_signal
from memopd_train.errors import CheckpointError


def test_publishing_replaces_what_was_there(tmp_path):
    final, staged = tmp_path / "checkpoint-3", tmp_path / ".saving" / "checkpoint-3"
    for folder, text in ((final, "old"), (staged / "deep", "new")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(text)
    publish(staged, final)
    assert (final / "deep" / "file").read_text() == "new"
    assert not (final / "file").exists()
    assert not staged.exists()


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    assert last_checkpoint(tmp_path / "nowhere") is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", ".saving"):
        (tmp_path / name).mkdir()
        TrainerState().save_to_json(str(tmp_path / name / "trainer_state.json"))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert checkpoint_to_resume(tmp_path, resume=True) == tmp_path / "checkpoint-10"
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        checkpoint_to_resume(tmp_path, resume=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as interrupt:
        assert not interrupt
        os.kill(os.getpid(), number)
        assert interrupt
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
