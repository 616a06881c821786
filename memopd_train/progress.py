"""What a long run tells the world: one `Progress` value per step, and one line of JSON per logged step, always.

The trainers only call a function with a `Progress`; whoever started them decides whether that becomes a rich progress
line, a notebook widget or nothing. Metrics are written whatever happens, and a resumed run continues its file as if
it had never stopped: lines past the checkpoint are dropped first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: What is being done now, e.g. ``sft``, ``play``, ``learn``, ``evaluate``.
        step: Steps done.
        total: Steps of the whole run.
        seconds: Wall-clock seconds since the run started, earlier sessions included.
        metrics: Newest metrics, e.g. ``{"reward": 1.2}``.
    """

    stage: str
    step: int
    total: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


ProgressCallback = Callable[[Progress], None]


class MetricsLog:
    """An append-only JSONL file with one object per logged step.

    Args:
        path: The file; its folder is made.
        resume_step: Keep lines up to this step and drop later ones; None starts an empty file.

    Attributes:
        last: The last kept line, empty when there is none.
        seconds_before: Its ``seconds``: the wall-clock time earlier sessions used.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [line for line in read_metrics(self.path) if line["step"] <= resume_step]
        self.last: dict = kept[-1] if kept else {}
        self.seconds_before = float(self.last.get("seconds", 0.0))
        rewritten = self.path.with_suffix(".jsonl.tmp")
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(rewritten, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, object]) -> None:
        """Append one line; it is on its way to the disk when this returns."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict]:
    """Read a metrics file; a last line that was cut short by a crash is left out, a missing file is empty."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        lines.append(record)
    return lines


@contextmanager
def progress_line(title: str) -> Iterator[ProgressCallback]:
    """A live rich line: stage, bar, step, newest metrics, time left. For the edge of a command line."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns) as rich:
        bar = rich.add_task(title, total=None, news="")

        def show(progress: Progress) -> None:
            news = "  ".join(f"{name} {value:.3g}" for name, value in progress.metrics.items())
            rich.update(
                bar,
                description=f"{title}: {progress.stage}",
                completed=progress.step,
                total=progress.total,
                news=news,
            )

        yield show
