"""``memopd doctor``: say what works in this installation, and what to install for the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# extra -> (distribution, module); the core needs no extra.
PACKAGES = {
    "": (
        ("gymnasium", "gymnasium"),
        ("numpy", "numpy"),
        ("bm25s", "bm25s"),
        ("pyarrow", "pyarrow"),
        ("httpx", "httpx"),
    ),
    "retrieval": (("faiss-cpu", "faiss"), ("fastapi", "fastapi"), ("uvicorn", "uvicorn")),
    "train": (("torch", "torch"), ("transformers", "transformers"), ("trl", "trl"), ("accelerate", "accelerate")),
    "chat": (("openai", "openai"),),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        state: ``ok``, ``missing`` (optional) or ``broken``.
        note: Version, measurement or cure.
    """

    name: str
    state: str
    note: str


def doctor() -> None:
    """Look at this installation: packages, environments, devices.

    Example: memopd doctor
    """
    table = Table(title=f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores")
    for column in ("", "state", ""):
        table.add_column(column)
    findings = [*packages(), environments(), devices()]
    for finding in findings:
        colour = {"ok": "green", "missing": "yellow", "broken": "red"}[finding.state]
        table.add_row(escape(finding.name), f"[{colour}]{finding.state}[/{colour}]", escape(finding.note))
    Console().print(table)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def packages() -> Iterator[Finding]:
    """Look up every package the project can use, without importing it."""
    for extra, members in PACKAGES.items():
        for distribution, module in members:
            if importlib.util.find_spec(module) is None:
                cure = f"pip install 'memopd[{extra}]'" if extra else "pip install memopd"
                yield Finding(distribution, "missing" if extra else "broken", cure)
                continue
            try:
                yield Finding(distribution, "ok", version(distribution))
            except PackageNotFoundError:
                # The same module from another distribution, e.g. faiss-gpu.
                yield Finding(module, "ok", "(version unknown)")


def environments() -> Finding:
    """Play one turn in the built-in world."""
    import gymnasium as gym

    started = time.perf_counter()
    try:
        env = gym.make("memopd_env:MemOPD-Q2")
        env.reset(seed=0)
        ready = time.perf_counter() - started
        env.step("<search>year</search>")
    except Exception as error:
        return Finding("MemOPD-Q2", "broken", f"{type(error).__name__}: {error}")
    return Finding("MemOPD-Q2", "ok", f"first observation after {ready:.2f} s")


def devices() -> Finding:
    """Say what torch could train on."""
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "missing", "no torch: the gym works, training needs pip install 'memopd[train]'")
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("device", "ok", f"{torch.cuda.device_count()} CUDA device(s): {names}")
    return Finding("device", "ok", f"CPU, {torch.get_num_threads()} thread(s); no CUDA device")
