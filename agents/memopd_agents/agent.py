"""An agent is anything that turns an observation into an action, found by name, by path or by plug-in.

Two methods are enough for a stranger's agent; it needs to inherit from nothing and to import nothing of ours. A plain
function will do as well.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from memopd_env.errors import ConfigError, MemOPDError

GROUP = "memopd.agents"


@runtime_checkable
class Agent(Protocol):
    """Plays one episode at a time."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the next action, e.g. ``<think>…</think><search>…</search>``.

        Args:
            observation: What ``reset`` or ``step`` of the environment returned: ``task``, ``memory``, ``information``,
                ``turns_left``.
            info: The info beside it; ``info["context"]`` holds the segments behind the observation.
        """
        ...

    def reset(self, seed: int | None = None) -> None:
        """Forget the episode before; randomness of the next one comes from ``seed``."""
        ...


class FunctionAgent:
    """A plain function as an agent: it gets what :meth:`Agent.act` gets and remembers nothing.

    Args:
        function: ``(observation, info) -> action``.
    """

    def __init__(self, function: Callable[[Any, Mapping[str, Any]], str]) -> None:
        self._function = function

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Call the function."""
        return self._function(observation, info)

    def reset(self, seed: int | None = None) -> None:
        """Do nothing."""


def agent_factory(spec: str, offered: Mapping[str, Any] | None = None, **arguments: Any) -> Callable[[], Agent]:
    """Return a function that makes agents, one for each environment that plays at the same time.

    Args:
        spec: A name of the entry-point group ``memopd.agents`` (``oracle``, ``random``, ``chat``, or a plug-in's), or
            ``module:Class``, or ``module:function`` for a function ``(observation, info) -> action``.
        offered: What an agent gets only if its constructor has a parameter of that name, e.g. ``tasks`` and ``tags``.
        **arguments: What its constructor gets in any case.

    Raises:
        ConfigError: If there is no such agent, or what it names cannot be called with these arguments.
    """
    target = _load(spec)
    if not callable(target):
        raise ConfigError(f"agent {spec!r} is {target!r}, which is neither a class nor a function")
    if not inspect.isclass(target):
        if arguments:
            raise ConfigError(f"agent {spec!r} is a function, so it takes no arguments ({', '.join(arguments)})")
        return lambda: FunctionAgent(cast(Any, target))
    try:
        parameters = inspect.signature(target).parameters
        wanted = {name: value for name, value in (offered or {}).items() if name in parameters}
        inspect.signature(target).bind(**{**wanted, **arguments})
    except TypeError as error:
        known = ", ".join(inspect.signature(target).parameters) or "none"
        raise ConfigError(f"agent {spec!r}: {error}; its arguments are: {known}") from None

    def make() -> Agent:
        try:
            agent = target(**{**wanted, **arguments})
        except MemOPDError:
            raise
        except Exception as error:  # a stranger's code
            raise ConfigError(f"agent {spec!r} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(agent, Agent):
            raise ConfigError(f"agent {spec!r} lacks act(observation, info) or reset(seed)")
        return agent

    return make


def _load(spec: str) -> Any:
    module, colon, name = spec.partition(":")
    if colon:
        # A console script does not look for modules where it is run, but that is where a stranger's agent lies.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"agent {spec!r} cannot be imported: {error}") from error
        return target
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if spec not in plugins:
        raise ConfigError(
            f"there is no agent {spec!r}: use {', '.join(sorted(plugins))}, a model folder, or module:Class"
        )
    try:
        return plugins[spec].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"agent {spec!r} ({plugins[spec].value}) cannot be imported: {error}") from error
