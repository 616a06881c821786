"""``memopd quickstart``: the whole loop with one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of everything it writes; the same folder continues.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the world, the weights and the play.")] = 0,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Every stage in small: checks the set-up, teaches nothing.")
    ] = False,
) -> None:
    """Make a world, cold-start a student and a teacher, train the student with MemOPD, measure all of them.

    Example: memopd quickstart --out runs/quickstart
    """
    # Read when torch is loaded. Models this small gain little from a second thread and lose much when cores are shared;
    # and with one thread the same seed is the same run on every machine of a kind.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from transformers.utils import logging as transformers_logging

    from memopd_benchmarks.quickstart import Recipe, run_quickstart
    from memopd_train.errors import TrainingInterrupted

    transformers_logging.disable_progress_bar()
    recipe = (
        Recipe(
            exercises=40, demonstrations=60, base_steps=6, teacher_steps=6, student_steps=4, iterations=2, episodes=8,
            test_tasks={2: 8, 8: 1},
        )
        if smoke
        else Recipe()
    )  # fmt: skip
    try:
        run_quickstart(out, seed, recipe)
    except (TrainingInterrupted, KeyboardInterrupt):
        typer.echo("\nstopped; everything done so far is saved: run the same command again to continue")
        raise typer.Exit(130) from None
