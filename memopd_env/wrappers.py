"""Other shapes of the same episode: one string, chat messages, a file.

The context behind every observation is in ``info["context"]``; the wrappers show it differently and change nothing
else. They go directly around the environment that ``gymnasium.make`` returns, in any order with Gymnasium's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from memopd_env.memory import Segment, SegmentKind
from memopd_env.spaces import ChatMessages, UnicodeText

_ROLES = {SegmentKind.TASK: "user", SegmentKind.ACTION: "assistant", SegmentKind.INFORMATION: "user"}


def context_messages(context: Iterable[Segment]) -> list[dict[str, str]]:
    """Write a context as chat messages: task and information come from the user, actions from the assistant.

    Neighbours of the same role become one message, since many chat templates insist that roles alternate; empty
    segments are left out.
    """
    messages: list[dict[str, str]] = []
    for segment in context:
        role = _ROLES[segment.kind]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += segment.text
        elif segment.text:
            messages.append({"role": role, "content": segment.text})
    return messages


class _ContextView(gym.Wrapper[Any, str, Any, str], gym.utils.RecordConstructorArgs):
    """Replaces the observation by a view of the context."""

    def __init__(self, env: gym.Env[Any, str], space: gym.Space[Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        _, info = self.env.reset(seed=seed, options=options)
        return self.view(info["context"]), info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play one turn."""
        _, reward, terminated, truncated, info = self.env.step(action)
        return self.view(info["context"]), reward, terminated, truncated, info

    def view(self, context: Sequence[Segment]) -> Any:
        """Return the observation that shows this context."""
        raise NotImplementedError


class TextObservation(_ContextView):
    """The observation is the whole context as one string.

    Args:
        env: A MemOPD environment.
    """

    def __init__(self, env: gym.Env[Any, str]) -> None:
        super().__init__(env, UnicodeText())

    def view(self, context: Sequence[Segment]) -> str:
        """Join the segments."""
        return "".join([segment.text for segment in context])


class ChatObservation(_ContextView):
    """The observation is the context as chat messages, as OpenAI-compatible endpoints take them.

    Args:
        env: A MemOPD environment.
    """

    def __init__(self, env: gym.Env[Any, str]) -> None:
        super().__init__(env, ChatMessages())

    def view(self, context: Sequence[Segment]) -> list[dict[str, str]]:
        """Write the segments as messages."""
        return context_messages(context)


class RecordEpisodes(gym.Wrapper[Any, str, Any, str], gym.utils.RecordConstructorArgs):
    r"""Append every finished episode to a JSONL file.

    A line is ``{"version", "task_id", "seed", "reward", "terminated", "truncated", "turns", "episode"}``. A turn is
    ``{"context", "action", "reward"}``, where ``context`` lists the segments that the action was an answer to, each
    ``{"kind", "turn", "text"}``; ``episode`` is ``info["episode"]``, or null if something outside the environment, e.g.
    ``TimeLimit``, ended it. Episodes that are reset before their end are not written. Text is stored in ASCII with
    ``\\u`` escapes, so that any text comes back as it was.

    Args:
        env: A MemOPD environment, wrapped or not.
        path: The file; lines are appended, folders made.
    """

    VERSION = 1

    def __init__(self, env: gym.Env[Any, str], path: str | Path) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, path=str(path))
        super().__init__(env)
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._record: dict[str, Any] = {}
        self._context: list[dict[str, Any]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._record = {
            "version": self.VERSION,
            "task_id": info["task_id"],
            "seed": seed,
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "turns": [],
            "episode": None,
        }
        self._context = _plain(info["context"])
        return observation, info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play one turn, and write the episode if it was the last."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        record = self._record
        record["turns"].append({"context": self._context, "action": action, "reward": float(reward)})
        record["reward"] += float(reward)
        self._context = _plain(info["context"])
        if terminated or truncated:
            record |= {"terminated": terminated, "truncated": truncated, "episode": info.get("episode")}
            with self._path.open("a", encoding="ascii") as file:
                file.write(json.dumps(record) + "\n")
        return observation, reward, terminated, truncated, info


def _plain(context: Iterable[Segment]) -> list[dict[str, Any]]:
    return [{"kind": segment.kind.value, "turn": segment.turn, "text": segment.text} for segment in context]
