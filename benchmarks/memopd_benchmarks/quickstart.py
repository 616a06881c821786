"""The whole loop on a CPU: make a world, cold-start a student and a teacher, train, measure, say what came out.

Every stage writes into its own folder and is skipped when that folder is complete, so an interrupted quickstart goes on
where it stopped, inside a stage as between stages; stages hand over files and nothing else.

    world -> base (reads and copies) -> student (cold start, stopped early) -> memopd (learns by playing)
                                     -> teacher (imitates the oracle to the end)  ^ distils into it

The student's cold start stops as soon as it gets a given share of the validation questions right: a student that can
play a little and a teacher that plays well are the situation that on-policy distillation is for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from memopd_agents import OracleAgent
from memopd_agents.engines import HFEngine, SamplingParams
from memopd_agents.episode import Episode
from memopd_agents.rollout import rollout
from memopd_env import MemOPDEnv, Task
from memopd_env.retrieval import SparseRetriever
from memopd_env.tasks.io import write_tasks
from memopd_env.tasks.world import World, WorldConfig
from memopd_train import MemOPDConfig, MemOPDSFTConfig, MemOPDTrainer, train_sft
from memopd_train.demonstrations import demonstrate, reading_exercises
from memopd_train.progress import ProgressCallback, progress_line
from memopd_train.smallmodel import ModelShape, new_model, terse_world_tokenizer


@dataclass(frozen=True)
class Recipe:
    """How much of everything; the defaults fit two CPU cores and 25 minutes.

    Attributes:
        shape: Size of student and teacher.
        exercises: Reading exercises of the base, for each of nine kinds (1 to 3 facts, 1 or 2 passages).
        demonstrations: Tasks that the oracle plays.
        base_demonstrations: How many of them the base reads, every token in its loss.
        base_steps: Optimiser steps of the base.
        teacher_steps: Optimiser steps of the teacher's imitation.
        student_share: Share of the validation questions at which the student's cold start stops.
        student_steps: Optimiser steps at which it stops anyway.
        iterations: Rounds of play and learn.
        episodes: Episodes a round.
        max_tokens: Most tokens of one call while training.
        test_tasks: Held-out tasks by number of questions.
    """

    shape: ModelShape = field(default_factory=lambda: ModelShape(layers=2, width=128, heads=4, window=2048))
    exercises: int = 2000
    demonstrations: int = 4000
    base_demonstrations: int = 500
    base_steps: int = 700
    teacher_steps: int = 500
    student_share: float = 0.25
    student_steps: int = 300
    iterations: int = 40
    episodes: int = 128
    max_tokens: int = 48
    test_tasks: dict[int, int] = field(default_factory=lambda: {2: 500, 8: 100, 16: 50})


class StopAtShare(TrainerCallback):
    """Plays validation tasks greedily every few steps and ends training once enough questions are answered right."""

    def __init__(self, play: Callable[[PreTrainedModel], Sequence[Episode]], share: float, every: int = 10) -> None:
        self.play, self.share, self.every = play, share, every

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        """Stop training if it is time to look and the model is good enough."""
        if model is None or state.global_step % self.every:
            return
        model.eval()
        episodes = self.play(model)
        model.train()
        questions = sum(episode.info["num_questions"] for episode in episodes)
        if sum(episode.reward for episode in episodes) >= self.share * questions:
            control.should_training_stop = control.should_save = True


class Quickstart:
    """One quickstart in one folder.

    Args:
        out: Folder of everything it writes.
        seed: Seeds the world, the weights, the demonstrations and the play.
        recipe: How much of everything.
    """

    def __init__(self, out: str | Path, seed: int = 0, recipe: Recipe | None = None) -> None:
        self.out, self.seed, self.recipe = Path(out), seed, recipe or Recipe()
        self.world = World(WorldConfig.preset("tiny", seed=seed))
        self.tokenizer = terse_world_tokenizer()

    # What the stages share

    @cached_property
    def retriever(self) -> SparseRetriever:
        """BM25 over the world's passages."""
        return SparseRetriever.from_passages(list(self.world.passages()))

    def env(self, tasks: Sequence[Task]) -> MemOPDEnv:
        """An environment for some tasks, in the texts that small models read."""
        number = len(tasks[0].questions)
        return MemOPDEnv(number, tasks=tasks, retriever=self.retriever, instructions="terse", top_k=1)

    def tasks(self, split: str, num_questions: int, count: int) -> list[Task]:
        """Tasks about one split's entities; the splits share none."""
        return self.world.tasks(num_questions, split, count, seed=self.seed)

    @cached_property
    def demonstrations(self) -> list[Episode]:
        """The oracle's episodes on training tasks."""
        tasks = self.tasks("train", 2, self.recipe.demonstrations)
        return demonstrate(OracleAgent(tasks), self.env(tasks), self.tokenizer, range(len(tasks)), min_reward=1.0)

    def exercises(self) -> list[Episode]:
        """Reading exercises of growing difficulty about training entities."""
        made: list[Episode] = []
        for facts in (1, 2, 3):
            world = World(WorldConfig.preset("tiny", seed=self.seed, facts=facts))
            for kind, passages in enumerate((1, 1, 2)):
                seed = self.seed * 100 + facts * 10 + kind
                made += reading_exercises(world, self.tokenizer, self.recipe.exercises, passages=passages, seed=seed)
        return made

    def play(self, model: PreTrainedModel, tasks: Sequence[Task]) -> list[Episode]:
        """Play tasks greedily."""
        return rollout(
            HFEngine(model, self.tokenizer),
            self.tokenizer,
            lambda: self.env(tasks),
            range(len(tasks)),
            sampling=SamplingParams(max_tokens=self.recipe.max_tokens, temperature=0.0),
            seed=self.seed,
        )

    # Stages

    def make_world(self) -> None:
        """Write the corpus and the task files, for people and for the other commands."""
        folder = self.out / "world"
        if (folder / "world.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.world.write_corpus(folder / "corpus.jsonl")
        write_tasks(self.tasks("train", 2, self.recipe.demonstrations), folder / "train-q2.jsonl")
        for number, count in self.recipe.test_tasks.items():
            write_tasks(self.tasks("test", number, count), folder / f"test-q{number}.jsonl")
        (folder / "world.json").write_text(json.dumps(self.world.describe() | {"hash": self.world.corpus_hash}, indent=1))

    def train_base(self, show: ProgressCallback) -> Path:
        """Learn to read and copy: every token of exercises and of a few demonstrations is in the loss."""
        return self._sft(
            "base",
            lambda: new_model(self.tokenizer, self.recipe.shape, self.seed),
            lambda: self.exercises() + self.demonstrations[: self.recipe.base_demonstrations],
            self._sft_config("all", self.recipe.base_steps, 3e-3, "constant_with_warmup"),
            show,
        )

    def train_student(self, base: Path, show: ProgressCallback) -> Path:
        """Imitate the oracle until a share of the validation questions is answered right."""
        validation = self.tasks("validation", 2, 100)
        stop = StopAtShare(lambda model: self.play(model, validation), self.recipe.student_share)
        config = self._sft_config("action", self.recipe.student_steps, 5e-4, "constant_with_warmup")
        return self._sft("student", lambda: _load(base), lambda: self.demonstrations, config, show, [stop])

    def train_teacher(self, base: Path, show: ProgressCallback) -> Path:
        """Imitate the oracle to the end."""
        config = self._sft_config("action", self.recipe.teacher_steps, 2e-3, "cosine")
        return self._sft("teacher", lambda: _load(base), lambda: self.demonstrations, config, show)

    def train_memopd(self, student: Path, teacher: Path, show: ProgressCallback) -> Path:
        """PPO and full-vocabulary distillation from the frozen teacher, on the student's own episodes."""
        out = self.out / "memopd"
        if (out / "model").is_dir():
            return out / "model"
        trainer = MemOPDTrainer(
            model=_load(student),
            teacher=_load(teacher),
            args=self.memopd_config(out),
            processing_class=self.tokenizer,
            env_fn=self.env,
            train_tasks=self.tasks("train", 2, self.recipe.demonstrations),
            eval_tasks=self.tasks("validation", 2, 100),
            on_progress=show,
        )
        trainer.train(resume_from_checkpoint=True)
        return out / "model"

    def memopd_config(self, out: Path) -> MemOPDConfig:
        """The options of the training; what is not named here is the default."""
        return MemOPDConfig(
            output_dir=str(out),
            seed=self.seed,
            iterations=self.recipe.iterations,
            episodes_per_iteration=self.recipe.episodes,
            mini_batch_episodes=self.recipe.episodes // 2,
            max_new_tokens=self.recipe.max_tokens,
            learning_rate=5e-4,
            critic_learning_rate=1e-3,
            opd_coef=1.0,
            entropy_coef=0.0,
            eval_every=5,
            use_cpu=True,
            report_to="none",
        )

    def _sft(
        self,
        name: str,
        model: Callable[[], PreTrainedModel],
        episodes: Callable[[], list[Episode]],
        config: MemOPDSFTConfig,
        show: ProgressCallback,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> Path:
        out = self.out / name
        if (out / "model").is_dir():
            return out / "model"
        return train_sft(model(), self.tokenizer, episodes(), out, config, on_progress=show, callbacks=callbacks)

    def _sft_config(self, loss_on: Any, steps: int, learning_rate: float, schedule: str) -> MemOPDSFTConfig:
        return MemOPDSFTConfig(
            loss_on=loss_on,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type=schedule,
            adam_beta2=0.98,
            per_device_train_batch_size=64,
            logging_steps=10,
            seed=self.seed,
            use_cpu=True,
            report_to="none",
        )


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)
