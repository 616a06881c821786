"""A run that was stopped, however, ends with the weights of the run that was not."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback

from memopd_env import Task
from memopd_env.errors import MemOPDError
from memopd_train import checkpoint as checkpoint_module
from memopd_train.errors import CheckpointError, TrainingInterrupted
from memopd_train.progress import read_metrics

OPTIONS = {"iterations": 3, "ppo_epochs": 2, "save_steps": 1, "divergence": "reverse_kl"}
STEPS = 12
TIMES = ("seconds", "tokens_per_second")


def finals(run):
    return load_file(run / "model" / "model.safetensors")


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(run):
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


class Crash(TrainerCallback):
    """Raises right after an optimiser step, before anything is saved."""

    def __init__(self, step):
        self.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("crash")


class CtrlC:
    """Sends SIGINT when the run reaches a stage of an iteration."""

    def __init__(self, stage, iteration):
        self.stage, self.iteration, self.sent = stage, iteration, False

    def __call__(self, progress):
        if not self.sent and progress.stage == self.stage and progress.step == self.iteration:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def uninterrupted(colours, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    colours.trainer(out, teacher=colours.stranger(), **OPTIONS).train()
    return out


@pytest.mark.parametrize("step", [1, 4, 6, 11], ids=lambda step: f"step-{step}")
def test_a_crash_changes_no_bit(colours, uninterrupted, tmp_path, step):
    trainer = colours.trainer(tmp_path, teacher=colours.stranger(), callbacks=[Crash(step)], **OPTIONS)
    with pytest.raises(RuntimeError, match="crash"):
        trainer.train()
    # Another seed for the fresh student: what it starts from must not matter.
    again = colours.trainer(tmp_path, model=colours.stranger(5), teacher=colours.stranger(), **OPTIONS)
    again.train(resume_from_checkpoint=True)
    assert same_bits(finals(uninterrupted), finals(tmp_path))
    assert without_times(uninterrupted) == without_times(tmp_path)


@pytest.mark.parametrize(("stage", "iteration"), [("play", 0), ("play", 1), ("learn", 1), ("measured", 2)])
def test_ctrl_c_saves_and_the_run_goes_on_as_if_nothing_happened(colours, uninterrupted, tmp_path, stage, iteration):
    trainer = colours.trainer(tmp_path, teacher=colours.stranger(), on_progress=CtrlC(stage, iteration), **OPTIONS)
    with pytest.raises(TrainingInterrupted, match="--resume"):
        trainer.train()
    assert not (tmp_path / "model").exists()
    colours.trainer(tmp_path, teacher=colours.stranger(), **OPTIONS).train(resume_from_checkpoint=True)
    assert same_bits(finals(uninterrupted), finals(tmp_path))


def test_a_checkpoint_torn_while_it_was_written_is_never_picked_up(colours, uninterrupted, tmp_path, monkeypatch):
    published = []

    def die(staged, final):
        published.append(final.name)
        if final.name == "checkpoint-3":
            raise RuntimeError("power cut")
        publish(staged, final)

    publish = checkpoint_module.publish
    monkeypatch.setattr(checkpoint_module, "publish", die)
    with pytest.raises(RuntimeError, match="power cut"):
        colours.trainer(tmp_path, teacher=colours.stranger(), **OPTIONS).train()
    monkeypatch.undo()
    assert (tmp_path / ".saving" / "checkpoint-3").is_dir()
    assert checkpoint_module.last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    colours.trainer(tmp_path, teacher=colours.stranger(), **OPTIONS).train(resume_from_checkpoint=True)
    assert same_bits(finals(uninterrupted), finals(tmp_path))
    assert not (tmp_path / ".saving").exists()


def test_a_run_of_other_tasks_is_not_continued(colours, tmp_path):
    colours.trainer(tmp_path, iterations=1).train()
    other = colours.trainer(tmp_path, iterations=2)
    other.train_tasks = [Task("other", ["thing?"], [["red"]])]
    with pytest.raises(CheckpointError, match="other tasks"):
        other.train(resume_from_checkpoint=True)


def test_training_in_another_thread_needs_no_signals(colours, tmp_path):
    worker = threading.Thread(target=colours.trainer(tmp_path, iterations=1).train)
    worker.start()
    worker.join()
    assert (tmp_path / "model").is_dir()


SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    from transformers import AutoTokenizer, TrainerCallback
    from memopd_env import Task
    from memopd_env.retrieval import Passage, SparseRetriever
    sys.path.insert(0, {tests!r})
    from conftest import Colours

    class Kill(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)

    cold, out = Path({cold!r}), Path(sys.argv[1])
    tasks = [Task(f"task-{{n}}", [f"thing number {{n}}?"], [["red"]]) for n in range(6)]
    retriever = SparseRetriever.from_passages([Passage("0", "red", "red thing"), Passage("1", "blue", "blue thing")])
    colours = Colours(AutoTokenizer.from_pretrained(cold), tasks, retriever, cold)
    trainer = colours.trainer(out, teacher=colours.stranger(), callbacks=[Kill()], **{options!r})
    trainer.train(resume_from_checkpoint=True)
"""


