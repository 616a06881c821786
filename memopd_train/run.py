"""The part of the trainer that is not the algorithm: where a run stands, how it begins, is saved, resumed and stopped.

A run stands at (iteration, update). Between iterations a checkpoint is weights, optimiser, schedule, random state and
that pair. In the middle of one it also holds the iteration's episodes and the numbers that came from weights that have
since changed (`Experience.exact_state`), so that what was played is used to the end.

Files of a checkpoint: the student as any transformers model with its tokenizer; ``critic.safetensors``;
``optimizer.pt``, ``scheduler.pt``, ``rng_state.pth`` and ``trainer_state.json`` as transformers writes them;
``training_args.json``; ``memopd.json`` (where the run stands, which tasks it has); and in the middle of an iteration,
for each rank, ``episodes-R.jsonl`` and ``experience-R.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_callback import ExportableState
from trl.trainer.base_trainer import _BaseTrainer

from memopd_agents.episode import Episode, read_episodes, write_episodes
from memopd_env.tasks.task import Task
from memopd_train.checkpoint import AtomicCheckpoints, Interrupt, any_rank, reading
from memopd_train.config import MemOPDConfig
from memopd_train.errors import CheckpointError
from memopd_train.experience import Experience
from memopd_train.models import ActorCritic
from memopd_train.monitor import COUNTS
from memopd_train.progress import MetricsLog, Progress, ProgressCallback

ACTOR, CRITIC = "actor.", "critic."
PLACE, CRITIC_WEIGHTS = "memopd.json", "critic.safetensors"


class Run(AtomicCheckpoints, _BaseTrainer):
    """A trainer of an `ActorCritic` that knows where it stands.

    Attributes:
        iteration: Iterations done.
        update: Optimiser steps done in the present iteration.
        episodes: What the present iteration learns from; empty between iterations.
        experience: What is known of them, or None.
        line: Metrics of the present iteration so far.
        updates: Metrics of its optimiser steps.
    """

    args: MemOPDConfig
    train_tasks: Sequence[Task]
    on_progress: ProgressCallback | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.iteration = 0
        self.update = 0
        self.episodes: list[Episode] = []
        self.experience: Experience | None = None
        self.line: dict[str, float] = {}
        self.updates: list[dict[str, float]] = []
        self.interrupt = Interrupt()
        self._started = time.monotonic()
        self._metrics_log: MetricsLog | None = None

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(str(self.args.output_dir))

    @property
    def actor_critic(self) -> ActorCritic:
        """Student and critic, without wrappers."""
        whole = self.accelerator.unwrap_model(self.model)
        assert isinstance(whole, ActorCritic)
        return whole

    @property
    def actor(self) -> PreTrainedModel:
        """The student."""
        return self.actor_critic.actor

    # Where the run stands

    def seconds(self) -> float:
        """Wall-clock seconds of the run, earlier sessions included."""
        before = self._metrics_log.seconds_before if self._metrics_log is not None else 0.0
        return before + time.monotonic() - self._started

    def stopping(self) -> bool:
        """True once the run was asked to stop, by a signal, by a callback or by its time budget."""
        over = self.args.max_seconds > 0 and self.seconds() >= self.args.max_seconds
        stopped = self.control.should_training_stop and self.state.global_step < self.state.max_steps
        return any_rank(bool(self.interrupt) or over or stopped)

    def report(self, stage: str, metrics: Mapping[str, float], names: Sequence[str] = ()) -> None:
        """Tell the progress callback where the run is, with some of the metrics."""
        if self.on_progress is not None:
            news = {name: metrics[name] for name in names if name in metrics}
            self.on_progress(Progress(stage, self.iteration, self.args.iterations, self.seconds(), news))

    def write_line(self, line: dict[str, float]) -> None:
        """Append a line to ``metrics.jsonl`` and hand it to the reporting integrations."""
        if self._metrics_log is not None:
            self._metrics_log.write(line)
        self.log(dict(line))

    def derived_seed(self, *parts: int | str) -> int:
        """A seed that is a function of the run's seed and of what it is for."""
        digest = hashlib.blake2b(json.dumps([self.args.seed, *parts]).encode(), digest_size=6).digest()
        return int.from_bytes(digest, "big")

    def permutation(self, count: int, *parts: int | str) -> list[int]:
        """A random order of ``count`` things; the same whenever and wherever it is asked for."""
        return np.random.default_rng(self.derived_seed(*parts)).permutation(count).tolist()

    def task_indices(self, iteration: int) -> list[int]:
        """Which tasks this rank plays in an iteration: a pure function, so a checkpoint need not know the order."""
        groups = self.args.episodes_per_iteration // self.args.rollouts_per_task
        count, start = len(self.train_tasks), iteration * groups
        drawn: list[int] = []
        for epoch in range(start // count, (start + groups - 1) // count + 1):
            order = self.permutation(count, "tasks", epoch)
            drawn += order[max(start - epoch * count, 0) : start + groups - epoch * count]
        mine = drawn[self.args.process_index :: self.args.world_size]
        return [index for index in mine for _ in range(self.args.rollouts_per_task)]

    def over_ranks(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Each metric over all ranks: a sum if it counts things, else the mean. Every rank must have the same ones."""
        if self.args.world_size == 1:
            return dict(metrics)
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self.args.device)
        means: Any = self.accelerator.reduce(values, "mean")
        return {
            name: mean * (self.args.world_size if name in COUNTS else 1)
            for name, mean in zip(metrics, means.tolist(), strict=True)
        }

    # Beginning and resuming

    def begin(self, checkpoint: Path | None) -> Mapping[str, Tensor] | None:
        """Wrap the models, make optimiser and schedule, and take up a checkpoint.

        Returns:
            `Experience.exact_state` of the iteration that the checkpoint is in the middle of, or None.
        """
        args = self.args
        self.is_in_train = True
        self._started = time.monotonic()
        stateful: Any = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        self.state = TrainerState(stateful_callbacks=stateful)
        if args.gradient_checkpointing:
            self.actor_critic.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            )
        place: dict[str, Any] = {}
        if checkpoint is not None:
            place = self._read_place(checkpoint)
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.state.compute_steps(args, args.max_steps)
        self.state.init_training_references(self, args.max_steps, args.iterations, None)
        self._prepare_for_training(args.max_steps, None, None if checkpoint is None else str(checkpoint))
        if self.is_world_process_zero():
            self._metrics_log = MetricsLog(self.out / "metrics.jsonl", self.state.global_step if checkpoint else None)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if checkpoint is None:
            return None
        self._load_rng_state(str(checkpoint))
        self.iteration, self.update = place["iteration"], place["update"]
        self.line, self.updates = place["line"], place["updates"]
        if self.update == 0:
            return None
        self.episodes = list(read_episodes(checkpoint / f"episodes-{args.process_index}.jsonl"))
        with reading(checkpoint):
            known = load_file(checkpoint / f"experience-{args.process_index}.safetensors")
        return {name: tensor.to(args.device) for name, tensor in known.items()}

    def finish(self) -> None:
        """Close the metrics file."""
        if self._metrics_log is not None:
            self._metrics_log.close()

    def _read_place(self, checkpoint: Path) -> dict[str, Any]:
        if not (checkpoint / PLACE).exists():
            raise CheckpointError(f"{checkpoint} is not a checkpoint of this trainer: it has no {PLACE}")
        with reading(checkpoint):
            place = json.loads((checkpoint / PLACE).read_text(encoding="utf-8"))
            place = {name: place[name] for name in ("iteration", "update", "line", "updates", "tasks", "world_size")}
        if place["tasks"] != self._tasks_digest():
            raise CheckpointError(
                f"{checkpoint} was trained on other tasks; give the tasks it was started with, or another output_dir"
            )
        if place["world_size"] != self.args.world_size:
            raise CheckpointError(
                f"{checkpoint} was saved by {place['world_size']} processes and this run has {self.args.world_size}; "
                "resume with as many"
            )
        return place

    def _tasks_digest(self) -> str:
        asked = json.dumps([[task.id, list(task.questions)] for task in self.train_tasks])
        return hashlib.sha256(asked.encode()).hexdigest()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimiser, four groups: student and critic each have their learning rate, biases and norms no decay."""
        if self.optimizer is None:
            module = model or self.model
            assert module is not None
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            decaying = set(self.get_decay_parameter_names(module))
            groups = []
            for critic, rate in ((False, self.args.learning_rate), (True, self.args.critic_learning_rate)):
                for decays in (True, False):
                    chosen = [
                        parameter
                        for name, parameter in module.named_parameters()
                        if parameter.requires_grad and (CRITIC in name) == critic and (name in decaying) == decays
                    ]
                    decay = self.args.weight_decay if decays else 0.0
                    groups.append({"params": chosen, "lr": rate, "weight_decay": decay})
            self.optimizer = kind(groups, **options)
        return self.optimizer

    # Saving

    def save_if_due(self) -> None:
        """Write a checkpoint if the present step is one to save at."""
        if self.control.should_save:
            self._save_checkpoint(self.actor_critic)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_extra(self, folder: Path) -> None:
        rank = self.args.process_index
        if self.experience is not None and self.update > 0:
            write_episodes(folder / f"episodes-{rank}.jsonl", self.episodes)
            save_file(
                {name: tensor.cpu() for name, tensor in self.experience.exact_state().items()},
                folder / f"experience-{rank}.safetensors",
            )
        if self.args.should_save:
            place = {
                "iteration": self.iteration,
                "update": self.update,
                "line": self.line if self.update else {},
                "updates": self.updates if self.update else [],
                "tasks": self._tasks_digest(),
                "world_size": self.args.world_size,
            }
            (folder / PLACE).write_text(json.dumps(place) + "\n", encoding="utf-8")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save the student as a model of its own, and in a checkpoint the critic beside it."""
        whole, folder = self.model, Path(output_dir or self.out)
        state = self.actor_critic.state_dict() if state_dict is None else state_dict
        self.model = self.actor
        try:
            super()._save(
                str(folder), {name.removeprefix(ACTOR): x for name, x in state.items() if name.startswith(ACTOR)}
            )
        finally:
            self.model = whole
        if self._staging is not None and self.args.should_save:
            critic = {name.removeprefix(CRITIC): x.contiguous() for name, x in state.items() if name.startswith(CRITIC)}
            save_file(critic, folder / CRITIC_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, self.actor)
        with reading(resume_from_checkpoint):
            self.actor_critic.critic.load_state_dict(load_file(Path(resume_from_checkpoint) / CRITIC_WEIGHTS))
