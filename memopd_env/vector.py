"""Many environments, one search a step.

A step of n environments reads n actions, joins the queries of those that search into one call of the retriever, and
hands each its passages. The environments are ordinary :class:`MemOPDEnv` objects, so an episode of a vector environment
is the episode of a single one with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from memopd_env.env import MemOPDEnv
from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage, RetrievalError, search

Observations = dict[str, Any]


class MemOPDVectorEnv(gym.vector.VectorEnv[Observations, Sequence[str], np.ndarray]):
    """``num_envs`` MemOPD environments that search together; ``gymnasium.make_vec`` returns this.

    Observations are a dict of tuples of strings (``task``, ``memory``, ``information``) and an integer array
    (``turns_left``), all of length ``num_envs``; actions are any sequence of ``num_envs`` strings. Infos have
    Gymnasium's usual vector form, e.g. ``infos["episode"]["em"][i]`` where ``infos["_episode"][i]``.

    If the retriever fails, under ``on_retriever_error="truncate"`` the episodes of all environments that searched in
    that step end, since they shared the search; under ``raise`` the error is raised before any environment has moved.

    ``RecordEpisodeStatistics`` needs ``stats_key="statistics"`` or the like: ``episode`` is taken by the environment's
    own record.

    Args:
        num_envs: How many.
        autoreset_mode: ``NextStep`` (the step after the last one resets and ignores the action), ``SameStep`` (the last
            step returns the next episode's first observation, the old one is in ``final_obs`` and ``final_info``) or
            ``Disabled`` (``reset(options={"reset_mask": mask})`` is up to the caller), as Gymnasium defines them.
        **kwargs: As for :class:`MemOPDEnv`.

    Raises:
        ConfigError: If ``num_envs`` is less than 1, or an argument of the environment makes no sense.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (as gymnasium declares it)
        "render_modes": ["ansi"],
        "render_fps": 1,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self, num_envs: int = 1, *, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP, **kwargs: Any
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}; it must be at least 1")
        first = MemOPDEnv(**kwargs)
        shared = kwargs | {
            "tasks": first.tasks,
            "split": None,
            "retriever": first.retriever,
            "max_turns": first.max_turns,
        }
        self.envs = [first, *(MemOPDEnv(**shared) for _ in range(num_envs - 1))]
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: list[dict[str, Any]] = [{}] * num_envs
        self._done = np.zeros(num_envs, dtype=np.bool_)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment."""
        return tuple(env.np_random_seed for env in self.envs)

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each environment."""
        return tuple(env.np_random for env in self.envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode in every environment.

        Args:
            seed: One seed per environment, or one number s for s, s+1, s+2, …
            options: ``task_index``: one index for all, or one per environment. ``reset_mask``: a boolean array; only
                where it is True an episode is started.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        chosen = range(self.num_envs) if mask is None else np.flatnonzero(self._checked_mask(mask)).tolist()
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        indices = options.get("task_index")
        indices = [indices] * self.num_envs if indices is None or isinstance(indices, int) else list(indices)
        if len(seeds) != self.num_envs or len(indices) != self.num_envs:
            raise ConfigError(f"seed and task_index must be one number or {self.num_envs} numbers, one per environment")
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        for i in chosen:
            self._observations[i], infos[i] = self.envs[i].reset(seed=seeds[i], options={"task_index": indices[i]})
            self._done[i] = False
        return self._batch(), batch_infos(infos)

    def step(self, actions: Sequence[str]) -> tuple[Observations, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one turn in every environment with at most one search for all of them.

        Raises:
            RetrievalError: If the retriever fails and ``on_retriever_error`` is ``raise``.
        """
        if len(actions) != self.num_envs:
            raise ConfigError(f"{len(actions)} actions for {self.num_envs} environments")
        resetting = self._done.copy() if self.autoreset_mode is AutoresetMode.NEXT_STEP else np.zeros_like(self._done)
        queries = [None if resetting[i] else env.begin_step(actions[i]) for i, env in enumerate(self.envs)]
        found = self._search(queries)
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=np.bool_)
        truncations = np.zeros(self.num_envs, dtype=np.bool_)
        infos: list[dict[str, Any]] = []
        for i, env in enumerate(self.envs):
            if resetting[i]:
                observation, info = env.reset()
            else:
                observation, rewards[i], terminations[i], truncations[i], info = env.finish_step(found[i])
                if (terminations[i] or truncations[i]) and self.autoreset_mode is AutoresetMode.SAME_STEP:
                    final = {"final_obs": observation, "final_info": info}
                    observation, info = env.reset()
                    info |= final
            self._observations[i] = observation
            infos.append(info)
        self._done = terminations | truncations
        return self._batch(), rewards, terminations, truncations, batch_infos(infos)

    def render(self) -> tuple[str | None, ...]:  # type: ignore[override]
        """Render each environment."""
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute, of each environment."""
        attributes = [getattr(env, name) for env in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in attributes)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of each environment."""
        return tuple(getattr(env, name) for env in self.envs)

    def _search(self, queries: Sequence[str | None]) -> list[Sequence[Passage] | RetrievalError | None]:
        asked = [query for query in queries if query is not None]
        if not asked:
            return [None] * self.num_envs
        first = self.envs[0]
        try:
            answers = iter(search(first.retriever, asked, first.top_k))
        except RetrievalError as error:
            if first.on_retriever_error == "raise":
                raise
            return [None if query is None else error for query in queries]
        return [None if query is None else next(answers) for query in queries]

    def _batch(self) -> Observations:
        texts = {name: tuple([o[name] for o in self._observations]) for name in ("task", "memory", "information")}
        return texts | {"turns_left": np.array([o["turns_left"] for o in self._observations], dtype=np.int64)}

    def _checked_mask(self, mask: Any) -> np.ndarray:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ConfigError(f"reset_mask must be a boolean array of length {self.num_envs}")
        return mask


def batch_infos(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Turn the infos of n environments into one, in the form that Gymnasium's vector environments have.

    Every key becomes an array of length n with a mask ``_key`` beside it; dicts become dicts of such arrays, except
    that of ``final_obs``. It is ``VectorEnv._add_info`` key by key instead of environment by environment, which is
    several times faster.

    Args:
        infos: One info an environment; empty where there is none.
    """
    columns: dict[str, list[tuple[int, Any]]] = {}
    for i, info in enumerate(infos):
        for key, value in info.items():
            columns.setdefault(key, []).append((i, value))
    batch: dict[str, Any] = {}
    for key, entries in columns.items():
        mask = np.zeros(len(infos), dtype=np.bool_)
        kind = type(entries[0][1])
        if kind is dict and key != "final_obs":
            nested: list[dict[str, Any]] = [{}] * len(infos)
            for i, value in entries:
                nested[i] = value
                mask[i] = True
            batch[key] = batch_infos(nested)
        else:
            array = np.zeros(len(infos), kind) if kind in (int, float, bool) else np.full(len(infos), None, object)
            for i, value in entries:
                array[i] = value
                mask[i] = True
            batch[key] = array
        batch[f"_{key}"] = mask
    return batch
