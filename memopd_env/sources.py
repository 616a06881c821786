"""Where an environment gets its tasks and its passages from: what the caller gave, or else the built-in world.

The built-in world is made once per process and setting, and indexed only when somebody searches, so that an environment
is there at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage, Retriever
from memopd_env.tasks.io import read_tasks
from memopd_env.tasks.task import Task

if TYPE_CHECKING:
    from memopd_env.tasks.world import World, WorldConfig

BUILT_IN_TASKS = 500


def resolve_tasks(
    tasks: Sequence[Task] | str | Path | None,
    split: str | None,
    num_questions: int | None,
    world: str | WorldConfig,
) -> Sequence[Task]:
    """Return the tasks that an environment plays.

    Raises:
        ConfigError: If none is left, something in the list is no Task, or one asks another number of questions.
        TaskError: If a task file is missing or malformed.
    """
    if tasks is None:
        return _built_in_tasks(_config(world), num_questions or 2, split or "train")
    given = read_tasks(tasks) if isinstance(tasks, (str, Path)) else tasks
    for item in given:
        if not isinstance(item, Task):
            raise ConfigError(f"tasks holds {item!r}; give memopd_env.Task objects, or the path of a task file")
    chosen = given if split is None else [task for task in given if task.split == split]
    if not chosen:
        raise ConfigError("there are no tasks" + ("" if split is None else f" of split {split!r}"))
    for task in chosen:
        if num_questions is not None and len(task.questions) != num_questions:
            raise ConfigError(
                f"this environment asks {num_questions} question(s), but task {task.id!r} has {len(task.questions)}: "
                "take the environment of that number, or compose other tasks with `memopd data compose -n N`"
            )
    return tuple(chosen)


def resolve_retriever(
    retriever: Retriever | str | Path | None, tasks: Sequence[Task] | str | Path | None, world: str | WorldConfig
) -> Retriever:
    """Return the retriever that answers an environment's searches.

    Raises:
        ConfigError: If it is none, or if tasks come from a file and no retriever was given.
    """
    if retriever is None:
        if isinstance(tasks, (str, Path)):
            raise ConfigError(
                f"tasks come from {tasks}, so say where to search: retriever=URL of a server, path of a corpus .jsonl, "
                "or a Retriever"
            )
        return _built_in_retriever(_config(world))
    if isinstance(retriever, str) and retriever.startswith(("http://", "https://")):
        from memopd_env.retrieval import HTTPRetriever

        return HTTPRetriever(retriever)
    if isinstance(retriever, (str, Path)):
        path = Path(retriever)
        if (path / "manifest.json").is_file():
            from memopd_env.retrieval import DenseRetriever

            return DenseRetriever.open(path)
        return _corpus_retriever(path, path.stat().st_mtime_ns if path.exists() else 0)
    if not callable(getattr(retriever, "search", None)):
        raise ConfigError(f"retriever is {retriever!r}, which has no search(queries, k) method")
    return retriever


class WorldRetriever:
    """Word search over the built-in world; the index is built at the first search.

    Args:
        config: Which world.
    """

    def __init__(self, config: WorldConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._index: Retriever | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages, best first."""
        if self._index is None:
            with self._lock:
                if self._index is None:
                    from memopd_env.retrieval.sparse import SparseRetriever

                    self._index = SparseRetriever.from_passages(list(built_in_world(self._config).passages()))
        return self._index.search(queries, k)

    def __reduce__(self) -> tuple[object, tuple[WorldConfig]]:
        return _built_in_retriever, (self._config,)


@lru_cache(maxsize=8)
def built_in_world(config: WorldConfig) -> World:
    """Return the world of this setting, made once per process."""
    from memopd_env.tasks.world import World

    return World(config)


def _config(world: str | WorldConfig) -> WorldConfig:
    from memopd_env.tasks.world import WorldConfig

    return WorldConfig.preset(world) if isinstance(world, str) else world


@lru_cache(maxsize=32)
def _built_in_tasks(config: WorldConfig, num_questions: int, split: str) -> Sequence[Task]:
    return tuple(built_in_world(config).tasks(num_questions, split, BUILT_IN_TASKS, config.seed))


@lru_cache(maxsize=8)
def _built_in_retriever(config: WorldConfig) -> WorldRetriever:
    return WorldRetriever(config)


@lru_cache(maxsize=4)
def _corpus_retriever(path: Path, modified_ns: int) -> Retriever:
    from memopd_env.retrieval.sparse import SparseRetriever

    return SparseRetriever.from_corpus(path)
