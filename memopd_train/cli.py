"""``memopd train``: the cold start and the training, from flags, a YAML file or both.

What a command does not declare itself is an option of `MemOPDSFTConfig` or `MemOPDConfig`: ``--opd_coef 0.5``, or the
line ``opd_coef: 0.5`` in the file that ``--config`` names. ``memopd train options`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memopd_agents.episode import Episode, read_episodes
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage
from memopd_env.retrieval.corpus import Corpus as CorpusFile
from memopd_env.tasks.task import Task
from memopd_env.tasks.world import World, WorldConfig
from memopd_train.config import MemOPDConfig, MemOPDSFTConfig, load_config, own_options
from memopd_train.errors import TrainingInterrupted
from memopd_train.progress import progress_line

app = typer.Typer(
    help="Train: a cold start by imitation, then PPO with on-policy distillation.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console()
Result = TypeVar("Result")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Out = Annotated[Path, typer.Option(help="Folder of the run.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of options; flags win.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, exactly where it stopped.")]
TaskFile = Annotated[Path | None, typer.Option(help="Task file (.jsonl, .parquet); the built-in world if left out.")]
Corpus = Annotated[str | None, typer.Option(help="Corpus .jsonl to search, or URL of a retrieval server.")]
Questions = Annotated[
    int, typer.Option("--num-questions", "-n", min=1, help="Questions a task, in the built-in world.")
]
WorldName = Annotated[str, typer.Option(help="Preset of the built-in world.")]
Split = Annotated[str | None, typer.Option(help="Only tasks of this split.")]
Memory = Annotated[str, typer.Option(help="Memory policy: consolidate, full, window:K.")]
Texts = Annotated[str, typer.Option(help="Texts around the questions: full, terse, or a template.")]
TopK = Annotated[int, typer.Option(help="Passages per search.")]
MaxTurns = Annotated[int | None, typer.Option(help="Turns of an episode.")]


@app.command(context_settings=PASS_ON)
def sft(
    context: typer.Context,
    out: Out,
    model: Annotated[str, typer.Option(help="Folder, hub name, or new:tiny, new:small, new:medium.")] = "new:small",
    vocab_size: Annotated[int, typer.Option(min=256, help="Tokens that a new model learns from the corpus.")] = 2048,
    episodes: Annotated[Path | None, typer.Option(help="Demonstrations; played by the oracle if left out.")] = None,
    tasks: TaskFile = None,
    corpus: Corpus = None,
    demonstrations: Annotated[int, typer.Option(min=0, help="Tasks that the oracle plays.")] = 2000,
    word_exercises: Annotated[
        int, typer.Option(min=0, help="Exercises in copying random words, mixed in; a new model's first lesson.")
    ] = 0,
    exercises: Annotated[
        int, typer.Option(min=0, help="Exercises in copying sentences of the corpus, mixed in; for new models.")
    ] = 0,
    num_questions: Questions = 2,
    world: WorldName = "default",
    split: Split = None,
    memory: Memory = "consolidate",
    instructions: Texts = "full",
    top_k: TopK = 3,
    max_turns: MaxTurns = None,
    config: ConfigFile = None,
    resume: Resume = False,
) -> None:
    """Cold start: imitate demonstrated episodes.

    Example: memopd train sft --model new:small --tasks train.jsonl --corpus corpus.jsonl --out runs/sft --max_steps
        1000
    """
    from memopd_train import demonstrations as lessons
    from memopd_train.loading import open_model
    from memopd_train.sft import train_sft

    options = load_config(MemOPDSFTConfig, context.args, file=config)
    console.quiet = options.process_index > 0  # one rank speaks for all
    choices = {"memory": memory, "instructions": instructions, "top_k": top_k, "max_turns": max_turns}
    stage = _Stage(tasks, corpus, num_questions, world, split, choices)
    texts = stage.texts() if model.startswith("new:") else None
    policy, tokenizer = open_model(model, texts=texts, vocab_size=vocab_size, seed=options.seed)
    shown: Path | list[Episode] = episodes or []
    if not episodes and demonstrations:
        shown = _played_by_the_oracle(stage, tokenizer, demonstrations)
    if exercises or word_exercises:
        shown = list(read_episodes(shown)) if isinstance(shown, Path) else shown
        passages = list(stage.passages())
        if word_exercises:
            shown += lessons.word_exercises(passages, tokenizer, word_exercises, seed=options.seed)
        if exercises:
            shown += lessons.sentence_exercises(passages, tokenizer, exercises, seed=options.seed)

    def run() -> Path:
        with progress_line("sft") as show:
            return train_sft(policy, tokenizer, shown, out, options, resume=resume, on_progress=show)

    folder = _until_interrupted(run)
    console.print(f"model: {escape(str(folder))}\nmetrics: {escape(str(out / 'metrics.jsonl'))}")
    console.print(f"next: memopd train memopd --model {escape(str(folder))} --teacher TEACHER --out runs/memopd")


@app.command(context_settings=PASS_ON)
def memopd(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The student: a folder or hub name, usually of a cold start.")],
    out: Out,
    teacher: Annotated[str | None, typer.Option(help="The frozen teacher; none with --divergence none.")] = None,
    reference: Annotated[str | None, typer.Option(help="Frozen reference of --reference_kl_coef.")] = None,
    tasks: TaskFile = None,
    eval_tasks: Annotated[Path | None, typer.Option(help="Held-out tasks for --eval_every.")] = None,
    corpus: Corpus = None,
    num_questions: Questions = 2,
    world: WorldName = "default",
    split: Split = None,
    memory: Memory = "consolidate",
    instructions: Texts = "full",
    top_k: TopK = 3,
    max_turns: MaxTurns = None,
    config: ConfigFile = None,
    resume: Resume = False,
) -> None:
    """Train a student by playing: PPO with on-policy distillation from a frozen teacher.

    Example: memopd train memopd --model runs/sft/model --teacher runs/teacher/model --tasks train.jsonl
    --corpus corpus.jsonl --out runs/memopd --iterations 60 --opd_coef 1.0
    """
    from memopd_train.loading import open_model, open_tokenizer
    from memopd_train.trainer import MemOPDTrainer

    options = load_config(MemOPDConfig, [*context.args, "--output_dir", str(out)], file=config)
    console.quiet = options.process_index > 0
    choices = {"memory": memory, "instructions": instructions, "top_k": top_k, "max_turns": max_turns}
    stage = _Stage(tasks, corpus, num_questions, world, split, choices)
    held_out = stage.held_out(eval_tasks) if eval_tasks is not None or options.eval_every else ()
    student, tokenizer = open_model(model)
    teacher_tokenizer = None if teacher is None else open_tokenizer(teacher)

    def run() -> None:
        with progress_line("memopd") as show:
            trainer = MemOPDTrainer(
                model=student,
                teacher=teacher,
                ref_model=reference,
                args=options,
                processing_class=tokenizer,
                env_fn=stage.env,
                train_tasks=stage.tasks,
                eval_tasks=held_out,
                teacher_processing_class=teacher_tokenizer,
                on_progress=show,
            )
            trainer.train(resume_from_checkpoint=resume)

    _until_interrupted(run)
    console.print(f"model: {escape(str(out / 'model'))}\nmetrics: {escape(str(out / 'metrics.jsonl'))}")


@app.command()
def options(
    which: Annotated[str, typer.Argument(help="sft or memopd.")] = "memopd",
) -> None:
    """List the options that can be given as flags or in a YAML file, with their defaults.

    Example: memopd train options sft
    """
    kinds = {"sft": MemOPDSFTConfig, "memopd": MemOPDConfig}
    if which not in kinds:
        raise ConfigError(f"there are options of sft and of memopd, not of {which!r}")
    table = Table("option", "default", "meaning", title=f"memopd train {which}")
    for name, default, meaning in own_options(kinds[which]):
        table.add_row(f"--{name}", escape(str(default)), escape(meaning))
    console.print(table)
    console.print("Every option of transformers.TrainingArguments works too, e.g. --seed 1, --report_to wandb.")


@dataclass(frozen=True)
class _Stage:
    """Where episodes are played: tasks, one retriever, and how environments are made."""

    task_file: Path | None
    corpus: str | None
    num_questions: int
    world: str
    split: str | None
    options: Mapping[str, Any]

    @cached_property
    def _first(self) -> MemOPDEnv:
        return MemOPDEnv(
            self.num_questions if self.task_file is None else None,
            tasks=self.task_file,
            split=self.split,
            retriever=self.corpus,
            world=self.world,
            **self.options,
        )

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks to play."""
        return self._first.tasks

    def env(self, tasks: Sequence[Task]) -> MemOPDEnv:
        """An environment for some tasks; all share the retriever."""
        return MemOPDEnv(tasks=tasks, retriever=self._first.retriever, **self.options)

    def held_out(self, task_file: Path | None) -> Sequence[Task]:
        """Tasks to evaluate on: those of a file, or the validation split of the built-in world."""
        if task_file is not None:
            return replace(self, task_file=task_file, split=None).tasks
        if self.task_file is not None:
            raise ConfigError("--eval_every needs --eval-tasks, a file of held-out tasks")
        return replace(self, split="validation").tasks

    def texts(self) -> Iterator[str] | None:
        """What the tokenizer of a new model learns from; None in a terse built-in world, whose words are known."""
        if self.task_file is None and self.corpus is None and WorldConfig.preset(self.world).style == "terse":
            return None
        return self._read_texts()

    def _read_texts(self) -> Iterator[str]:
        for task in self.tasks:
            yield from task.questions
        for passage in self.passages():
            yield f"{passage.title}\n{passage.text}"

    def passages(self) -> Iterable[Passage]:
        """What is searched, where it can be read: the built-in world or a file; nothing behind a URL."""
        if self.corpus is None:
            return World(WorldConfig.preset(self.world)).passages()
        return () if self.corpus.startswith(("http://", "https://")) else CorpusFile.open(self.corpus)


def _played_by_the_oracle(stage: _Stage, tokenizer: Any, count: int) -> list[Episode]:
    from memopd_agents.scripted import OracleAgent
    from memopd_train.demonstrations import demonstrate

    played = stage.tasks[:count]
    with console.status(f"the oracle plays {len(played)} tasks"):
        return demonstrate(OracleAgent(played), stage.env(played), tokenizer, range(len(played)))


def _until_interrupted(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except TrainingInterrupted as interrupted:
        console.print(f"\n{escape(str(interrupted))}")
        raise typer.Exit(130) from interrupted
