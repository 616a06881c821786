"""An evaluation is a folder: what is measured, the episodes as they come, and the result when they are all there.

``run.json`` fixes the protocol before the first episode: agent, environment, tasks by hash, seed. ``episodes.jsonl``
only grows, so the same call on the same folder goes on where it stopped, and a different protocol on it is refused.
``result.json`` is a function of the other two.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from memopd_agents.agent import Agent
from memopd_agents.metrics import measure
from memopd_agents.play import play_episodes
from memopd_agents.policy import PolicyAgent
from memopd_agents.rollout import EpisodeCallback, rollout
from memopd_agents.terminal import visible
from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.tasks.task import Task

FORMAT = 1
EPISODES, RUN, RESULT = "episodes.jsonl", "run.json", "result.json"
_PACKAGES = ("memopd", "gymnasium", "numpy", "bm25s", "torch", "transformers", "vllm", "openai")


def evaluate(
    agent: PolicyAgent | Callable[[], Agent],
    make_env: Callable[[], gym.Env[Any, Any]],
    task_indices: Sequence[int],
    out: str | Path,
    *,
    name: str,
    seed: int = 0,
    workers: int = 8,
    max_active: int = 64,
    settings: Mapping[str, Any] | None = None,
    corpus_hash: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
    counter_name: str = "",
    on_episode: EpisodeCallback | None = None,
) -> dict[str, Any]:
    """Play one episode per task index, measure them, and leave everything in a folder.

    Args:
        agent: A :class:`PolicyAgent`, which is played token by token in one rollout, or a function that makes agents
            that work on text, one for each worker.
        make_env: Makes a MemOPD environment; all of them hold the same tasks.
        task_indices: Which tasks; repeat an index to play a task several times.
        out: The folder.
        name: What the result calls the agent.
        seed: Run seed; every episode and request is seeded from it.
        workers: Threads for agents that work on text.
        max_active: Most episodes in progress for a policy.
        settings: How the environment was made, for the record (JSON-able).
        corpus_hash: Hash of the passages that are searched, for the record.
        count_tokens: Counts the tokens of a text, for agents without token ids.
        counter_name: What the result calls ``count_tokens``.
        on_episode: Progress callback.

    Returns:
        The content of ``result.json``: what :func:`memopd_agents.metrics.measure` returns, and ``format``, ``agent``,
        ``env``, ``num_questions``, ``task_set_hash``, ``corpus_hash``, ``seed``, ``sampling`` (of a policy),
        ``wall_time_s``, ``versions``, ``hardware``.

    Raises:
        ConfigError: If the folder holds an evaluation of something else, or an argument makes no sense.
        RolloutError: If an agent, an environment or the retriever fails; call again to go on.
    """
    if seed < 0 or not task_indices or workers < 1 or max_active < 1:
        raise ConfigError(
            f"an evaluation of {len(task_indices)} episodes with seed {seed}, workers {workers} and max_active "
            f"{max_active}: there must be an episode, the seed must not be negative, and the others at least 1"
        )
    out = Path(out)
    env = cast(MemOPDEnv, make_env().unwrapped)
    tasks = [env.tasks[index] for index in task_indices]
    protocol = {
        "format": FORMAT,
        "agent": name,
        "env": {"max_turns": env.max_turns, "top_k": env.top_k, "memory": repr(env.memory), **(settings or {})},
        "task_set_hash": task_set_hash(tasks),
        "corpus_hash": corpus_hash,
        "seed": seed,
    }
    if isinstance(agent, PolicyAgent):
        protocol["sampling"] = asdict(agent.sampling)
    earlier = _begin(out, protocol)
    started = time.monotonic()
    common: dict[str, Any] = {"seed": seed, "path": out / EPISODES, "on_episode": on_episode}
    try:
        if isinstance(agent, PolicyAgent):
            tokenizer = agent.builder.tokenizer
            options = {
                "sampling": agent.sampling,
                "max_active": max_active,
                "keep_text": True,
                "builder": agent.builder,
            }
            episodes = rollout(agent.engine, tokenizer, make_env, task_indices, **options, **common)
        else:
            episodes = play_episodes(agent, make_env, task_indices, workers=workers, **common)
    finally:
        spent = earlier + time.monotonic() - started
        _write_json(out / RUN, {**protocol, "wall_time_s": spent})
    known = {task.id: task for task in tasks}
    figures = measure(episodes, known, count_tokens=count_tokens, counter_name=counter_name, seed=seed)
    result = {
        **protocol,
        "num_questions": sorted({len(task.questions) for task in tasks}),
        **figures,
        "wall_time_s": spent,
        "versions": _versions(),
        "hardware": _hardware(),
    }
    _write_json(out / RESULT, result)
    return result


def task_set_hash(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 of ids, questions and accepted answers, in the order in which they are played."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.id, task.questions, task.answers]).encode() + b"\n")
    return digest.hexdigest()


def format_table(results: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Return results side by side, each figure with its 95 % interval.

    Args:
        results: As :func:`evaluate` returns them.
        title: Above the table.
    """
    heads = ("EM", "F1", "sub-EM", "peak tokens", "searches", "turns", "invalid", "n")
    rows = [(_row(result), result["agent"]) for result in results]
    table = Table(title=title or None, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("agent", overflow="fold")
    for column, head in enumerate(heads):
        # Figures are never broken over lines; heads and names are, where the terminal is narrow.
        width = max((len(cells[column]) for cells, _ in rows), default=0)
        table.add_column(head, justify="right", min_width=width, overflow="fold")
    for cells, name in rows:
        table.add_row(Text(visible(name)), *cells)
    questions = sorted({number for result in results for number in result["num_questions"]})
    table.caption = (
        f"EM, F1, sub-EM: sums over {', '.join(map(str, questions))} questions; n episodes; ± half of the 95 % interval"
    )
    return table


def _row(result: Mapping[str, Any]) -> list[str]:
    metrics, counts = result["metrics"], result["episodes"]
    cells = [_cell(metrics[name], 2) for name in ("em", "f1", "sub_em")]
    cells += [_cell(metrics["peak_tokens"], 0), _cell(metrics["searches"], 1), _cell(metrics["turns"], 1)]
    cells.append(_cell(metrics["invalid_rate"], 1, scale=100, unit="%"))
    excluded = f" (+{counts['excluded']} excluded)" if counts["excluded"] else ""
    return [*cells, f"{counts['scored']}{excluded}"]


def _cell(metric: Mapping[str, float], digits: int, scale: float = 1, unit: str = "") -> str:
    half = (metric["high"] - metric["low"]) / 2
    return f"{scale * metric['mean']:.{digits}f}±{scale * half:.{digits}f}{unit}"


def _begin(out: Path, protocol: Mapping[str, Any]) -> float:
    """Fix the protocol of a folder; return the seconds that were spent on it before."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / RUN
    if not path.exists():
        if (out / EPISODES).exists():
            raise ConfigError(f"{out} holds {EPISODES} but no {RUN}: it is not an evaluation; use another folder")
        _write_json(path, {**protocol, "wall_time_s": 0.0})
        return 0.0
    held = _read_run(path)
    current = json.loads(json.dumps(protocol))
    differing = [key for key in current if held.get(key) != current[key]]
    if differing:
        raise ConfigError(
            f"{out} holds an evaluation with another {', '.join(differing)} ({held.get(differing[0])!r}, now "
            f"{current[differing[0]]!r}): use another folder, or the settings that it was started with"
        )
    return held["wall_time_s"]


def _read_run(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return {**held, "wall_time_s": float(held["wall_time_s"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}): use another folder, or remove "
            f"{path.parent} to begin anew"
        ) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line.partition(":")[2].strip() for line in information.open() if line.startswith("model name")]
        hardware["cpu"] = models[0] if models else ""
    if "torch" in sys.modules:
        import torch

        hardware["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return hardware
