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
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from memopd_agents import OracleAgent, PolicyAgent, RandomAgent
from memopd_agents.engines import HFEngine, SamplingParams
from memopd_agents.episode import Episode
from memopd_agents.evaluation import evaluate
from memopd_agents.pretrained import load_causal_lm
from memopd_agents.rollout import rollout
from memopd_env import MemOPDEnv, Task
from memopd_env.errors import ConfigError
from memopd_env.retrieval import SparseRetriever
from memopd_env.tasks.io import write_tasks
from memopd_env.tasks.world import World, WorldConfig
from memopd_train import MemOPDConfig, MemOPDSFTConfig, MemOPDTrainer, train_sft
from memopd_train.demonstrations import demonstrate, reading_exercises
from memopd_train.progress import Progress, ProgressCallback, progress_line, read_metrics
from memopd_train.smallmodel import ModelShape, new_model, terse_world_tokenizer


@dataclass(frozen=True)
class Recipe:
    """How much of everything; the defaults fit two CPU cores and 25 minutes.

    Attributes:
        shape: Size of student and teacher.
        exercises: Reading exercises of the base, for each of nine kinds (1 to 3 facts, 1 or 2 passages).
        demonstrations: Tasks that the oracle plays.
        base_steps: Optimiser steps of the base.
        teacher_steps: Optimiser steps of the teacher's imitation.
        student_share: Share of the validation questions at which the student's cold start stops.
        student_steps: Optimiser steps at which it stops anyway.
        iterations: Rounds of play and learn.
        episodes: Episodes a round.
        max_tokens: Most tokens of one call while training.
        test_tasks: Held-out tasks by number of questions.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    exercises: int = 2000
    demonstrations: int = 4000
    base_steps: int = 700
    teacher_steps: int = 700
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
        (folder / "world.json").write_text(
            json.dumps(self.world.describe() | {"hash": self.world.corpus_hash}, indent=1)
        )

    def train_base(self, show: ProgressCallback) -> Path:
        """Learn to read and copy: every token of reading exercises is in the loss; the game itself is still unknown."""
        return self._sft(
            "base",
            lambda: new_model(self.tokenizer, self.recipe.shape, self.seed),
            self.exercises,
            self._sft_config("all", self.recipe.base_steps, 3e-3, "constant_with_warmup"),
            show,
        )

    def train_student(self, base: Path, show: ProgressCallback) -> Path:
        """Imitate the oracle until a share of the validation questions is answered right."""
        validation = self.tasks("validation", 2, 100)
        stop = StopAtShare(lambda model: self.play(model, validation), self.recipe.student_share)
        config = self._sft_config("action", self.recipe.student_steps, 1e-3, "constant_with_warmup")
        return self._sft("student", lambda: _load(base), lambda: self.demonstrations, config, show, [stop])

    def train_teacher(self, base: Path, show: ProgressCallback) -> Path:
        """Imitate the oracle to the end."""
        config = self._sft_config("action", self.recipe.teacher_steps, 2e-3, "cosine")
        return self._sft("teacher", lambda: _load(base), lambda: self.demonstrations, config, show)

    def train_memopd(self, student: Path, teacher: Path, show: ProgressCallback) -> Path:
        """PPO and full-vocabulary distillation from the frozen teacher, on the student's own episodes."""
        out = self.out / "memopd"
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

    # Measure

    def evaluate(self, name: str, num_questions: int, model: Path | None = None) -> dict[str, Any]:
        """Measure an agent on held-out tasks; what was played before is not played again.

        Args:
            name: ``oracle``, ``random``, or what to call the model.
            num_questions: Which of the held-out sets.
            model: Folder of the model; None for the scripted agents.
        """
        tasks = self.tasks("test", num_questions, self.recipe.test_tasks[num_questions])
        agent: PolicyAgent | Callable[[], Any]
        if model is not None:
            sampling = SamplingParams(max_tokens=32 + 16 * num_questions, temperature=0.0)
            agent = PolicyAgent(HFEngine(_load(model).eval(), self.tokenizer), self.tokenizer, sampling)
        else:
            agent = RandomAgent if name == "random" else lambda: OracleAgent(tasks)
        return evaluate(
            agent,
            lambda: self.env(tasks),
            range(len(tasks)),
            self.out / "evaluation" / f"{name}-q{num_questions}",
            name=name,
            seed=self.seed,
            settings={"instructions": "terse", "world": self.world.describe()},
            corpus_hash=self.world.corpus_hash,
            count_tokens=lambda text: len(self.tokenizer.encode(text)),
            counter_name="the students' tokenizer",
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
        return train_sft(
            model(), self.tokenizer, episodes(), self.out / name, config, on_progress=show, callbacks=callbacks
        )

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
    try:
        return load_causal_lm(str(folder))
    except ConfigError as problem:
        raise ConfigError(
            f"{problem}. To train it anew, remove {folder.parent} and run the same command again"
        ) from problem


def run_quickstart(
    out: str | Path, seed: int = 0, recipe: Recipe | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Run every stage that is not finished, and report.

    Args:
        out: Folder; the same folder continues.
        seed: Seed of everything.
        recipe: How much of everything.
        console: Where progress and the table go.

    Returns:
        The content of ``result.json``.

    Raises:
        ConfigError: If the folder holds a quickstart with another seed or recipe.
        TrainingInterrupted: After Ctrl-C, once the state is saved.
    """
    screen = console or Console()
    quickstart = Quickstart(out, seed, recipe)
    clock = _Clock(quickstart)
    stages = {
        "base": quickstart.train_base,
        "student": lambda show: quickstart.train_student(models["base"], show),
        "teacher": lambda show: quickstart.train_teacher(models["base"], show),
        "memopd": lambda show: quickstart.train_memopd(models["student"], models["teacher"], show),
    }
    models: dict[str, Path] = {}
    with clock("world"):
        quickstart.make_world()
    for number, (name, stage) in enumerate(stages.items(), start=1):
        title, finished = f"{number}/{len(stages) + 1} {name}", quickstart.out / name / "model"
        if finished.is_dir():
            screen.print(f"{title}: done")
            models[name] = finished
            continue
        with clock(name), progress_line(title) as show:
            models[name] = stage(show)
    agents = {"oracle": None, "random": None, **{name: models[name] for name in ("student", "teacher", "memopd")}}
    results = []
    with clock("evaluation"), progress_line(f"{len(stages) + 1}/{len(stages) + 1} evaluation") as show:
        plan = [(number, name) for number in quickstart.recipe.test_tasks for name in agents]
        for done, (number, name) in enumerate(plan):
            show(Progress(f"Q{number} {name}", done, len(plan), 0.0))
            results.append(quickstart.evaluate(name, number, agents[name]))
    return _report(quickstart, results, clock.seconds, screen)


class _Clock:
    """Measures the stages, over all sessions it took to finish them, and guards the folder against another recipe."""

    def __init__(self, quickstart: Quickstart) -> None:
        self._path = quickstart.out / "quickstart.json"
        protocol = {"seed": quickstart.seed, "recipe": json.loads(json.dumps(asdict(quickstart.recipe)))}
        held = self._read() if self._path.exists() else {**protocol, "seconds": {}}
        if any(held[key] != protocol[key] for key in protocol):
            raise ConfigError(
                f"{quickstart.out} holds a quickstart with another seed or recipe: use another --out, or remove it"
            )
        self._protocol, self.seconds = protocol, held["seconds"]
        self._save()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before, started = self.seconds.get(stage, 0.0), time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = round(before + time.monotonic() - started, 1)
            self._save()

    def _read(self) -> dict[str, Any]:
        try:
            held = json.loads(self._path.read_text())
            return {"seed": held["seed"], "recipe": held["recipe"], "seconds": dict(held["seconds"])}
        except (ValueError, TypeError, KeyError) as problem:
            raise ConfigError(f"{self._path} is damaged: use another --out, or remove it") from problem

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({**self._protocol, "seconds": self.seconds}, indent=1))
        partial.replace(self._path)


def _report(
    quickstart: Quickstart, results: Sequence[dict[str, Any]], seconds: dict[str, float], console: Console
) -> dict[str, Any]:
    out = quickstart.out
    shutil.copyfile(out / "memopd" / "metrics.jsonl", out / "metrics.jsonl")
    first = min(quickstart.recipe.test_tasks)
    shutil.copyfile(out / "evaluation" / f"memopd-q{first}" / "episodes.jsonl", out / "episodes.jsonl")
    by_name = {result["agent"]: result for result in results if result["num_questions"] == [first]}
    draw_learning_curve(
        read_metrics(out / "metrics.jsonl"),
        {name: by_name[name]["metrics"]["em"]["mean"] for name in ("oracle", "teacher", "student", "memopd")},
        out / "learning_curve.png",
    )
    result = {"seed": quickstart.seed, "seconds": seconds, "results": list(results)}
    partial = out / "result.json.partial"
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(out / "result.json")
    console.print(results_table(results))
    minutes = sum(seconds.values()) / 60
    console.print(
        f"{minutes:.1f} minutes: " + ", ".join(f"{stage} {spent:.0f} s" for stage, spent in seconds.items()) + "\n\n"
        f"Everything is in {escape(str(out))}: "
        "result.json, episodes.jsonl, metrics.jsonl, learning_curve.png, models.\n"
        "Next:\n"
        f"  memopd inspect {escape(str(out / 'episodes.jsonl'))}   # what the model saw and wrote, call by call\n"
        "  memopd play                                   # play an episode yourself\n"
        "  memopd eval --help                            # your agent, your tasks, your corpus\n"
        "  memopd train memopd --help                    # your model",
        highlight=False,
        soft_wrap=True,
    )
    return result


def results_table(results: Sequence[dict[str, Any]]) -> Table:
    """Return one table of evaluations, grouped by number of questions; fits 80 columns.

    Args:
        results: As :func:`memopd_agents.evaluation.evaluate` returns them.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="held-out tasks, entities never trained on")
    table.add_column("env")
    table.add_column("agent")
    columns = {"EM": ("em", 2), "F1": ("f1", 2), "peak tokens": ("peak_tokens", 0), "searches": ("searches", 1)}
    for head in (*columns, "invalid %"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, result in enumerate(results):
        metrics, questions = result["metrics"], result["num_questions"][0]
        cells = [_cell(metrics[name], digits) for name, digits in columns.values()]
        last = number + 1 == len(results) or results[number + 1]["num_questions"][0] != questions
        invalid = _cell({key: 100 * value for key, value in metrics["invalid_rate"].items()}, 1)
        table.add_row(f"Q{questions}", result["agent"], *cells, invalid, end_section=last)
    tasks = ", ".join(f"Q{r['num_questions'][0]} {r['episodes']['scored']}" for r in results if r["agent"] == "memopd")
    table.caption = f"tasks: {tasks}. EM and F1 are sums over the questions, ± half of the 95 % interval"
    return table


def _cell(metric: dict[str, float], digits: int) -> str:
    return f"{metric['mean']:.{digits}f} ±{(metric['high'] - metric['low']) / 2:.{digits}f}"


def draw_learning_curve(metrics: Sequence[dict[str, Any]], levels: dict[str, float], path: Path) -> None:
    """Draw reward and divergence over the iterations of a training.

    Args:
        metrics: Lines of a ``metrics.jsonl``.
        levels: Held-out exact matches to mark, by agent.
        path: PNG to write.
    """
    from matplotlib.figure import Figure  # the object interface needs no display and leaves no global state

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    iterations = [line["iteration"] for line in metrics]
    left.plot(iterations, [line["reward"] for line in metrics], color="tab:blue", label="training, sampled")
    measured = [(line["iteration"], line["eval_em"]) for line in metrics if "eval_em" in line]
    left.plot(*zip(*measured, strict=True), "o-", color="tab:orange", label="validation, greedy")
    for (name, level), style in zip(levels.items(), ("-", "--", ":", "-."), strict=False):
        left.axhline(level, color="grey", linestyle=style, linewidth=1, label=f"{name}, held-out test")
    left.set(xlabel="iteration", ylabel="right answers per episode", title="MemOPD on Q2", ylim=(0, None))
    left.legend(fontsize=7)
    right.plot(iterations, [line["opd"] for line in metrics], color="tab:green", label="KL(student || teacher)")
    right.plot(iterations, [line["entropy"] for line in metrics], color="tab:purple", label="entropy of the student")
    right.set(xlabel="iteration", ylabel="nats per sampled token", title="Distillation", ylim=(0, None))
    right.legend(fontsize=7)
    figure.savefig(path, dpi=130)
