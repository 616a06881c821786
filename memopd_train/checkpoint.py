"""Checkpoints that are whole or absent, and Ctrl-C that loses nothing.

A checkpoint is written into a staging folder beside its final place, flushed to the disk, then renamed: whoever looks
for ``checkpoint-N`` finds a complete one or none, whenever the process was killed. Weights are safetensors;
optimiser, schedule and random state are files that ``torch.load(weights_only=True)`` reads; nothing is a free-form
pickle.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging as transformers_logging

from memopd_train.errors import CheckpointError

STAGING = ".saving"
_TORCH_WRITES = ("inline_container", "PytorchStreamWriter")


def last_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = get_last_checkpoint(str(run)) if Path(run).is_dir() else None
    return None if found is None else Path(found)


def checkpoint_to_resume(run: str | Path, resume: bool) -> Path | None:
    """Decide where a run starts.

    Args:
        run: The folder of the run.
        resume: Continue what is there; otherwise the folder must hold no run.

    Raises:
        CheckpointError: If the folder holds a run that would be overwritten, or whose newest checkpoint is damaged.
    """
    found = last_checkpoint(run)
    if found is not None and not resume:
        raise CheckpointError(f"{run} already holds a run ({found.name}); resume it or choose another folder")
    if found is not None:
        with reading(found):
            TrainerState.load_from_json(str(found / TRAINER_STATE_NAME))
    return found


def publish(staged: Path, final: Path) -> None:
    """Flush a folder to the disk, then rename it into place; replaces ``final`` if it exists."""
    for path in sorted(staged.rglob("*")):
        if path.is_file():
            _fsync(path)
    for path in (staged, *(path for path in staged.rglob("*") if path.is_dir())):
        _fsync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(staged, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicCheckpoints(Trainer):
    """A ``Trainer`` whose checkpoints are whole or absent, that pickles nothing, and that phones nobody.

    Put it before the trainer it changes: ``class Mine(AtomicCheckpoints, SFTTrainer)``.
    """

    _staging: Path | None = None

    def _get_output_dir(self, trial: object) -> str:
        return str(self._staging or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: object = None) -> None:
        run = Path(str(self.args.output_dir))
        self._staging = run / STAGING
        if self.args.should_save:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        name = f"checkpoint-{self.state.global_step}"
        try:
            with _writing(self._staging, run / name):
                super()._save_checkpoint(model, trial)
                self._save_extra(self._staging / name)
        finally:
            staging, self._staging = self._staging, None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish(staging / name, run / name)
            shutil.rmtree(staging, ignore_errors=True)
            rotate_checkpoints(str(run), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _save_extra(self, folder: Path) -> None:
        """Add files to a checkpoint before it is published; called on every rank."""

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with no_progress_bars():
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            (folder / "training_args.bin").unlink(missing_ok=True)
            (folder / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def save_final(self, folder: Path) -> Path:
        """Save the model for use, whole or not at all, and return the folder."""
        staged = folder.with_name(f".{folder.name}.saving")
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        with _writing(staged, folder):
            self.save_model(str(staged), _internal_call=True)
        if self.args.should_save:
            publish(staged, folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write no card: a checkpoint holds what resuming needs, and nothing looks up a hub."""

    def _send_telemetry(self) -> None:
        """No telemetry."""


@contextmanager
def _writing(staged: Path, final: Path) -> Iterator[None]:
    """Turn a full or failing disk into one error, and give back the space of what was half written.

    Raises:
        CheckpointError: Names the folder that could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as problem:
        # torch says "inline_container.cc" or "PytorchStreamWriter" where it means that a file could not be written.
        if type(problem) is RuntimeError and not any(sign in str(problem) for sign in _TORCH_WRITES):
            raise
        shutil.rmtree(staged, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {final} ({str(problem).splitlines()[0]}): make room on that disk, then run the same command "
            "again; it goes on from the checkpoint before"
        ) from problem


@contextmanager
def reading(checkpoint: str | Path | None) -> Iterator[None]:
    """Turn whatever a damaged file of a checkpoint raises into one error.

    Raises:
        CheckpointError: Names the checkpoint.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as problem:
        reason = (str(problem).splitlines() or [""])[0]
        raise CheckpointError(
            f"cannot read {checkpoint} ({type(problem).__name__}: {reason}): if it is damaged, remove it, and the run "
            "goes on from the checkpoint before"
        ) from problem


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep the bars that transformers shows for every file it reads or writes out of ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class Interrupt:
    """True once somebody asked the run to stop."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: the first signal asks, the second stops at once."""
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


@contextmanager
def stop_on_signal() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C or SIGTERM into a request; the loop inside saves at its next safe point.

    Outside the main thread Python delivers no signals, so the request is simply never made.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_rank(holds: bool) -> bool:
    """True on every rank if it is on one; every rank must ask, at the same point."""
    state = PartialState()
    if state.num_processes == 1:
        return holds
    count: Any = reduce(torch.tensor(float(holds), device=state.device), "sum")
    return bool(count > 0)
