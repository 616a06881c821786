"""The ``memopd`` command: a list of sub-commands, each imported only when it is run.

Every installed package registers its sub-commands in the entry-point group ``memopd.commands``; an entry is a Typer app
or a function with Typer annotations. Listing them reads package metadata and nothing else, so ``memopd --help`` is
instant and an installation without the trainer has no trainer's command.

This is also the place where errors end: whatever the project raises on purpose, and whatever the operating system
refuses (a full disk, a folder that may not be written), is one line and exit status 2.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

from memopd_env.errors import MemOPDError

GROUP = "memopd.commands"

SUMMARIES = {
    "quickstart": "train and measure a small agent on this machine",
    "play": "play an episode yourself",
    "eval": "measure an agent",
    "inspect": "walk through a file of episodes",
    "train": "train: sft, memopd",
    "audit": "check that training sees the states that were sampled in",
    "leaderboard": "add, check and render results",
    "report": "write an HTML report",
    "data": "task files: compose, convert, inspect",
    "world": "the built-in world: build",
    "retriever": "search: build, serve, query, download",
    "doctor": "look at this installation",
}

# Which extra brings a module that a sub-command may miss.
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "trl", "accelerate", "datasets", "safetensors", "matplotlib"), "train"),
    **dict.fromkeys(("faiss", "fastapi", "uvicorn", "prometheus_client", "psutil"), "retrieval"),
    **dict.fromkeys(("vllm", "flash_attn", "liger_kernel"), "gpu"),
    "openai": "chat",
    "qdrant_client": "qdrant",
    "wandb": "wandb",
}

# What to do when the operating system says no.
CURES = {
    errno.ENOSPC: "make room on the disk that is written to, then run the same command again",
    errno.EDQUOT: "make room on the disk that is written to, then run the same command again",
    errno.EACCES: "change its permissions, or name another path",
    errno.EPERM: "change its permissions, or name another path",
    errno.EROFS: "name a path on a disk that can be written",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file; name another path",
    errno.EEXIST: "it is a file where a folder is needed; name another path",
    errno.ENAMETOOLONG: "use a shorter path",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``memopd``; returns the exit status (0 done, 1 the command says no, 2 bad input, 130 or 143 stopped)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(_overview(commands))
        return 0
    if given[0] == "--version":
        sys.stdout.write(f"memopd {_version()}\n")
        return 0
    if given[0] not in commands:
        return _fail(f"there is no sub-command {given[0]!r}; choose from {', '.join(sorted(commands))}")
    try:
        with _termination():
            return _run(commands[given[0]], given[1:])
    except MemOPDError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(_refusal(error))
    except _Terminated:
        return _fail("terminated", status=143)
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)


class _Terminated(BaseException):
    """A scheduler or ``kill`` asked the process to end: unwind as after Ctrl-C, so that files are closed in order."""


@contextmanager
def _termination() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(entry: EntryPoint, arguments: list[str]) -> int:
    import typer

    try:
        loaded: Any = entry.load()
        if not isinstance(loaded, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command()(loaded)
            loaded = app
        typer.main.get_command(loaded).main(args=arguments, prog_name=f"memopd {entry.name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("memopd_"):
            return _fail(f"memopd {entry.name} is not part of this installation ({error.name} is not there)")
        if missing not in EXTRAS:
            raise
        return _fail(f"memopd {entry.name} needs {missing}: pip install 'memopd[{EXTRAS[missing]}]'")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _overview(commands: dict[str, EntryPoint]) -> str:
    known = [name for name in SUMMARIES if name in commands]
    others = sorted(set(commands) - set(known))
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {SUMMARIES.get(name, commands[name].value)}".rstrip() for name in (*known, *others)]
    return "\n".join(
        (
            "usage: memopd COMMAND [OPTIONS]",
            "",
            "The gym for search agents that must forget, and their trainer.",
            "",
            *lines,
            "",
            "memopd COMMAND --help shows its options and an example.",
            "",
        )
    )


def _version() -> str:
    try:
        return version("memopd")
    except PackageNotFoundError:
        return "(not installed)"


def _refusal(error: OSError) -> str:
    parts = [str(error.filename)] if error.filename is not None else []
    parts.append(error.strerror or str(error) or type(error).__name__)
    cure = CURES.get(error.errno or 0)
    return ": ".join(parts) + (f"; {cure}" if cure else "")


def _fail(message: str, status: int = 2) -> int:
    # One line, and nothing in it that a terminal would act on.
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\033[31m{line}\033[0m"
    sys.stderr.write(f"memopd: {line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
