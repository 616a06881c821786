"""``memopd world``: write the built-in world to files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from memopd_env.tasks.io import write_tasks
from memopd_env.tasks.world import SPLITS, World, WorldConfig

app = typer.Typer(help="The built-in world.", add_completion=False)


@app.callback()
def group() -> None:
    """Write the built-in world to files."""


@app.command()
def build(
    out: Annotated[Path, typer.Argument(help="Folder for corpus.jsonl, the task files and world.json.")],
    preset: Annotated[str, typer.Option(help="default or tiny.")] = "default",
    passages: Annotated[int | None, typer.Option(help="Number of passages, 100 to 1,000,000.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed is another world.")] = None,
    num_questions: Annotated[int, typer.Option("--num-questions", "-n", min=1, help="Questions a task.")] = 2,
    count: Annotated[int, typer.Option(min=0, help="Tasks a split; 0 writes none.")] = 500,
) -> None:
    """Write the corpus and, for every split, tasks about it.

    Example: memopd world build worlds/large --passages 100000
    """
    given = {"passages": passages, "seed": seed}
    config = WorldConfig.preset(preset, **{name: value for name, value in given.items() if value is not None})
    world = World(config)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with console.status(f"writing {config.passages:,} passages"):
        world.write_corpus(out / "corpus.jsonl")
    seconds = time.perf_counter() - started
    console.print(f"corpus.jsonl: {config.passages:,} passages, {config.passages / seconds:,.0f} a second")
    for split in SPLITS if count else ():
        tasks = world.tasks(num_questions, split, count, config.seed)
        write_tasks(tasks, out / f"{split}.jsonl")
        console.print(f"{split}.jsonl: {len(tasks):,} tasks of {num_questions} question(s)")
    (out / "world.json").write_text(json.dumps(world.describe(), indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {escape(str(out))}")
