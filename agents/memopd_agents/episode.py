"""The token-exact record of one task played to its end.

A call stores the ids the model was given and the ids it sampled, nothing re-encoded, so the trainer can rebuild the
very state of every sampled token. Two lists of ids are enough to build one by hand; everything else has a default.

On disk an episode is one line of JSON in a file that only grows. A line that a crash cut short is dropped when the
file is opened again; any other malformed line is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar, cast

from memopd_env.errors import MemOPDError
from memopd_env.memory import SegmentKind

_Record = TypeVar("_Record")
_NUMBER = (int, float)
_KINDS = tuple(kind.value for kind in SegmentKind)


class EpisodeFileError(MemOPDError, ValueError):
    """An episode file is missing or malformed; the message names file, line and cure."""


@dataclass(frozen=True)
class SegmentSpan:
    """Where one segment of the context lies in a call's prompt.

    Attributes:
        kind: ``task``, ``action`` or ``information``.
        turn: The turn it stems from; -1 for the task.
        start: First position in ``prompt_ids``.
        end: One past the last position.
        exact: False for a piece cut out of an action, whose ids were made from text.
    """

    kind: str
    turn: int
    start: int
    end: int
    exact: bool = True


@dataclass
class Call:
    """One model invocation: prompt token ids in, action token ids out.

    Attributes:
        prompt_ids: All ids the model saw, in order; empty for an agent that works on text.
        action_ids: All ids it sampled, including stop strings and EOS; empty for an agent that works on text.
        logprobs: Natural-log probability of each sampled id under the distribution it was sampled from, or None.
        segments: Origin of every prompt position; empty when built by hand.
        finish_reason: ``stop`` (stop string), ``eos``, ``length`` or ``abort``.
        text: The decoded action, for people; never encoded again.
        seed: Seed of this request.
        policy_version: Optimiser steps the sampling weights had behind them.
        context: What the model saw as text, one ``(kind, turn, text)`` per segment; for people, and the only record
            of a prompt without ids.
    """

    prompt_ids: list[int]
    action_ids: list[int]
    logprobs: list[float] | None = None
    segments: list[SegmentSpan] = field(default_factory=list)
    finish_reason: str = "stop"
    text: str = ""
    seed: int | None = None
    policy_version: int = 0
    context: list[tuple[str, int, str]] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class Episode:
    """One task played to its end.

    Attributes:
        calls: In the order in which they were sampled.
        reward: Sum of per-question exact matches, 0..N.
        task_id: Which task was played.
        info: The environment's ``info["episode"]`` at the end (answers, em, f1, sub_em, stop reason, ...).
        seed: Episode seed.
        number: Position in its run, which a resumed run goes by.
        seconds: Wall-clock time from reset to end, in the company it was played in; not part of what the episode is.
    """

    calls: list[Call]
    reward: float
    task_id: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    number: int = 0
    seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> str:
        """Return the episode as one line of JSON, without the newline."""
        calls = [{**vars(call), "segments": [vars(span) for span in call.segments]} for call in self.calls]
        return json.dumps({**vars(self), "calls": calls}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Episode:
        """Read what :meth:`to_json` wrote; unknown fields are ignored, absent ones have their defaults.

        Raises:
            ValueError: If the line is not an episode.
        """
        try:
            record = json.loads(line)
            calls = [_known(Call, call) for call in record["calls"]]
            for call in calls:
                call.segments = [_known(SegmentSpan, cast(Any, span)) for span in call.segments]
                call.context = [(kind, turn, text) for kind, turn, text in call.context]
            episode = _known(cls, {**record, "calls": calls})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        _check_types(episode)
        return episode


def _known(kind: Callable[..., _Record], record: dict[str, Any]) -> _Record:
    names = {known.name for known in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in record.items() if name in names})


def _check_types(episode: Episode) -> None:
    """Refuse a record whose fields are not what they are for, so that nobody who reads episodes needs to look again.

    Raises:
        ValueError: Names the field.
    """
    _check(episode, reward=_NUMBER, task_id=str, info=dict, seed=(int, NoneType), number=int, seconds=_NUMBER)
    for call in episode.calls:
        _check(call, finish_reason=str, text=str, seed=(int, NoneType), policy_version=int, usage=dict)
        for name in ("prompt_ids", "action_ids"):
            ids = getattr(call, name)
            if not isinstance(ids, list) or any(type(item) is not int or item < 0 for item in ids):
                raise ValueError(f"{name} must be a list of token ids")
        if call.logprobs is not None and (
            not isinstance(call.logprobs, list) or any(type(item) not in _NUMBER for item in call.logprobs)
        ):
            raise ValueError("logprobs must be a list of numbers")
        for span in call.segments:
            _check(span, kind=str, turn=int, start=int, end=int, exact=bool)
        for kind, turn, text in call.context:
            if kind not in _KINDS or type(turn) is not int or not isinstance(text, str):
                raise ValueError(f"context must hold (kind, turn, text) with a kind of {', '.join(_KINDS)}")
        if any(span.kind not in _KINDS for span in call.segments):
            raise ValueError(f"the kind of a segment must be one of {', '.join(_KINDS)}")


def _check(record: object, **kinds: Any) -> None:
    for name, kind in kinds.items():
        value = getattr(record, name)
        # True is an int to Python, and to nobody else.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = repr(value)
            raise ValueError(f"{name} is {shown if len(shown) <= 60 else shown[:57] + '...'}")


def read_episodes(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of a file in the order of its lines; a last line that was cut short is left out.

    Raises:
        EpisodeFileError: If the file is missing or a line is not an episode.
    """
    path = Path(path)
    if not path.is_file():
        raise EpisodeFileError(f"{path}: no such episode file; memopd eval and memopd train write one")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Episode.from_json(line.decode())
            except ValueError as error:
                raise EpisodeFileError(
                    f"{path}, line {number}: not an episode ({error}); remove the line or start a new file"
                ) from error


def write_episodes(path: str | Path, episodes: Iterable[Episode]) -> None:
    """Write episodes to a new file, replacing one that is there only once all are written."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with EpisodeLog(partial) as log:
        log.append(*episodes)
    partial.replace(path)


class EpisodeLog:
    """An episode file open for appending.

    Opening it removes a last line that was cut short. Each :meth:`append` is one write followed by a flush to disk,
    so an episode is either there or not.

    Args:
        path: The file; made, with its folder, if it is not there.

    Attributes:
        episodes: What the file held when it was opened.

    Raises:
        EpisodeFileError: If a line is not an episode.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.episodes: list[Episode] = []
        if self.path.exists():
            self.episodes = list(read_episodes(self.path))
            _drop_torn_line(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, *episodes: Episode) -> None:
        """Append episodes durably."""
        data = "".join(episode.to_json() + "\n" for episode in episodes).encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start > 0:
            size = min(start, 1 << 20)
            file.seek(start - size)
            newline = file.read(size).rfind(b"\n")
            if newline >= 0:
                file.truncate(start - size + newline + 1)
                return
            start -= size
        file.truncate(0)
