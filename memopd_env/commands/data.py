"""``memopd data``: compose, convert and inspect task files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memopd_env.errors import ConfigError
from memopd_env.tasks.compose import compose_file
from memopd_env.tasks.io import read_tasks, write_tasks

Number = TypeVar("Number", int, float)

app = typer.Typer(help="Compose, convert and inspect task files.", no_args_is_help=True, add_completion=False)


@app.command()
def compose(
    file: Annotated[Path, typer.Argument(help="QA file, JSONL or parquet: id, question, golden_answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the task files and manifest.json.")],
    num_questions: Annotated[int, typer.Option("--num-questions", "-n", help="Questions a task.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits and shuffles.")] = 0,
    split_file: Annotated[
        Path | None, typer.Option(help="JSON object: for every split the ids of its questions.")
    ] = None,
    share: Annotated[
        list[str] | None, typer.Option(help="Share of a split, e.g. --share train=0.8 --share test=0.2.")
    ] = None,
    count: Annotated[list[str] | None, typer.Option(help="Tasks of a split, e.g. --count train=5000.")] = None,
    format: Annotated[str, typer.Option(help="jsonl or parquet.")] = "jsonl",
) -> None:
    """Make N-question tasks with disjoint splits from single questions.

    Example: memopd data compose qa.jsonl --out tasks/q2 -n 2 --count train=4000
    """
    manifest = compose_file(
        file,
        out,
        num_questions,
        seed=seed,
        counts=_pairs("count", count, int),
        shares=_pairs("share", share, float) or None,
        split_file=split_file,
        suffix=f".{format.removeprefix('.')}",
    )
    table = Table(title=f"{_shown(str(out))}: {num_questions} question(s) a task")
    for column in ("split", "tasks", "different questions", "file"):
        table.add_column(column)
    for split, entry in manifest["splits"].items():
        table.add_row(_shown(split), str(entry["tasks"]), str(entry["questions"]), _shown(entry["file"]))
    console = Console()
    console.print(table)
    for name in ("left_out_conflicting", "left_out_duplicate", "left_out_unlisted", "entities_in_two_splits"):
        if manifest[name]:
            console.print(f"{name.replace('_', ' ')}: {manifest[name]}")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Task file to read, .jsonl or .parquet.")],
    target: Annotated[Path, typer.Argument(help="Task file to write, .jsonl or .parquet.")],
) -> None:
    """Rewrite a task file in the other format.

    Example: memopd data convert test.parquet test.jsonl
    """
    tasks = read_tasks(source)
    write_tasks(tasks, target)
    Console().print(f"{len(tasks)} tasks: {_shown(str(target))}")


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="Task file, .jsonl or .parquet.")],
    show: Annotated[int, typer.Option(min=0, help="Tasks to show.")] = 3,
) -> None:
    """Check a task file and say what is in it.

    Example: memopd data inspect tasks/q2/test.jsonl --show 1
    """
    tasks = read_tasks(file)
    console = Console()
    table = Table(title=_shown(str(file)), show_header=False)
    table.add_row("tasks", str(len(tasks)))
    table.add_row("questions a task", _counts(len(task.questions) for task in tasks))
    table.add_row("accepted answers a question", _counts(len(golds) for task in tasks for golds in task.answers))
    table.add_row("splits", _shown(_counts(task.split or "(none)" for task in tasks)))
    table.add_row("sources", _shown(_counts(task.source or "(none)" for task in tasks)))
    console.print(table)
    for task in tasks[:show]:
        console.print(f"[bold]{_shown(task.id)}[/bold]")
        for question, golds in zip(task.questions, task.answers, strict=True):
            console.print(f"  {_shown(question)}  [green]{_shown(' | '.join(golds))}[/green]")


def _shown(text: str) -> str:
    """Make text from a file harmless for a terminal."""
    return escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _counts(values: object) -> str:
    counted = Counter(values)  # type: ignore[arg-type]
    shown = ", ".join(f"{value}: {number}" for value, number in counted.most_common(6))
    return shown if len(counted) <= 6 else f"{shown}, ..."


def _pairs(option: str, given: list[str] | None, kind: type[Number]) -> dict[str, Number]:
    pairs = {}
    for item in given or []:
        name, _, value = item.partition("=")
        try:
            pairs[name] = kind(value)
        except ValueError:
            example = "train=1000" if kind is int else "train=0.8"
            raise ConfigError(f"--{option} {item!r}: write split=number, e.g. {example}") from None
    return pairs