@pytest.mark.slow
def test_kill_minus_nine_at_a_random_step_changes_no_bit(colours, uninterrupted, tmp_path):
    script = tmp_path / "run.py"
    tests = os.path.dirname(__file__)
    script.write_text(textwrap.dedent(SCRIPT).format(tests=tests, cold=str(colours.folder), options=OPTIONS))
    out = tmp_path / "out"

    def run(kill_at):
        return subprocess.run([sys.executable, str(script), str(out), str(kill_at)], capture_output=True, check=False)

    kill_at = int(torch.randint(1, STEPS - 1, (1,)))
    assert run(kill_at).returncode == -signal.SIGKILL, kill_at
    finished = run(-1)
    assert finished.returncode == 0, finished.stderr.decode()
    assert same_bits(finals(uninterrupted), finals(out)), f"killed at step {kill_at}"


FILES = ("model.safetensors", "critic.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
FILES += ("trainer_state.json", "memopd.json", "episodes-0.jsonl", "experience-0.safetensors")


@pytest.fixture(scope="module")
def stopped(colours, tmp_path_factory):
    """The folder of a run that stopped in the middle of an iteration."""
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(RuntimeError, match="crash"):
        colours.trainer(out, teacher=colours.stranger(), callbacks=[Crash(3)], **OPTIONS).train()
    return out


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_of_a_checkpoint_is_one_error_that_names_it(colours, stopped, tmp_path, file):
    out = shutil.copytree(stopped, tmp_path / "run")
    newest = checkpoint_module.last_checkpoint(out)
    assert (newest / file).exists()
    (newest / file).write_bytes(b"\x00junk\n")
    trainer = colours.trainer(out, teacher=colours.stranger(), **OPTIONS)
    with pytest.raises(MemOPDError, match=newest.name):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("I/O error: No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 6656 vs 6548"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_full_disk_is_one_error_and_leaves_no_half_of_a_checkpoint(colours, tmp_path, monkeypatch, problem):
    trainer = colours.trainer(tmp_path, teacher=colours.stranger(), **{**OPTIONS, "save_steps": 2})

    def full(folder):
        type(trainer)._save_extra(trainer, folder)
        if trainer.state.global_step == 4:
            raise problem

    monkeypatch.setattr(trainer, "_save_extra", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoint-4.*make room"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "metrics.jsonl"]
    assert checkpoint_module.checkpoint_to_resume(tmp_path, resume=True) == tmp_path / "checkpoint-2"


def test_an_error_that_is_not_the_disks_passes_through_a_save(colours, tmp_path, monkeypatch):
    trainer = colours.trainer(tmp_path, teacher=colours.stranger(), **OPTIONS)

    def broken(folder):
        raise RuntimeError("a bug")

    monkeypatch.setattr(trainer, "_save_extra", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.train()
